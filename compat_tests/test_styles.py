"""What a model may have and how it may be trained, on every line.

Weights of samples and classes, losses of layers, many inputs and outputs, states that
last, layers frozen and thawed: the logged gradient is the one that changed the weights.
"""

import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import GradientLogger

from .frameworks import BATCH, Trained, small_data
from .oracle import (
    assert_fit,
    assert_step_level,
    expected_keys,
    keys,
    read_events,
)

UPDATES = 5


def fit_and_compare(fw, trained, log_dir, x, y, **kwargs):
    """Trains for one epoch, and compares every update with the weights."""
    logger = GradientLogger(str(log_dir), freq="batch")
    assert_fit(fw, trained, logger, range(UPDATES), x, y, **kwargs)


def dense(fw, name, units=1, **kwargs):
    return fw.layers.Dense(units, use_bias=False, name=name, **kwargs)


def kernels(layers):
    return [(layer.name + "/kernel", layer, 0) for layer in layers]


def penalty(fw):
    """Returns a layer that adds a loss of its own: the squared mean of its inputs."""

    class Penalty(fw.layers.Layer):
        def call(self, inputs):
            self.add_loss(fw.tf.square(fw.tf.reduce_mean(inputs)))
            # Early Kerases want a tensor of its own from every layer.
            return inputs * 1.0

        def compute_output_shape(self, input_shape):
            return input_shape

    return Penalty(name="penalty")


def test_four_inputs_two_weighted_outputs_and_a_loss_of_a_layer(fw, tmp_path):
    """`add_loss`, `loss_weights`, and a `sample_weight` for every output."""
    inputs = [fw.layers.Input((4,), name="input_" + name) for name in "abcd"]
    entry = dense(fw, "entry", 2, activation="tanh")
    hidden = penalty(fw)(entry(fw.layers.Concatenate()(inputs)))
    heads = [dense(fw, "first"), dense(fw, "second")]
    model = fw.keras.models.Model(inputs, [head(hidden) for head in heads])
    model.compile(fw.optimizer(), ["mse", "mae"], loss_weights=[0.25, 2.0])
    data = [small_data(seed=seed) for seed in range(4)]
    random = np.random.RandomState(5)
    fit_and_compare(
        fw,
        Trained(model, kernels([entry] + heads)),
        tmp_path,
        [x for x, _ in data],
        [y for _, y in data[:2]],
        sample_weight=[random.uniform(0.5, 2.0, 40) for _ in heads],
    )


def test_class_weight(fw, tmp_path):
    """The gradient at zero weights is known: minus twice the weighted mean of x y."""
    trained = fw.linear_model()
    trained.model.set_weights([np.zeros((4, 1))])
    x, _ = small_data()
    y = np.arange(40).reshape(40, 1) % 2
    fit_and_compare(fw, trained, tmp_path / "all", x, y, class_weight={0: 1.0, 1: 4.0})

    trained.model.set_weights([np.zeros((4, 1))])
    logger = GradientLogger(str(tmp_path / "one"))
    fw.fit(
        trained.model,
        x[:BATCH],
        y[:BATCH],
        class_weight={0: 1.0, 1: 4.0},
        callbacks=[logger],
    )
    expected = -2 * (x * y * 4.0)[:BATCH].mean(axis=0)
    record = logger.latest["d/kernel"]
    np.testing.assert_allclose(
        [record.min, record.max, record.norm],
        [expected.min(), expected.max(), np.linalg.norm(expected)],
        rtol=1e-5,
    )


def test_no_targets(fw, tmp_path):
    """All that is minimized is what a layer adds."""
    inputs = fw.layers.Input((4,))
    layer = dense(fw, "d", 2)
    model = fw.keras.models.Model(inputs, penalty(fw)(layer(inputs)))
    model.compile(fw.optimizer(), loss=None)
    x, _ = small_data()
    fit_and_compare(fw, Trained(model, kernels([layer])), tmp_path, x, None)


def stateful(fw, unroll=False):
    """Returns a model whose state is carried from batch to batch."""
    inputs = fw.layers.Input(batch_shape=(BATCH, 2, 2))
    recurrent = fw.layers.SimpleRNN(
        2,
        stateful=True,
        unroll=unroll,
        use_bias=False,
        name="rnn",
        kernel_initializer="ones",
        recurrent_initializer="identity",
    )
    head = dense(fw, "head", kernel_initializer="ones", trainable=False)
    model = fw.keras.models.Model(inputs, head(recurrent(inputs)))
    model.compile(fw.optimizer(), "mse")
    names = ["rnn/kernel", "rnn/recurrent_kernel"]
    return Trained(model, [(name, recurrent, i) for i, name in enumerate(names)])


def test_gradients_through_a_state(fw, tmp_path):
    x, y = small_data()
    x = x.reshape(40, 2, 2)
    fit_and_compare(fw, stateful(fw, unroll=True), tmp_path, x, y)


@pytest.mark.skipif(
    Version(tf.__version__) < Version("1.10"),
    reason="a loop's gradient reads its state twice there: test_session",
)
def test_gradients_through_the_state_of_a_loop(fw, tmp_path):
    x, y = small_data()
    fit_and_compare(fw, stateful(fw), tmp_path, x.reshape(40, 2, 2), y)


@pytest.mark.skipif(
    Version(tf.__version__) < Version("1.15"),
    reason="with ref variables a step may read the state that it has just written: "
    "there a metric more changes what Keras trains",
)
def test_states_are_those_of_a_run_without_us(fw, tmp_path):
    """They advance once a batch. They are seen in what is predicted from them."""
    x, y = small_data()
    x = x.reshape(40, 2, 2)
    outcomes = []
    for callbacks in [[], [GradientLogger(str(tmp_path), freq="batch")]]:
        fw.clear()
        trained = stateful(fw)
        fw.fit(trained.model, x, y, callbacks=callbacks)
        predicted = trained.model.predict(x[:BATCH], batch_size=BATCH)
        outcomes.append(dict(trained.weights(), predicted=predicted))
    plain, ours = outcomes
    for name, value in ours.items():
        np.testing.assert_array_equal(value, plain[name], err_msg=name)


def test_layers_frozen_and_thawed_between_fits(fw, tmp_path):
    """Each `compile` makes another step; the numbers of the updates go on."""
    inputs = fw.layers.Input((4,))
    first, last = dense(fw, "first", 2, activation="tanh"), dense(fw, "last")
    model = fw.keras.models.Model(inputs, last(first(inputs)))
    trained = Trained(model, kernels([first, last]))
    x, y = small_data()
    weights = fw.recorder(trained)
    logger = GradientLogger(str(tmp_path), freq="batch")
    for trainable in [True, False, True]:
        first.trainable = trainable
        model.compile(fw.optimizer(), "mse")
        fw.fit(model, x, y, callbacks=[logger, weights])

    thawed = [*range(5), *range(10, 15)]
    expected = expected_keys(["last/kernel"], range(15))
    expected += expected_keys(["first/kernel"], thawed, scalars=["mean_abs"])
    expected += [(".", "grad_norm/first/kernel", step) for step in thawed]
    events = read_events(fw, tmp_path)
    assert keys(events) == sorted(expected)
    assert_step_level(events, weights, trained.paths, thawed)
    assert_step_level(events, weights, ["last/kernel"], range(5, 10))
