"""The gradient before and after the optimizer's own clipping, for every optimizer."""

import inspect

import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import GradientLogger, TensorBoard

from .conftest import available
from .frameworks import BATCH, LEARNING_RATE, Trained

if Version("2.0") <= Version(tf.__version__) < Version("2.2"):
    pytest.skip(
        "`fit` of TensorFlow 2.0 and 2.1 does not clip: test_tf20 has its clipping",
        allow_module_level=True,
    )


def optimizers_of(fw):
    """Returns class -> name of every `SGD` that a framework has and can train with."""
    found = {fw.optimizer_class(): "default"}
    for name in ("legacy", "experimental"):
        cls = getattr(getattr(fw.keras.optimizers, name, None), "SGD", None)
        # Keras 3 keeps the names of what it has not; graphs need `get_updates`.
        trains = "apply_gradients" if fw.eager else "get_updates"
        if hasattr(cls, trains):
            # Two classes may be one optimizer by two names.
            if all(cls.apply_gradients is not c.apply_gradients for c in found):
                found[cls] = name
    return found


def ways_to_clip(cls):
    """Returns the arguments, of which some are found as properties only."""
    names = set(inspect.signature(cls.__init__).parameters) | set(dir(cls))
    return ["clipvalue", "clipnorm"] + sorted(names & {"global_clipnorm"})


CASES = [
    pytest.param(fw, cls, how, id="-".join([fw.name, name, how]))
    for fw in available()
    for cls, name in optimizers_of(fw).items()
    for how in ways_to_clip(cls)
]
GRADIENTS = {"a/kernel": [3.0, -4.0], "b/kernel": [0.0, 12.0]}
#: Early Kerases take the norm of all gradients together for `clipnorm`, too.
CLIPPED = {
    "clipvalue": [{"a/kernel": [2.5, -2.5], "b/kernel": [0.0, 2.5]}],
    "clipnorm": [
        {"a/kernel": [1.5, -2.0], "b/kernel": [0.0, 2.5]},
        {"a/kernel": [7.5 / 13, -10 / 13], "b/kernel": [0.0, 30 / 13]},
    ],
    "global_clipnorm": [{"a/kernel": [7.5 / 13, -10 / 13], "b/kernel": [0.0, 30 / 13]}],
}


@pytest.mark.parametrize("framework, cls, how", CASES)
def test_clipping(framework, cls, how, tmp_path):
    """Mean of ``x * w``: the gradient of each w is its x. Both loggers in one fit."""
    layers = framework.layers
    inputs = [layers.Input((2,)), layers.Input((2,))]
    dense = [layers.Dense(1, use_bias=False, name=name) for name in "ab"]
    outputs = layers.Add()([layer(i) for layer, i in zip(dense, inputs)])
    model = framework.keras.models.Model(inputs, outputs)
    model.compile(cls(LEARNING_RATE, **{how: 2.5}), lambda y_true, y_pred: y_pred)
    trained = Trained(model, [(d.name + "/kernel", d, 0) for d in dense])
    x = [np.tile(np.float32(g), (BATCH, 1)) for g in GRADIENTS.values()]
    callbacks = [
        GradientLogger(str(tmp_path / "before")),
        TensorBoard(str(tmp_path / "after"), write_grads=True, grads_clipped=True),
    ]
    weights = trained.weights()
    framework.fit(model, x, np.zeros((BATCH, 1)), callbacks=callbacks)

    applied = {
        path: ((weights[path] - value) / LEARNING_RATE).ravel()
        for path, value in trained.weights().items()
    }
    assert any(
        all(np.allclose(applied[path], values[path], atol=1e-5) for path in values)
        for values in CLIPPED[how]
    )
    for callback, expected in zip(callbacks, [GRADIENTS, applied]):
        for path in trained.paths:
            record = callback.latest[path]
            lowest, highest = min(expected[path]), max(expected[path])
            np.testing.assert_allclose(
                [record.min, record.max], [lowest, highest], atol=1e-5
            )
