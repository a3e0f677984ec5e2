"""Mixed precision: unscaled gradients, and a step that overflowed is seen as such.

The loss scale differs from step to step. Where a gradient overflows, the optimizer
makes no update, and the record of that step says so instead of showing an earlier one.
"""

import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import GradientLogger, errors

from .frameworks import (
    LEARNING_RATE,
    Trained,
    run_replicas,
    small_data,
)
from .oracle import (
    assert_step_level,
    expected_keys,
    gradient_events,
    keys,
    read_events,
)

if Version(tf.__version__) < Version("2.0"):
    pytest.skip("Keras has mixed precision since TF 2.0", allow_module_level=True)


in_eager_mode = pytest.mark.skipif(
    not tf.executing_eagerly(), reason="refused in graph mode, as is tested below"
)


@pytest.fixture
def policy(fw):
    """Sets the policy of the layers made in a test."""
    if fw.name == "keras" and not fw.is_keras_3:
        pytest.skip("standalone Keras 2 has no mixed precision")
    yield lambda name: set_policy(fw, name)
    set_policy(fw, "float32")


def set_policy(fw, name):
    module = fw.keras.mixed_precision
    if hasattr(module, "set_global_policy"):
        module.set_global_policy(name)
    else:
        module.experimental.set_policy(name)


def scaled(fw, optimizer, scale=1024.0):
    """Wraps an optimizer as `compile` does under mixed_float16."""
    module = fw.keras.mixed_precision
    if fw.is_keras_3:
        return fw.keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=scale)
    if hasattr(module, "LossScaleOptimizer"):
        return module.LossScaleOptimizer(optimizer, initial_scale=scale)
    package = getattr(fw.tf, "mixed_precision", fw.tf.train)
    loss_scale = package.experimental.DynamicLossScale(scale)
    return module.experimental.LossScaleOptimizer(optimizer, loss_scale)


def two_layers(fw, optimizer):
    layers = fw.layers
    d1 = layers.Dense(3, activation="tanh", name="d1", **fw._input(4))
    d2 = layers.Dense(1, name="d2", dtype="float32")
    stack = [layers.Input((4,))] if fw.is_keras_3 else []
    model = fw.keras.models.Sequential(stack + [d1, d2])
    model.compile(optimizer, "mse")
    probes = [
        ("{}/{}".format(layer.name, name), layer, index)
        for layer in (d1, d2)
        for index, name in enumerate(("kernel", "bias"))
    ]
    return Trained(model, probes)


CLIPPED = pytest.param(
    True,
    marks=pytest.mark.skipif(
        Version(tf.__version__) < Version("2.4"),
        reason="before TF 2.4 an optimizer that clips cannot be wrapped",
    ),
)


@in_eager_mode
@pytest.mark.parametrize("clipped", [False, CLIPPED])
def test_overflow(fw, tmp_path, policy, clipped):
    """Batch 1 of each epoch is not a number; every other step tells its gradient."""
    clip = {"clipvalue": 0.02} if clipped else {}
    policy("mixed_float16")
    trained = two_layers(fw, scaled(fw, fw.optimizer(**clip)))
    x, y = small_data()
    x[9] = np.nan
    logger = GradientLogger(str(tmp_path), freq="batch", clipped=clipped)
    weights = fw.recorder(trained)
    with pytest.warns(errors.GradlogWarning, match="not finite.* at step 1"):
        fw.fit(trained.model, x, y, epochs=2, callbacks=[logger, weights])

    events = gradient_events(read_events(fw, tmp_path))
    finite = [step for step in range(10) if step % 5 != 1]
    assert_step_level(events, weights, trained.paths, finite)
    bad = [e for e in events if e.tag.startswith("grad_nonfinite/")]
    # The last layer's gradient of its bias is not a number, either.
    assert keys(bad) == sorted(
        (".", "grad_nonfinite/" + path, step)
        for path in trained.paths
        for step in (1, 6)
    )
    sizes = {path: value.size for path, value in weights.values[0].items()}
    for event in bad:
        assert event.value == sizes[event.tag[len("grad_nonfinite/") :]]
    counts = {(e.tag, e.step): e.value.num for e in events if e.tag.endswith("_grad")}
    for path in trained.paths:
        assert counts[path + "_0_grad", 1] == 0
        np.testing.assert_array_equal(weights.values[1][path], weights.values[2][path])


@in_eager_mode
def test_an_overflow_that_only_scaling_causes(fw, tmp_path, policy):
    """The scaled gradient overflows in float16; the next step's does not, and is right.

    A record of the earlier step under the later number would be the stale one.
    """
    policy("mixed_float16")
    trained = two_layers(fw, scaled(fw, fw.optimizer(), scale=2.0**22))
    logger = GradientLogger(str(tmp_path), freq="batch")
    weights = fw.recorder(trained)
    with pytest.warns(errors.GradlogWarning, match="not finite.* at step 0"):
        fw.fit(trained.model, *small_data(), epochs=4, callbacks=[logger, weights])

    changed = [
        step
        for step, (before, after) in enumerate(zip(weights.values, weights.values[1:]))
        if (before["d1/bias"] != after["d1/bias"]).any()
    ]
    skipped = [step for step in range(20) if step not in changed]
    assert skipped and changed, "the case needs both kinds of steps"
    events = gradient_events(read_events(fw, tmp_path))
    steps = sorted({event.step for event in events})
    assert steps == list(range(20))
    assert_step_level(events, weights, trained.paths, changed)
    flagged = {e.step for e in events if e.tag.startswith("grad_nonfinite/")}
    assert sorted(flagged) == skipped


