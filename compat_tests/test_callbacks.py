"""What the stock callback does is still done, and nothing is left behind."""

import copy
import functools
import inspect
import pickle

import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import GradientLogger, GradlogWarning, TensorBoard, errors
from legacy_gradlog.arguments import NATIVE

from .conftest import messages_of
from .frameworks import argument_names, files_below, small_data, stock_class
from .oracle import (
    assert_step_level,
    expected_keys,
    gradient_events,
    keys,
    read_events,
)


def run_fit(fw, callback, **kwargs):
    trained = fw.small_model()
    fw.fit(
        trained.model,
        *small_data(),
        epochs=2,
        validation_data=small_data(rows=20, seed=1),
        callbacks=[callback],
        **kwargs,
    )
    return trained


def test_the_stock_callback_writes_what_it_always_wrote(fw, tmp_path):
    """The same runs, tags and steps as without us, and the gradients in its files."""
    run_fit(fw, stock_class(fw)(str(tmp_path / "stock"), histogram_freq=1))
    fw.clear()
    callback = TensorBoard(str(tmp_path / "ours"), 1, write_grads=True)
    trained = run_fit(fw, callback)

    stock = read_events(fw, tmp_path / "stock")
    ours = read_events(fw, tmp_path / "ours")
    gradients = gradient_events(ours)
    run = "train" if fw.eager else "."
    assert keys(gradients) == expected_keys(trained.paths, range(2), run)
    # The graph's own name counts the models that the process has made.
    rest = [event for event in ours if event not in gradients]
    assert keys(rest) == keys(stock)
    files = files_below(tmp_path / "ours")
    assert sorted(files) == sorted(files_below(tmp_path / "stock"))
    assert len(files[run]) == 1


def test_the_stock_callback_gets_every_hook_once(fw, tmp_path, monkeypatch):
    """The same calls in the same order as without us."""
    calls = []

    def spied(name, hook):
        @functools.wraps(hook)
        def call(self, *args, **kwargs):
            numbered = "batch" in name or "epoch" in name
            calls.append((name, args[0] if numbered else None))
            return hook(self, *args, **kwargs)

        return call

    cls = stock_class(fw)
    for name in dir(cls):
        if name.startswith("on_"):
            monkeypatch.setattr(cls, name, spied(name, getattr(cls, name)))
    run_fit(fw, cls(str(tmp_path / "stock")))
    alone = list(calls)
    del calls[:]
    fw.clear()
    run_fit(fw, TensorBoard(str(tmp_path / "ours"), write_grads=True))
    assert calls == alone
    for call in [("on_train_begin", None), ("on_epoch_begin", 1), ("on_epoch_end", 1)]:
        assert calls.count(call) == 1


def test_without_write_grads_no_gradient_is_written(fw, tmp_path):
    run_fit(fw, TensorBoard(str(tmp_path)))
    assert gradient_events(read_events(fw, tmp_path)) == []
    assert read_events(fw, tmp_path)


def test_every_native_argument_is_known():
    """`NATIVE` names every argument that the installed stock callbacks have."""
    own = {"self", "args", "kwargs", "log_dir", "histogram_freq", "write_grads"}
    for fw in _frameworks():
        assert argument_names(stock_class(fw)) - own <= set(NATIVE), fw.name


def _frameworks():
    from .conftest import available

    return available()


