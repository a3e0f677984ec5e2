"""Bad input: a clear error before the first training step."""

import os

import pytest

from legacy_gradlog import (
    GradientLogger,
    InvalidArgumentError,
    LogDirectoryError,
    TensorBoard,
    UnknownArgumentError,
)

from .frameworks import small_data

FREQ = '`{}` must be "epoch", "batch" or an integer >= 1. Received: {!r}.'
REDUCE = (
    '`{}` must be "last" (the last update of the epoch) or "pool" (all of its updates '
    "in one histogram). Received: {!r}."
)
SCALARS = (
    '`{}` must be a list of names out of "mean_abs", "norm", "max_abs". Received: {!r}.'
)
LAYERS = "`{}` must be None or a list of layer names and patterns. Received: {!r}."
FLAG = "`{}` must be True or False. Received: {!r}."


@pytest.mark.parametrize(
    "name, value, received, message",
    [("freq", value, value, FREQ) for value in (0, -2, "weekly", True, 1.5, None)]
    + [("reduce", value, value, REDUCE) for value in ("mean", None)]
    + [("scalars", ["norm", "median"], "median", SCALARS)]
    + [("scalars", value, value, SCALARS) for value in ("norm", 3)]
    + [("scalars", [[]], [], SCALARS)]
    + [("layers", "dense", "dense", LAYERS)]
    + [("layers", value, tuple(value), LAYERS) for value in ([], [1])]
    + [("clipped", "yes", "yes", FLAG)],
    ids=str,
)
def test_wrong_values(name, value, received, message):
    for prefix, make in (("", _logger), ("grads_", _tensorboard)):
        with pytest.raises(InvalidArgumentError) as caught:
            make(**{prefix + name: value})
        assert isinstance(caught.value, ValueError)
        assert str(caught.value) == message.format(prefix + name, received)


def _logger(**kwargs):
    return GradientLogger("logs", **kwargs)


def _tensorboard(**kwargs):
    return TensorBoard("logs", write_grads=True, **kwargs)


@pytest.mark.parametrize("value", [-1, True, 0.5, "1", None], ids=str)
def test_wrong_histogram_freq(value):
    with pytest.raises(InvalidArgumentError) as caught:
        TensorBoard("logs", value)
    assert str(caught.value) == (
        "`histogram_freq` must be an integer >= 0. Received: {!r}.".format(value)
    )


@pytest.mark.parametrize("value", [None, 3, ""], ids=str)
@pytest.mark.parametrize("make", [GradientLogger, TensorBoard])
def test_wrong_log_dir(make, value):
    with pytest.raises(InvalidArgumentError) as caught:
        make(value)
    assert str(caught.value) == (
        "`log_dir` must be the name of a directory. Received: {!r}.".format(value)
    )


@pytest.mark.parametrize(
    "name, nearest",
    [("batchsize", "batch_size"), ("write_grad", "write_grads")]
    + [("grad_freq", "grads_freq"), ("embedding_freq", "embeddings_freq")],
)
def test_unknown_keyword(name, nearest):
    with pytest.raises(UnknownArgumentError) as caught:
        TensorBoard("logs", **{name: 1})
    assert isinstance(caught.value, TypeError)
    assert str(caught.value) == (
        "`TensorBoard` must get arguments that some generation of it has. "
        "Received: {!r}. Did you mean {!r}?".format(name, nearest)
    )


def test_third_positional_argument():
    with pytest.raises(UnknownArgumentError) as caught:
        TensorBoard("logs", 1, 32)
    assert isinstance(caught.value, TypeError)
    assert "`batch_size=...` or `write_graph=...`" in str(caught.value)
    assert "Received: 32 in third position" in str(caught.value)


def fails_before_training(fw, callback, error):
    """Returns the message of the error that `fit` must raise before any update."""
    trained = fw.small_model()
    before = trained.weights()
    with pytest.raises(error) as caught:
        fw.fit(trained.model, *small_data(), callbacks=[callback])
    after = trained.weights()
    assert all((before[path] == after[path]).all() for path in trained.paths)
    return str(caught.value)


@pytest.mark.parametrize("make", [GradientLogger, TensorBoard])
def test_unwritable_log_dir(fw, tmp_path, make):
    blocker = tmp_path / "file"
    blocker.write_text("no directory")
    log_dir = str(blocker / "logs")
    # The second one lets root write, by its permissions, but takes no file.
    for log_dir in (log_dir, "/proc/self"):
        message = fails_before_training(fw, make(log_dir), LogDirectoryError)
        assert message.startswith(
            "`log_dir` must be a directory that can be written. Received: {!r}".format(
                log_dir
            )
        )


def test_pattern_without_match(fw, tmp_path):
    callback = GradientLogger(str(tmp_path), layers=["d1", "dens*"])
    message = fails_before_training(fw, callback, InvalidArgumentError)
    assert message == (
        "`layers` must name layers or weights that are trained. Received: 'dens*', "
        "which matches none of: d1, d1/kernel, d1/bias, bn, bn/gamma, bn/beta, d2, "
        "d2/kernel, d2/bias."
    )
    callback = TensorBoard(str(tmp_path), write_grads=True, grads_layers=["conv"])
    message = fails_before_training(fw, callback, InvalidArgumentError)
    assert message.startswith("`grads_layers` must name layers")


def test_model_without_optimizer(fw, tmp_path):
    model = fw.small_model().model
    model.optimizer = None
    with pytest.raises(InvalidArgumentError) as caught:
        GradientLogger(str(tmp_path)).set_model(model)
    assert str(caught.value) == (
        "The model must be compiled before its gradients can be logged. Received: a "
        "model without optimizer. Call `model.compile` first."
    )


def test_log_dir_may_be_a_path(fw, tmp_path):
    trained = fw.small_model()
    fw.fit(trained.model, *small_data(), callbacks=[GradientLogger(tmp_path)])
    assert any("tfevents" in name for name in os.listdir(str(tmp_path)))
