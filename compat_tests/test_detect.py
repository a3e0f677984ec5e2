"""The model decides which Keras, which mode and which engine."""

import importlib.util

import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import (
    GradientLogger,
    GradlogWarning,
    TensorBoard,
    UnsupportedError,
    detect,
    runtime,
)

from .conftest import available, messages_of
from .frameworks import small_data, stock_class
from .oracle import assert_step_level, expected_keys, gradient_events, keys, read_events


def test_a_model_decides(fw):
    found = detect(fw.small_model().model)
    assert found.flavour == fw.name
    assert found.keras_version == str(fw.version) or fw.name == "tf.keras"
    assert found.tensorflow_version == tf.__version__
    assert found.backend == "tensorflow"
    assert found.mode == ("eager" if fw.eager else "graph")
    assert found.engine == ("function" if fw.eager else "graph")
    assert found.engine in str(found) and found.reason in str(found)
    with pytest.raises(AttributeError):
        found.engine = "other"


def test_the_environment():
    """What ``import keras`` gives, which is `tf.keras` itself from 2.4 to 2.15."""
    expected = "tf.keras"
    if importlib.util.find_spec("keras") is not None:
        version = Version(importlib.import_module("keras").__version__)
        if not Version("2.4") <= version < Version("3.0"):
            expected = "keras"
    found = detect()
    assert found.flavour == expected
    assert found.tensorflow_version == tf.__version__


@pytest.mark.parametrize("name", ["TENSORFLOW", "KERAS"])
def test_something_newer_is_told_once(fw, tmp_path, monkeypatch, name):
    monkeypatch.setattr(runtime, "NEWEST_" + name, Version("1.0"))
    monkeypatch.setattr(runtime, "_told_untested", set())
    trained = fw.small_model()
    logger = GradientLogger(str(tmp_path), freq="batch")
    with pytest.warns(GradlogWarning) as caught:
        for _ in range(2):
            fw.fit(trained.model, *small_data(), callbacks=[logger])
    messages = messages_of(caught)
    assert len(messages) == 1
    assert messages[0].startswith("Gradient logging is tested up to ")
    assert keys(read_events(fw, tmp_path)) == expected_keys(trained.paths, range(10))


@pytest.mark.parametrize(
    "name, rule", [("TENSORFLOW", "TensorFlow must be"), ("KERAS", "Keras must be")]
)
def test_something_older_is_refused(fw, tmp_path, monkeypatch, name, rule):
    monkeypatch.setattr(runtime, "OLDEST_" + name, Version("99.0"))
    with pytest.raises(UnsupportedError) as caught:
        detect(fw.small_model().model)
    assert str(caught.value).startswith(rule + " 99.0 or later. Received: ")


def test_something_else_is_no_model():
    with pytest.raises(UnsupportedError) as caught:
        detect(object())
    assert str(caught.value).startswith("The model must be a Keras model. Received: ")


def test_every_keras_of_the_process_trains_with_one_import(tmp_path):
    """One after the other, each by its own stock callback."""
    for fw in available():
        fw.clear()
        trained = fw.small_model()
        weights = fw.recorder(trained)
        log_dir = tmp_path / fw.name
        callback = TensorBoard(str(log_dir), write_grads=True, grads_freq="batch")
        fw.fit(trained.model, *small_data(), callbacks=[callback, weights])
        assert type(callback._stock) is stock_class(fw)
        run = "train" if fw.eager else "."
        events = gradient_events(read_events(fw, log_dir))
        assert keys(events) == expected_keys(trained.paths, range(5), run)
        assert_step_level(events, weights, trained.paths, range(5))