VALUES = {
    "batch_size": 4,
    "write_graph": False,
    "write_images": True,
    "write_steps_per_second": True,
    "update_freq": 8,
    "profile_batch": 0,
    "embeddings_freq": 0,
    "embeddings_layer_names": ["d1"],
    "embeddings_metadata": {"d1": "meta.tsv"},
    "embeddings_data": [np.ones((2, 4), "float32")],
}


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_native_arguments_are_handed_on_or_warned_about(
    fw, tmp_path, monkeypatch, name
):
    cls = stock_class(fw)
    original, handed = cls.__init__, []

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        handed.append(kwargs)
        original(self, *args, **kwargs)

    monkeypatch.setattr(cls, "__init__", init)
    callback = TensorBoard(str(tmp_path), **{name: VALUES[name]})
    model = fw.small_model().model
    if name in argument_names(cls):
        callback.set_model(model)  # A warning of ours is an error here.
        (kwargs,) = handed
        assert kwargs[name] is VALUES[name]
    else:
        with pytest.warns(GradlogWarning) as caught:
            callback.set_model(model)
        assert str(caught[0].message) == (
            "The TensorBoard callback of this Keras has no `{}`: {}.".format(
                name, NATIVE[name]
            )
        )
        (kwargs,) = handed
        assert name not in kwargs


def test_copies_before_training_train_alike(fw, tmp_path):
    original = TensorBoard(
        str(tmp_path / "a"),
        write_grads=True,
        grads_freq=2,
        grads_layers=["d1"],
        grads_scalars=["max_abs"],
        write_graph=False,
    )
    copied = copy.deepcopy(original)
    pickled = pickle.loads(pickle.dumps(original))
    for number, callback in enumerate([copied, pickled]):
        assert type(callback).__name__ == "TensorBoard"
        callback.log_dir = str(tmp_path / str(number))
        run_fit(fw, callback)
        run = "train" if fw.eager else "."
        events = gradient_events(read_events(fw, callback.log_dir))
        assert keys(events) == expected_keys(
            ["d1/kernel", "d1/bias"], range(0, 10, 2), run, ("max_abs",)
        )
        assert callback.write_graph is False
    assert copy.copy(TensorBoard(str(tmp_path), 3)).histogram_freq == 3
    logger = GradientLogger(str(tmp_path / "b"), freq=3, layers=["d1"])
    copies = [copy.deepcopy(logger), pickle.loads(pickle.dumps(logger))]
    for number, callback in enumerate(copies):
        callback.log_dir = str(tmp_path / "logger" / str(number))
        run_fit(fw, callback)
        events = read_events(fw, callback.log_dir)
        assert keys(events) == expected_keys(["d1/kernel", "d1/bias"], range(0, 10, 3))


class Stop(Exception):
    """Raised by the user's code in the middle of `fit`."""


def failing_callback(fw, error, batches=2):
    class Failing(fw.keras.callbacks.Callback):
        seen = 0

        def on_batch_end(self, batch, logs=None):
            Failing.seen += 1
            if Failing.seen == batches:
                raise error

    return Failing()


def state_of(model):
    """Returns what a fit may leave on a model and its optimizer."""
    target = model
    while "train_function" not in vars(target) and hasattr(target, "model"):
        target = target.model
    function = getattr(target, "_fit_function", None) or target.train_function
    return {
        "model": sorted(vars(model)),
        "optimizer": sorted(vars(model.optimizer)),
        "function": (id(function), type(function), sorted(vars(function))),
        "train_tf_function": id(getattr(target, "train_tf_function", None)),
    }


@pytest.mark.skipif(
    Version("2.0") <= Version(tf.__version__) < Version("2.2"),
    reason="these loops have their train function elsewhere: test_tf20",
)
@pytest.mark.parametrize("error", [None, Stop(), KeyboardInterrupt()], ids=repr)
def test_nothing_is_left_behind(fw, tmp_path, error):
    trained = fw.small_model()
    model = trained.model
    x, y = small_data()
    fw.fit(model, x, y)
    before = state_of(model)
    callbacks = [
        TensorBoard(str(tmp_path / "a"), write_grads=True),
        GradientLogger(str(tmp_path / "b"), freq="batch"),
    ]
    if error is None:
        fw.fit(model, x, y, callbacks=callbacks)
    else:
        try:
            fw.fit(model, x, y, callbacks=callbacks + [failing_callback(fw, error)])
        except type(error):
            pass
        error.__traceback__ = None
    assert state_of(model) == before
    # Records of the updates before the exception are on disk, and `fit` goes on.
    events = read_events(fw, tmp_path / "b")
    updates = 5 if error is None else 2
    assert keys(events) == expected_keys(trained.paths, range(5, 5 + updates))
    logger = GradientLogger(str(tmp_path / "c"), freq="batch")
    weights = fw.recorder(trained)
    fw.fit(model, x, y, callbacks=[logger, weights])
    events = read_events(fw, tmp_path / "c")
    steps = range(5 + updates, 10 + updates)
    assert keys(events) == expected_keys(trained.paths, steps)
    assert_step_level(events, weights, trained.paths, steps, first=5 + updates)


