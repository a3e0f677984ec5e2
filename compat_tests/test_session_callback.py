"""The stock callback of the session family: its spikes, and runs without validation.

It walks the validation arrays in slices and writes all of them at one step, and it
stops a run that has no such arrays.
"""

import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import GradlogWarning, TensorBoard

from .conftest import messages_of
from .frameworks import files_below, small_data
from .oracle import Gradient, assert_histogram, keys, read_events, updates_of

if Version(tf.__version__) >= Version("2.0"):
    pytest.skip(
        "the stock callbacks of TensorFlow 2 write no gradients, and need no "
        "validation data",
        allow_module_level=True,
    )

TRAINING, VALIDATION, BATCH = 850, 180, 32
LEFT_OUT = (
    "The TensorBoard callback of this Keras writes histograms from validation arrays "
    "only, and there are none. Histograms of weights (and gradients) are written "
    "without them; those of layer outputs are left out."
)


def train(fw, callback_class, log_dir):
    """The user's script, in which the import alone is changed."""
    trained = fw.small_model()
    weights = fw.recorder(trained)
    callback = callback_class(log_dir, histogram_freq=1, write_grads=True)
    fw.fit(
        trained.model,
        *small_data(TRAINING),
        batch_size=BATCH,
        epochs=2,
        validation_data=small_data(VALIDATION, seed=1),
        callbacks=[callback, weights],
    )
    return trained, weights


def gradient_steps(events):
    return [event.step for event in events if event.tag == "d2/bias_0_grad"]


def test_the_spikes_are_gone(fw, tmp_path):
    stock = fw.keras.callbacks.TensorBoard
    train(fw, stock, str(tmp_path / "stock"))
    slices = -(-VALIDATION // BATCH)
    steps = gradient_steps(read_events(fw, tmp_path / "stock"))
    assert slices == 6
    assert len(steps) == 2 * slices
    if fw.name == "keras":
        assert steps == [0] * slices + [1] * slices

    fw.clear()
    trained, weights = train(fw, TensorBoard, str(tmp_path / "ours"))
    events = read_events(fw, tmp_path / "ours")
    assert gradient_steps(events) == [0, 1]
    updates = -(-TRAINING // BATCH)
    for path in trained.paths:
        gradients = updates_of(weights, path)
        for epoch in range(2):
            tag = path + "_0_grad"
            (histogram,) = [e.value for e in events if (e.tag, e.step) == (tag, epoch)]
            assert_histogram(histogram, gradients[(epoch + 1) * updates - 1])


def own_histograms(events):
    tags = ["d1/kernel_0", "bn/moving_mean_0"]
    return keys([event for event in events if event.tag in tags])


def check_weight_histograms(fw, log_dir, trained, epochs):
    events = read_events(fw, log_dir)
    expected = [(".", "bn/moving_mean_0", epoch) for epoch in epochs]
    expected += [(".", "d1/kernel_0", epoch) for epoch in epochs]
    assert own_histograms(events) == expected
    (last,) = [
        event.value
        for event in events
        if (event.tag, event.step) == ("d1/kernel_0", epochs[-1])
    ]
    values = trained.weights()["d1/kernel"]
    assert_histogram(last, Gradient(values, 1e-7))


def test_without_validation_data(fw, tmp_path):
    """One warning, our own histograms of the weights, and the training goes on."""
    trained = fw.small_model()
    callback = TensorBoard(str(tmp_path), histogram_freq=2, write_grads=True)
    with pytest.warns(GradlogWarning) as caught:
        fw.fit(trained.model, *small_data(), epochs=3, callbacks=[callback])
    messages = messages_of(caught)
    assert messages == [LEFT_OUT]
    check_weight_histograms(fw, tmp_path, trained, [0, 2])
    gradients = gradient_steps(read_events(fw, tmp_path))
    assert gradients == [0, 2]
    # Not told again: a warning of ours is an error here.
    fw.fit(trained.model, *small_data(), callbacks=[callback])


def test_validation_by_a_generator(fw, tmp_path):
    """Arrays are needed by standalone Keras, any validation will do for `tf.keras`."""
    trained = fw.small_model()
    callback = TensorBoard(str(tmp_path), histogram_freq=1, write_grads=True)

    def generate():
        x, y = small_data(rows=8, seed=1)
        while True:
            yield x, y

    with pytest.warns(None) as caught:
        fw.fit_stream(
            trained.model,
            fw.sequence(*small_data()),
            epochs=2,
            validation_data=generate(),
            validation_steps=1,
            callbacks=[callback],
        )
    messages = messages_of(caught)
    events = read_events(fw, tmp_path)
    assert gradient_steps(events) == [0, 1]
    assert np.all([len(paths) == 1 for paths in files_below(tmp_path).values()])
    if messages:
        assert messages == [LEFT_OUT]
        check_weight_histograms(fw, tmp_path, trained, [0, 1])
    else:
        assert fw.name == "tf.keras"
        assert {event.tag for event in events} >= {"d1/kernel_0"}
