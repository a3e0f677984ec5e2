"""A failure of ours, at any stage: one warning, no more records, the same training."""

import numpy as np
import pytest

from legacy_gradlog import GradientLogger, GradlogWarning, errors

from .conftest import messages_of
from .oracle import read_events
from .test_harmless import final_state, one_layer_model

#: Functions of ours that run while a model trains, by the stage that they are.
STAGES = {
    "engine, before a step": ["function.FunctionEngine.before_call"]
    + ["graph.GraphEngine.before_call"],
    "engine, after a step": ["function.FunctionEngine.after_call"]
    + ["graph.GraphEngine.after_call"],
    "sketch, inside the step": ["sketch_ops.Packing.pack"],
    "decode": ["sketch.decode"],
    "record": ["writers.add_histograms"],
    "writer": ["writers.StockWriter.write"],
    "flush": ["writers.StockWriter.flush"],
}
ENGINES = ("function.", "graph.", "sketch_ops.")
FAILURE = MemoryError("out of memory")


def break_stage(monkeypatch, name):
    """Makes the functions of a stage fail for good."""

    def fail(*args, **kwargs):
        raise FAILURE

    for place in STAGES[name]:
        place = ("engines." if place.startswith(ENGINES) else "") + place
        monkeypatch.setattr("legacy_gradlog." + place, fail)


def train(fw, callbacks=()):
    """Returns weights, optimizer state and history of two fits."""
    return final_state(fw, lambda number: list(callbacks), one_layer_model, fits=2)


def test_training_is_bit_identical(fw, tmp_path, monkeypatch):
    plain, again = train(fw), train(fw)
    errors.strict = False
    for name in sorted(STAGES):
        logger = GradientLogger(str(tmp_path / name), freq="batch")
        with monkeypatch.context() as patch, pytest.warns(GradlogWarning) as caught:
            break_stage(patch, name)
            broken = train(fw, [logger])
        for first, second, third in zip(plain, again, broken):
            np.testing.assert_array_equal(first, second, "plain runs differ")
            np.testing.assert_array_equal(first, third, name)
        messages = messages_of(caught)
        # One for each of the two fits.
        assert messages == 2 * [
            "Gradient logging is switched off for this run, and training goes on. "
            "Cause: MemoryError: out of memory"
        ], name
        assert name == "flush" or not read_events(fw, logger.log_dir), name


def test_the_suite_is_told(fw, tmp_path, monkeypatch):
    """With the fixture `strict`, as everywhere here, the same failure is raised."""
    for name in ("engine, after a step", "decode", "writer"):
        logger = GradientLogger(str(tmp_path / name), freq="batch")
        with monkeypatch.context() as patch, pytest.raises(MemoryError) as caught:
            break_stage(patch, name)
            train(fw, [logger])
        assert caught.value is FAILURE, name
