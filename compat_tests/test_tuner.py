"""A search of KerasTuner, which copies callbacks and moves the one of a known name."""

import os

import pytest

from legacy_gradlog import GradientLogger, TensorBoard

from .frameworks import small_data
from .oracle import expected_keys, gradient_events, keys, read_events

keras_tuner = pytest.importorskip(
    "keras_tuner", reason="KerasTuner is not in this line"
)


def test_a_search(fw, tmp_path):
    """Every trial, and each of its executions, has a log of its own."""
    if not fw.eager:
        pytest.skip("KerasTuner trains in eager mode")

    def build(parameters):
        rate = parameters.Choice("rate", [0.1, 0.2])
        return fw.linear_model(fw.optimizer(rate=rate)).model

    tuner = keras_tuner.GridSearch(
        build, "loss", executions_per_trial=2, directory=str(tmp_path / "search")
    )
    callback = TensorBoard(str(tmp_path / "logs"), write_grads=True, grads_freq=2)
    logger = GradientLogger(str(tmp_path / "shared"), freq="batch")
    x, y = small_data()
    tuner.search(x, y, batch_size=8, verbose=0, callbacks=[callback, logger])

    logs = tmp_path / "logs"
    folders = sorted(str(path.relative_to(logs)) for path in logs.glob("*/*"))
    trials, executions = ("0000", "0001"), ("execution0", "execution1")
    assert folders == [os.path.join(t, e) for t in trials for e in executions]
    for folder in folders:
        events = gradient_events(read_events(fw, logs / folder))
        assert keys(events) == expected_keys(["d/kernel"], [0, 2, 4], "train")
    shared = keys(read_events(fw, tmp_path / "shared"))
    assert shared == sorted(4 * expected_keys(["d/kernel"], range(5)))
