"""`watch`: updates that no `fit` makes."""

import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import GradientLogger, errors

from .frameworks import BATCH, run_replicas, small_data
from .oracle import (
    Gradient,
    assert_histogram,
    assert_step_level,
    expected_keys,
    gradient_events,
    keys,
    read_events,
)


class Weights:
    """The weights before and after every update, for the oracle."""

    def __init__(self, trained):
        self._trained = trained
        self.values = [trained.weights()]

    def updated(self):
        self.values.append(self._trained.weights())


def batches(epochs=1):
    x, y = small_data()
    for _ in range(epochs):
        for first in range(0, len(x), BATCH):
            yield x[first : first + BATCH], y[first : first + BATCH]


def test_train_on_batch(fw, tmp_path):
    trained = fw.small_model()
    weights = Weights(trained)
    logger = GradientLogger(str(tmp_path), freq=2)
    with logger.watch(trained.model) as watched:
        assert watched is logger
        for x, y in batches(2):
            trained.model.train_on_batch(x, y)
            weights.updated()
    # Not logged any more.
    for x, y in batches():
        trained.model.train_on_batch(x, y)
    events = gradient_events(read_events(fw, tmp_path))
    steps = range(0, 10, 2)
    assert keys(events) == expected_keys(trained.paths, steps)
    assert_step_level(events, weights, trained.paths, steps)


def test_watched_twice_after_other_updates(fw, tmp_path):
    """After a `fit`, whose train function may be another; numbers go on."""
    trained = fw.linear_model()
    first = next(batches())
    fw.fit(trained.model, *first)
    weights = Weights(trained)
    logger = GradientLogger(str(tmp_path), freq="batch")
    for _ in range(2):
        with logger.watch(trained.model):
            trained.model.train_on_batch(*first)
            weights.updated()
    events = gradient_events(read_events(fw, tmp_path))
    assert keys(events) == expected_keys(trained.paths, [1, 2])
    assert_step_level(events, weights, trained.paths, [1, 2], first=1)


def test_epoch_level_is_refused(fw, tmp_path):
    trained = fw.linear_model()
    logger = GradientLogger(str(tmp_path))
    with pytest.raises(errors.InvalidArgumentError, match='"batch".*Received: "epoch"'):
        with logger.watch(trained.model):
            raise AssertionError("the block was entered")


def test_what_is_neither_model_nor_optimizer(tmp_path):
    logger = GradientLogger(str(tmp_path), freq="batch")
    with pytest.raises(errors.InvalidArgumentError, match="'list'"):
        with logger.watch([]):
            raise AssertionError("the block was entered")


def test_an_exception_in_the_block_passes(fw, tmp_path):
    trained = fw.linear_model()
    with pytest.raises(KeyError):
        with GradientLogger(str(tmp_path), freq="batch").watch(trained.model):
            trained.model.train_on_batch(*next(batches()))
            raise KeyError
    assert keys(gradient_events(read_events(fw, tmp_path))) == expected_keys(
        trained.paths, [0]
    )


# Loops over an optimizer.


@pytest.fixture
def loop(fw):
    """Skips where there are no hand-written loops, returns a maker of steps."""
    if not fw.eager or (fw.name == "keras" and not fw.is_keras_3):
        pytest.skip("gradient tapes are of eager mode, and of Keras optimizers there")

    def make(model, optimizer, **kwargs):
        tf = fw.tf

        def step(x, y):
            with tf.GradientTape() as tape:
                error = model(x, training=True) - y
                loss = tf.reduce_mean(tf.square(error))
            variables = model.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables))
            return loss

        traced = kwargs.pop("traced", False)
        return tf.function(step, **kwargs) if traced else step

    return make


def assert_loop(events, path, steps, weights):
    """Compares what a loop over ``d/kernel``, logged as ``path``, must have written."""
    assert keys(events) == expected_keys([path], steps)
    for event in events:
        if event.tag == path + "_0_grad":
            before, after = weights.values[event.step : event.step + 2]
            gradient = Gradient.of_update(before["d/kernel"], after["d/kernel"])
            assert_histogram(event.value, gradient)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
def test_gradient_tape(fw, tmp_path, loop, traced):
    trained = fw.linear_model()
    optimizer = trained.model.optimizer
    weights = Weights(trained)
    logger = GradientLogger(str(tmp_path), freq=2)
    step = loop(trained.model, optimizer, traced=traced)
    with logger.watch(optimizer):
        for x, y in batches():
            step(fw.tf.constant(x), fw.tf.constant(y))
            weights.updated()
    (path,) = logger.latest
    assert path.endswith("d/kernel")
    written = len(read_events(fw, tmp_path))
    # Closed: what the function was traced with hands nothing over any more.
    for x, y in batches():
        step(fw.tf.constant(x), fw.tf.constant(y))
    assert len(read_events(fw, tmp_path)) == written

    events = gradient_events(read_events(fw, tmp_path))
    assert_loop(events, path, [0, 2, 4], weights)


