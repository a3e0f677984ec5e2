"""What only training in compiled functions has: TensorFlow 2 with eager execution."""

import pytest
import tensorflow as tf

from legacy_gradlog import GradientLogger, GradlogWarning

from .frameworks import small_data
from .oracle import expected_keys, keys, read_events

if not (hasattr(tf, "executing_eagerly") and tf.executing_eagerly()):
    pytest.skip("graph mode has no compiled train functions", allow_module_level=True)


def test_a_weight_without_gradient_is_left_out(fw, tmp_path):
    layers = fw.layers
    inputs = layers.Input((4,))
    used, unused = layers.Dense(1, name="used"), layers.Dense(1, name="unused")
    model = fw.keras.models.Model(inputs, [used(inputs), unused(inputs)])
    model.compile(fw.optimizer(), ["mse", lambda y_true, y_pred: 0 * y_true])
    x, y = small_data()
    logger = GradientLogger(str(tmp_path), freq="batch")
    expected = "No gradient reaches these trainable weights, so none is logged for them: "
    with pytest.warns(GradlogWarning) as caught:
        fw.fit(model, x, [y, y], callbacks=[logger])
    messages = [str(w.message) for w in caught if w.category is GradlogWarning]
    assert messages == [expected + "unused/kernel, unused/bias."]
    events = read_events(fw, tmp_path)
    assert keys(events) == expected_keys(["used/kernel", "used/bias"], range(5))