@pytest.mark.skipif(
    Version("2.0") <= Version(tf.__version__) < Version("2.2"),
    reason="these loops have their train function elsewhere: test_tf20",
)
def test_evaluating_logs_nothing(fw, tmp_path):
    """Keras tells a callback of the model in `evaluate` too, where it has that."""
    trained = fw.small_model()
    x, y = small_data()
    fw.fit(trained.model, x, y)
    trained.model.evaluate(x, y, verbose=0)
    before = state_of(trained.model)
    parameters = inspect.signature(trained.model.evaluate).parameters
    logger = GradientLogger(str(tmp_path / "logs"), freq="batch")
    if "callbacks" in parameters:
        trained.model.evaluate(x, y, verbose=0, callbacks=[logger])
    assert state_of(trained.model) == before
    assert not (tmp_path / "logs").exists()


def test_frozen_layers_are_left_out_silently(fw, tmp_path):
    trained = fw.small_model()
    trained.model.get_layer("d1").trainable = False
    trained.model.compile(fw.optimizer(), "mse")
    logger = GradientLogger(str(tmp_path), scalars=[])
    fw.fit(trained.model, *small_data(), callbacks=[logger])
    expected = ["bn/gamma", "bn/beta", "d2/kernel", "d2/bias"]
    assert keys(read_events(fw, tmp_path)) == expected_keys(expected, [0], scalars=())


def test_a_failure_of_ours_ends_the_logging_only(fw, tmp_path, monkeypatch):
    errors.strict = False
    trained = fw.small_model()
    logger = GradientLogger(str(tmp_path), freq="batch")
    x, y = small_data()
    weights = fw.recorder(trained)

    monkeypatch.setattr("legacy_gradlog.writers.OwnWriter", BrokenWriter)
    with pytest.warns(GradlogWarning) as caught:
        fw.fit(trained.model, x, y, epochs=2, callbacks=[logger, weights])
    messages = messages_of(caught)
    assert messages == [
        "Gradient logging is switched off for this run, and training goes on. Cause: "
        "OSError: No space left on device"
    ]
    assert len(weights.values) == 11


def test_a_keras_that_is_not_understood_trains_on(fw, tmp_path, monkeypatch):
    errors.strict = False

    def attach(self):
        raise AttributeError("no such train function")

    for name in ("function.FunctionEngine", "graph.GraphEngine"):
        monkeypatch.setattr("legacy_gradlog.engines.{}._attach".format(name), attach)
    trained = fw.small_model()
    weights = fw.recorder(trained)
    callbacks = [TensorBoard(str(tmp_path), write_grads=True), weights]
    with pytest.warns(GradlogWarning) as caught:
        fw.fit(trained.model, *small_data(), epochs=2, callbacks=callbacks)
    messages = messages_of(caught)
    assert messages == [
        "Gradient logging is switched off for this run, and training goes on. Cause: "
        "AttributeError: no such train function"
    ]
    assert len(weights.values) == 11
    events = read_events(fw, tmp_path)
    assert events and not gradient_events(events)


class BrokenWriter:
    """A writer whose disk is full."""

    def __init__(self, log_dir):
        pass

    def write(self, event):
        raise OSError("No space left on device")

    def flush(self):
        pass

    def close(self):
        pass