def test_a_function_is_watched_again(fw, tmp_path, loop):
    """It is not traced again, so the second block takes up what the first put in."""
    trained = fw.linear_model()
    optimizer = trained.model.optimizer
    step = loop(trained.model, optimizer, traced=True)
    logger = GradientLogger(str(tmp_path), freq="batch")
    x, y = next(batches())
    weights = Weights(trained)
    for count in (2, 1):
        with logger.watch(optimizer):
            for _ in range(count):
                step(fw.tf.constant(x), fw.tf.constant(y))
                weights.updated()
        step(fw.tf.constant(x), fw.tf.constant(y))
        weights.updated()
    (path,) = logger.latest
    events = gradient_events(read_events(fw, tmp_path))
    assert_loop(events, path, [0, 1, 3], weights)


def test_a_function_traced_before(fw, tmp_path, loop):
    trained = fw.linear_model()
    optimizer = trained.model.optimizer
    step = loop(trained.model, optimizer, traced=True)
    x, y = next(batches())
    step(fw.tf.constant(x), fw.tf.constant(y))
    logger = GradientLogger(str(tmp_path), freq="batch")
    with pytest.warns(errors.GradlogWarning, match="traced before"):
        with logger.watch(optimizer):
            step(fw.tf.constant(x), fw.tf.constant(y))
    assert gradient_events(read_events(fw, tmp_path)) == []


def test_layers_of_a_loop(fw, tmp_path, loop):
    trained = fw.small_model()
    step = loop(trained.model, trained.model.optimizer)
    logger = GradientLogger(str(tmp_path), freq="batch", layers=["*d2/kernel"])
    x, y = next(batches())
    with logger.watch(trained.model.optimizer):
        step(fw.tf.constant(x), fw.tf.constant(y))
    (path,) = logger.latest
    assert path.endswith("d2/kernel")
    wrong = GradientLogger(str(tmp_path), freq="batch", layers=["nothing"])
    before = trained.weights()
    with pytest.raises(errors.InvalidArgumentError, match="'nothing'"):
        with wrong.watch(trained.model.optimizer):
            step(fw.tf.constant(x), fw.tf.constant(y))
    for name, value in trained.weights().items():
        np.testing.assert_array_equal(before[name], value)


def test_compiled_loop_is_refused(fw, tmp_path, loop):
    """XLA cannot call the host."""
    trained = fw.linear_model()
    optimizer = trained.model.optimizer
    x, y = next(batches())
    try:
        step = loop(trained.model, optimizer, traced=True, jit_compile=True)
    except TypeError:
        pytest.skip("`jit_compile` has another name there")
    before = trained.weights()
    with pytest.raises(errors.UnsupportedError, match="jit_compile=True"):
        with GradientLogger(str(tmp_path), freq="batch").watch(optimizer):
            step(fw.tf.constant(x), fw.tf.constant(y))
    np.testing.assert_array_equal(before["d/kernel"], trained.weights()["d/kernel"])


TWO_STEPS = """
with strategy.scope():
    trained = fw.linear_model(fw.optimizer(rate=0.0), inputs=1)
model, optimizer = trained.model, trained.model.optimizer
model.set_weights([np.zeros((1, 1))])

def replica(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(model(x) - y)) / 4.0
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

run = getattr(strategy, "run", None) or strategy.experimental_run_v2

@tf.function
def step(x, y):
    run(replica, args=(x, y))

x = np.ones((4, 1), "float32")
y = np.array([[-0.5], [-0.5], [7.5], [9.5]], "float32")
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).repeat(2)
try:
    with GradientLogger("logs", freq="batch").watch(optimizer):
        for x, y in strategy.experimental_distribute_dataset(data):
            step(x, y)
except errors.UnsupportedError as error:
    print("refused:", error)
for event in oracle.read_events(fw, "logs"):
    if event.tag.endswith("d/kernel_0_grad"):
        print(event.step, event.value.num, event.value.min, event.value.max)
"""


@pytest.mark.skipif(
    Version(tf.__version__) < Version("2.2"), reason="test_mirrored begins there, too"
)
def test_a_loop_over_replicas(fw, tmp_path, loop):
    """The gradient of the global batch; Keras 3 has it within the update only."""
    printed = run_replicas(TWO_STEPS, fw, tmp_path).strip().split("\n")
    if fw.is_keras_3:
        assert "Received: 2 replicas" in printed[-1]
    else:
        assert printed[-2:] == ["{} 1.0 -8.0 -8.0".format(step) for step in range(2)]


def test_optimizer_in_graph_mode(fw, tmp_path):
    if fw.eager:
        pytest.skip("works")
    trained = fw.linear_model()
    logger = GradientLogger(str(tmp_path), freq="batch")
    optimizer = trained.model.optimizer
    with pytest.raises(errors.UnsupportedError, match="graph mode"):
        with logger.watch(optimizer):
            raise AssertionError("the block was entered")
