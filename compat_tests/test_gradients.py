"""The logged gradient is the one that the optimizer used: every way to feed `fit`.

The oracle is the change of the weights under plain SGD.
"""

import numpy as np
import pytest

from legacy_gradlog import GradientLogger, TensorBoard

from .frameworks import BATCH, rich_data, small_data
from .oracle import (
    Gradient,
    assert_histogram,
    assert_scalars,
    assert_step_level,
    expected_keys,
    gradient_events,
    keys,
    read_events,
    updates_of,
)

UPDATES = 5  # 40 rows in batches of 8


def gradient_run(fw):
    """Returns the run that `TensorBoard` writes gradients into."""
    return "train" if fw.eager else "."


@pytest.mark.parametrize("freq, period", [("batch", 1), (3, 3)], ids=["batch", "3"])
def test_step_level(fw, tmp_path, freq, period):
    trained = fw.small_model()
    x, y = small_data()
    weights = fw.recorder(trained)
    logger = GradientLogger(str(tmp_path), freq=freq)
    fw.fit(trained.model, x, y, epochs=2, callbacks=[logger, weights])

    events = read_events(fw, tmp_path)
    steps = range(0, 2 * UPDATES, period)
    assert keys(events) == expected_keys(trained.paths, steps)
    assert_step_level(events, weights, trained.paths, steps)


def _touched(ids):
    """Returns the touched rows of the embedding in every update."""
    return [np.unique(ids[i : i + BATCH]) for i in range(0, len(ids), BATCH)]


def test_everything_in_one_model(fw, tmp_path):
    """Nested model, shared layer, embedding, two inputs and outputs, sample weights."""
    trained = fw.rich_model()
    x, y, sample_weight = rich_data()
    weights = fw.recorder(trained)
    logger = GradientLogger(str(tmp_path), freq="batch")
    fw.fit(
        trained.model, x, y, sample_weight=sample_weight, callbacks=[logger, weights]
    )

    events = read_events(fw, tmp_path)
    assert keys(events) == expected_keys(trained.paths, range(UPDATES))
    rows = {"embedding/embeddings": _touched(x[0])}
    assert_step_level(events, weights, trained.paths, range(UPDATES), rows)


def test_sequence(fw, tmp_path):
    trained = fw.small_model()
    x, y = small_data(rows=36)  # the last batch is a short one
    weights = fw.recorder(trained)
    logger = GradientLogger(str(tmp_path), freq="batch")
    fw.fit_stream(
        trained.model, fw.sequence(x, y), epochs=2, callbacks=[logger, weights]
    )

    events = read_events(fw, tmp_path)
    assert keys(events) == expected_keys(trained.paths, range(2 * UPDATES))
    assert_step_level(events, weights, trained.paths, range(2 * UPDATES))


def _generator(x, y):
    while True:
        for start in range(0, len(x), BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]


def test_generator_at_epoch_level(fw, tmp_path):
    trained = fw.small_model()
    x, y = small_data()
    weights = fw.recorder(trained)
    callback = TensorBoard(str(tmp_path), write_grads=True)
    fw.fit_stream(
        trained.model,
        _generator(x, y),
        steps_per_epoch=UPDATES,
        epochs=2,
        callbacks=[callback, weights],
    )
    _assert_last_of_epochs(fw, tmp_path, trained, weights, range(2), gradient_run(fw))


def _assert_last_of_epochs(fw, log_dir, trained, weights, epochs, run):
    events = gradient_events(read_events(fw, log_dir))
    assert keys(events) == expected_keys(trained.paths, epochs, run)
    ends = weights.epochs[1:] + [len(weights.values) - 1]
    for path in trained.paths:
        gradients = updates_of(weights, path)
        for epoch in epochs:
            tag = path + "_0_grad"
            (histogram,) = [e.value for e in events if (e.tag, e.step) == (tag, epoch)]
            assert_histogram(histogram, gradients[ends[epoch] - 1])


