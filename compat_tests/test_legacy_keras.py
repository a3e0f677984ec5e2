"""`TF_USE_LEGACY_KERAS`: what ``tf.keras`` is decides the environment, the model us."""

import pytest

from .frameworks import run_script

pytest.importorskip(
    "tf_keras", reason="the variable chooses between Keras 3 and tf_keras"
)

SCRIPT = """
    import numpy as np
    import tensorflow as tf
    from legacy_gradlog import TensorBoard, detect, errors

    errors.strict = True
    layers = tf.keras.layers
    inputs = layers.Input((2,))
    model = tf.keras.Model(inputs, layers.Dense(1, name="d")(inputs))
    model.compile(tf.keras.optimizers.SGD(0.25), "mse")
    callback = TensorBoard("logs", write_grads=True, grads_freq="batch")
    x = np.random.RandomState(0).randn(8, 2).astype("float32")
    before = model.get_weights()[0]
    model.fit(x, x[:, :1], verbose=0, callbacks=[callback])
    gradient = (before - model.get_weights()[0]) / 0.25
    record = callback.latest["d/kernel"]
    np.testing.assert_allclose(
        [record.min, record.max], [gradient.min(), gradient.max()], atol=2e-6
    )
    print(detect(model).flavour)
"""


@pytest.mark.parametrize("value, flavour", [("0", "keras"), ("1", "tf_keras")])
def test_the_variable(tmp_path, monkeypatch, value, flavour):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", value)
    assert run_script(SCRIPT, tmp_path).split()[-1] == flavour
