"""TensorFlow 2 in graph mode by its other switch, which is for a whole process."""

import pytest
import tensorflow as tf
from packaging.version import Version

from .frameworks import run_script

if not Version("2.0") <= Version(tf.__version__) < Version("2.16"):
    pytest.skip(
        "`disable_v2_behavior` and a Keras that can train after it are in TF 2.0 to "
        "2.15 only",
        allow_module_level=True,
    )


def test_without_v2_behavior(tmp_path):
    script = """
        import numpy as np
        import tensorflow as tf
        tf.compat.v1.disable_v2_behavior()
        from legacy_gradlog import TensorBoard, detect, errors

        errors.strict = True
        layers = tf.keras.layers
        model = tf.keras.models.Sequential([
            layers.Dense(3, activation="tanh", input_shape=(2,), name="d1"),
            layers.Dropout(0.5),
            layers.Dense(1, name="d2"),
        ])
        optimizers = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)
        model.compile(optimizers.SGD(0.25), "mse")
        assert detect(model).engine == "graph"

        callback = TensorBoard("logs", write_grads=True, grads_freq="batch")
        x = np.random.RandomState(0).randn(8, 2).astype("float32")
        for update in range(3):
            before = model.get_weights()
            model.fit(x, x[:, :1], verbose=0, callbacks=[callback])
            for index, path in enumerate(["d1/kernel", "d1/bias", "d2/kernel"]):
                gradient = (before[index] - model.get_weights()[index]) / 0.25
                record = callback.latest[path]
                assert (record.step, record.count) == (update, gradient.size)
                np.testing.assert_allclose(
                    [record.min, record.max, record.norm],
                    [gradient.min(), gradient.max(), np.linalg.norm(gradient)],
                    atol=2e-6,
                )
        print("updates", update + 1)
    """
    assert run_script(script, tmp_path).endswith("updates 3\n")