@pytest.mark.parametrize(
    "period, validated", [(0, False), (1, True), (2, True)], ids=["0", "1", "2"]
)
def test_last_of_epoch(fw, tmp_path, period, validated):
    """Every epoch, or every n-th; never a gradient of validation data."""
    trained = fw.small_model()
    x, y = small_data()
    weights = fw.recorder(trained)
    fw.fit(
        trained.model,
        x,
        y,
        epochs=4,
        validation_data=small_data(rows=20, seed=1) if validated else None,
        callbacks=[TensorBoard(str(tmp_path), period, write_grads=True), weights],
    )
    epochs = range(0, 4, period or 1)
    _assert_last_of_epochs(fw, tmp_path, trained, weights, epochs, gradient_run(fw))


def test_pool(fw, tmp_path):
    """One histogram over every update of the epoch, an embedding's touched rows too."""
    trained = fw.rich_model()
    x, y, _ = rich_data()
    weights = fw.recorder(trained)
    logger = GradientLogger(
        str(tmp_path), reduce="pool", scalars=["mean_abs", "norm", "max_abs"]
    )
    fw.fit(trained.model, x, y, epochs=2, callbacks=[logger, weights])

    events = read_events(fw, tmp_path)
    scalars = ("mean_abs", "norm", "max_abs")
    assert keys(events) == expected_keys(trained.paths, range(2), scalars=scalars)
    touched = {"embedding/embeddings": _touched(x[0]) * 2}
    for path in trained.paths:
        updates = updates_of(weights, path, touched.get(path))
        for epoch in range(2):
            pool = Gradient.pooled(updates[epoch * UPDATES : (epoch + 1) * UPDATES])
            tag = path + "_0_grad"
            (histogram,) = [e.value for e in events if (e.tag, e.step) == (tag, epoch)]
            assert_histogram(histogram, pool)
            assert_scalars(events, epoch, path, pool)


def test_two_fits_with_one_callback(fw, tmp_path):
    trained = fw.small_model()
    x, y = small_data()
    weights = fw.recorder(trained)
    steps, epochs = str(tmp_path / "steps"), str(tmp_path / "epochs")
    callbacks = [GradientLogger(steps, freq=2), GradientLogger(epochs), weights]
    fw.fit(trained.model, x, y, epochs=2, callbacks=callbacks)
    fw.fit(trained.model, x, y, callbacks=callbacks)

    events = read_events(fw, steps)
    assert keys(events) == expected_keys(trained.paths, range(0, 15, 2))
    assert_step_level(events, weights, trained.paths, range(0, 15, 2))
    _assert_last_of_epochs(fw, epochs, trained, weights, range(3), ".")


def test_two_fits_with_a_new_callback_each(fw, tmp_path):
    """Step level goes on from `optimizer.iterations`; epochs begin at 0 again."""
    trained = fw.small_model()
    x, y = small_data()
    weights = fw.recorder(trained)
    for number in range(2):
        logger = GradientLogger(str(tmp_path / str(number)), freq="batch")
        fw.fit(trained.model, x, y, callbacks=[logger, weights])

    for number in range(2):
        events = read_events(fw, tmp_path / str(number))
        steps = range(number * UPDATES, (number + 1) * UPDATES)
        assert keys(events) == expected_keys(trained.paths, steps)
        assert_step_level(events, weights, trained.paths, steps)


def test_two_loggers_on_one_model(fw, tmp_path):
    trained = fw.small_model()
    x, y = small_data()
    weights = fw.recorder(trained)
    loggers = [
        GradientLogger(str(tmp_path / "2"), freq=2),
        GradientLogger(str(tmp_path / "3"), freq=3, layers=["d2"]),
    ]
    fw.fit(trained.model, x, y, epochs=2, callbacks=loggers + [weights])

    events = read_events(fw, tmp_path / "2")
    assert keys(events) == expected_keys(trained.paths, range(0, 10, 2))
    assert_step_level(events, weights, trained.paths, range(0, 10, 2))
    events = read_events(fw, tmp_path / "3")
    assert keys(events) == expected_keys(["d2/kernel", "d2/bias"], range(0, 10, 3))
    assert_step_level(events, weights, ["d2/kernel", "d2/bias"], range(0, 10, 3))