@in_eager_mode
@pytest.mark.parametrize("reduce", ["last", "pool"])
def test_epoch_level(fw, tmp_path, policy, reduce):
    policy("mixed_float16")
    trained = two_layers(fw, scaled(fw, fw.optimizer()))
    logger = GradientLogger(str(tmp_path), reduce=reduce)
    weights = fw.recorder(trained)
    fw.fit(trained.model, *small_data(), epochs=2, callbacks=[logger, weights])
    events = gradient_events(read_events(fw, tmp_path))
    assert keys(events) == expected_keys(trained.paths, range(2))
    for path in trained.paths:
        values = [
            (before[path].astype("float64") - after[path]) / LEARNING_RATE
            for before, after in zip(weights.values, weights.values[1:])
        ]
        for epoch in range(2):
            first = 5 * epoch if reduce == "pool" else 5 * epoch + 4
            pool = np.concatenate([v.ravel() for v in values[first : 5 * epoch + 5]])
            (histogram,) = [
                e.value for e in events if (e.tag, e.step) == (path + "_0_grad", epoch)
            ]
            assert histogram.num == pool.size
            np.testing.assert_allclose(histogram.sum, pool.sum(), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(histogram.max, pool.max(), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    Version(tf.__version__) < Version("2.4"),
    reason="the kernels of TF 2.0 to 2.3 know no bfloat16 on a CPU",
)
def test_bfloat16(fw, tmp_path, policy):
    """No loss is scaled; gradients of float32 weights are float32."""
    policy("mixed_bfloat16")
    trained = two_layers(fw, fw.optimizer())
    logger = GradientLogger(str(tmp_path), freq="batch")
    weights = fw.recorder(trained)
    fw.fit(trained.model, *small_data(), epochs=2, callbacks=[logger, weights])
    events = gradient_events(read_events(fw, tmp_path))
    assert keys(events) == expected_keys(trained.paths, range(10))
    assert_step_level(events, weights, trained.paths, range(10))


@in_eager_mode
@pytest.mark.parametrize("within", [False, True], ids=["scaling", "scaled"])
def test_another_tool_wraps_an_optimizer(fw, tmp_path, policy, within):
    """What changes a gradient after we have seen it is refused."""
    policy("mixed_float16")
    trained = two_layers(fw, scaled(fw, fw.optimizer()))
    target = trained.model.optimizer
    reduced_within = fw.tf_version >= Version("2.5") and not fw.is_keras_3
    if within:
        target = getattr(target, "inner_optimizer", None) or target._optimizer
    name = "apply" if fw.is_keras_3 else "apply_gradients"
    original = getattr(target, name)

    def doubling(grads, *args, **kwargs):
        if fw.is_keras_3:
            return original([2 * gradient for gradient in grads], *args, **kwargs)
        pairs = [(2 * gradient, variable) for gradient, variable in grads]
        return original(pairs, *args, **kwargs)

    object.__setattr__(target, name, doubling)
    logger = GradientLogger(str(tmp_path), freq="batch")
    weights = fw.recorder(trained)
    if within or not reduced_within:
        before = trained.weights()
        with pytest.raises(errors.UnsupportedError, match="With loss scaling, what"):
            fw.fit(trained.model, *small_data(), callbacks=[logger])
        for path, value in trained.weights().items():
            np.testing.assert_array_equal(value, before[path])
    else:
        fw.fit(trained.model, *small_data(), callbacks=[logger, weights])
        events = read_events(fw, tmp_path)
        assert_step_level(events, weights, trained.paths, range(5))


@pytest.mark.skipif(tf.executing_eagerly(), reason="works")
def test_refused_in_graph_mode(fw, tmp_path, policy):
    """The loss scale is read and changed in one session run, in no order."""
    policy("mixed_float16")
    trained = two_layers(fw, scaled(fw, fw.optimizer()))
    before = trained.weights()
    logger = GradientLogger(str(tmp_path), freq="batch")
    with pytest.raises(errors.UnsupportedError, match="loss scaling.*eager execution"):
        fw.fit(trained.model, *small_data(), callbacks=[logger])
    for path, value in trained.weights().items():
        np.testing.assert_array_equal(before[path], value)


@in_eager_mode
@pytest.mark.skipif(
    Version(tf.__version__) < Version("2.5"), reason="refused before TF 2.5"
)
def test_mirrored(fw, tmp_path):
    """One replica's batch overflows: the sum of both is flagged."""
    script = """
from compat_tests import test_mixed_precision as mixed

mixed.set_policy(fw, "mixed_float16")
with strategy.scope():
    trained = mixed.two_layers(fw, mixed.scaled(fw, fw.optimizer()))
x, y = frameworks.small_data()
x[8] = np.nan
weights = fw.recorder(trained)
logger = GradientLogger("logs", freq="batch")
fw.fit(trained.model, x, y, epochs=2, callbacks=[logger, weights])
events = oracle.gradient_events(oracle.read_events(fw, "logs"))
finite = [step for step in range(10) if step % 5 != 1]
oracle.assert_step_level(events, weights, trained.paths, finite)
bad = [e.step for e in events if e.tag == "grad_nonfinite/d1/kernel"]
print("flagged", bad)
"""
    printed = run_replicas(script, fw, tmp_path)
    assert printed.endswith("flagged [1, 6]\n")
