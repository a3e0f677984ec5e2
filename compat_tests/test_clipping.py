"""The gradient before and after the optimizer's own clipping."""

import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import GradientLogger, TensorBoard

from .oracle import updates_of

if Version("2.0") <= Version(tf.__version__) < Version("2.2"):
    pytest.skip(
        "`fit` of TensorFlow 2.0 and 2.1 does not clip: test_tf20 has its clipping",
        allow_module_level=True,
    )


@pytest.mark.parametrize("clipped", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("how", ["clipnorm", "clipvalue"])
def test_clipping(fw, tmp_path, clipped, how):
    """Mean of ``x * w`` with w = 1: the gradient of w is the mean of x."""
    x = np.zeros((8, 2), "float32")
    x[:, 0], x[:, 1] = 3.0, -4.0
    y = np.zeros((8, 1), "float32")
    trained = fw.linear_model(
        fw.optimizer(**{how: 2.5}), inputs=2, loss=lambda y_true, y_pred: y_pred
    )
    weights = fw.recorder(trained)
    callbacks = [
        GradientLogger(str(tmp_path / "a"), clipped=clipped),
        TensorBoard(str(tmp_path / "b"), write_grads=True, grads_clipped=clipped),
    ]
    fw.fit(trained.model, x, y, callbacks=callbacks + [weights])

    after = {"clipnorm": [-2.0, 1.5], "clipvalue": [-2.5, 2.5]}[how]
    expected = after if clipped else [-4.0, 3.0]
    for callback in callbacks:
        record = callback.latest["d/kernel"]
        np.testing.assert_allclose([record.min, record.max], expected, rtol=1e-5)
    applied = updates_of(weights, "d/kernel")[0].values
    np.testing.assert_allclose(sorted(applied), after, rtol=1e-5)