def test_gradient_arguments_of_tensorboard(fw, tmp_path):
    """They do what those of `GradientLogger` do."""
    trained = fw.rich_model()
    x, y, _ = rich_data()
    weights = fw.recorder(trained)
    callback = TensorBoard(
        str(tmp_path),
        write_grads=True,
        grads_layers=["out1"],
        grads_reduce="pool",
        grads_scalars=["max_abs"],
    )
    fw.fit(trained.model, x, y, epochs=2, callbacks=[callback, weights])

    events = gradient_events(read_events(fw, tmp_path))
    paths, run = ["out1/kernel", "out1/bias"], gradient_run(fw)
    assert keys(events) == expected_keys(paths, range(2), run, ("max_abs",))
    for path in paths:
        updates = updates_of(weights, path)
        for epoch in range(2):
            pool = Gradient.pooled(updates[epoch * UPDATES : (epoch + 1) * UPDATES])
            tag = path + "_0_grad"
            (histogram,) = [e.value for e in events if (e.tag, e.step) == (tag, epoch)]
            assert_histogram(histogram, pool)
            assert_scalars(events, epoch, path, pool, ("max_abs",))


def test_without_histograms(fw, tmp_path):
    trained = fw.small_model()
    weights = fw.recorder(trained)
    logger = GradientLogger(
        str(tmp_path), freq="batch", scalars=["max_abs"], histograms=False
    )
    fw.fit(trained.model, *small_data(), callbacks=[logger, weights])
    events = read_events(fw, tmp_path)
    assert keys(events) == sorted(
        (".", "grad_max_abs/" + path, step)
        for path in trained.paths
        for step in range(UPDATES)
    )
    for path in trained.paths:
        for step, gradient in enumerate(updates_of(weights, path)):
            assert_scalars(events, step, path, gradient, ("max_abs",))


@pytest.mark.parametrize(
    "layers, expected",
    [
        (["out1"], ["out1/kernel", "out1/bias"]),
        (
            ["encoder/*"],
            ["encoder/d1/kernel", "encoder/d1/bias"]
            + ["encoder/bn/gamma", "encoder/bn/beta"],
        ),
        (
            ["*/kernel"],
            ["shared/kernel", "encoder/d1/kernel"] + ["out1/kernel", "out2/kernel"],
        ),
        (
            ["embedding", "d1"],
            ["embedding/embeddings"] + ["encoder/d1/kernel", "encoder/d1/bias"],
        ),
    ],
    ids=["name", "folder", "weight", "two"],
)
def test_layer_patterns(fw, tmp_path, layers, expected):
    trained = fw.rich_model()
    x, y, _ = rich_data(rows=16)
    logger = GradientLogger(str(tmp_path), layers=layers, scalars=[])
    fw.fit(trained.model, x, y, callbacks=[logger])
    events = read_events(fw, tmp_path)
    assert keys(events) == expected_keys(expected, [0], scalars=())


def test_latest(fw, tmp_path):
    """Record by record what the weights say, from another callback's batch hook."""
    trained = fw.small_model()
    x, y = small_data()
    logger = GradientLogger(str(tmp_path), freq="batch")
    assert logger.latest == {}
    seen = []
    weights = fw.recorder(trained, lambda: seen.append(dict(logger.latest)))
    fw.fit(trained.model, x, y, callbacks=[logger, weights])

    assert len(seen) == UPDATES
    for path in trained.paths:
        for step, gradient in enumerate(updates_of(weights, path)):
            record, values = seen[step][path], gradient.values
            slack = gradient.error + 1e-5 * np.abs(values).max()
            assert record.step == step
            assert record.count == len(values) == record.counts.sum()
            assert abs(record.min - values.min()) <= slack
            assert abs(record.max - values.max()) <= slack
            assert abs(record.mean_abs - np.abs(values).mean()) <= slack
            assert abs(record.norm - np.linalg.norm(values)) <= slack * len(values)
            assert record.nonfinite == 0
            assert len(record.edges) == len(record.counts) + 1
            left, right = record.edges[:-1], record.edges[1:]
            filled = record.counts > 0
            assert filled[(left <= values[0]) & (values[0] < right)].all()
