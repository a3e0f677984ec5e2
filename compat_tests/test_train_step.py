"""A `train_step` of the user's own: every way to call the optimizer, own losses.

Under a strategy, every way to have the gradients of the replicas reduced.
"""

import inspect

import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import GradientLogger

from .conftest import available
from .frameworks import LEARNING_RATE, Trained, run_replicas, small_data
from .oracle import assert_fit, read_events
from .test_clipping import optimizers_of

if Version(tf.__version__) < Version("2.2"):
    pytest.skip("`train_step` came with TensorFlow 2.2", allow_module_level=True)
if not tf.executing_eagerly():
    pytest.skip("a `train_step` is called in eager mode only", allow_module_level=True)


def apply_gradients(optimizer, tape, loss, variables):
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables))


def apply(optimizer, tape, loss, variables):
    optimizer.apply(tape.gradient(loss, variables), variables)


def minimize(optimizer, tape, loss, variables):
    optimizer.minimize(loss, variables, tape=tape)


def reduced(tape, loss, variables):
    """Returns the gradients of the global batch, reduced by the user."""
    context = tf.distribute.get_replica_context()
    return context.all_reduce("sum", tape.gradient(loss, variables))


def experimental_aggregate_gradients(optimizer, tape, loss, variables):
    pairs = zip(reduced(tape, loss, variables), variables)
    optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)


def skip_gradients_aggregation(optimizer, tape, loss, variables):
    pairs = zip(reduced(tape, loss, variables), variables)
    optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)


#: What `apply_gradients` must know, with the step that tells it.
ARGUMENTS = [experimental_aggregate_gradients, skip_gradients_aggregation]


def steps_of(cls):
    """Returns the ways to update that an optimizer class has."""
    found = [apply_gradients]
    if hasattr(cls, "apply"):
        found.append(apply)
    if "tape" in inspect.signature(getattr(cls, "minimize", steps_of)).parameters:
        found.append(minimize)
    known = inspect.signature(cls.apply_gradients).parameters
    return found + [step for step in ARGUMENTS if step.__name__ in known]


def custom(fw, optimizer, step):
    """Returns a model with a loss of its own, of a tape that is asked twice."""

    class Custom(fw.keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                error = self(x, training=True) - y
                loss = tf.reduce_sum(tf.square(error)) / 8
            variables = self.trainable_variables
            slope = tf.linalg.global_norm(tape.gradient(loss, variables))
            step(optimizer, tape, loss, variables)
            return {"loss": loss, "slope": slope}

    inputs = fw.layers.Input((4,))
    dense = fw.layers.Dense(1, name="d")
    model = Custom(inputs, dense(inputs))
    model.compile(optimizer)
    return Trained(model, [("d/kernel", dense, 0), ("d/bias", dense, 1)])


def fit_and_compare(fw, trained, log_dir):
    logger = GradientLogger(str(log_dir), freq=2)
    assert_fit(fw, trained, logger, [0, 2, 4], *small_data())


CASES = [
    pytest.param(fw, cls, step, id="-".join([fw.name, name, step.__name__]))
    for fw in available()
    for cls, name in optimizers_of(fw).items()
    for step in steps_of(cls)
]


@pytest.mark.parametrize("framework, cls, step", CASES)
def test_every_way_to_update(framework, cls, step, tmp_path):
    trained = custom(framework, cls(LEARNING_RATE), step)
    fit_and_compare(framework, trained, tmp_path)


def mean_of_the_replicas(pairs):
    """Aggregates what the replicas have: half of the sum that is usual."""
    pairs = list(pairs)
    context = tf.distribute.get_replica_context()
    means = context.all_reduce("mean", [gradient for gradient, _ in pairs])
    return list(zip(means, [variable for _, variable in pairs]))


def train_under(strategy, fw):
    """Trains with every optimizer, and prints how it reduced what was compared."""
    cases = []
    for cls in optimizers_of(fw):
        # The last one leaves the reduction to the user, where there is such a way.
        cases.append((cls, {}, steps_of(cls)[-1]))
        known = [inspect.signature(base.__init__).parameters for base in cls.__mro__]
        if any("gradient_aggregator" in names for names in known):
            aggregator = dict(gradient_aggregator=mean_of_the_replicas)
            cases.append((cls, aggregator, apply_gradients))
    for number, (cls, kwargs, step) in enumerate(cases):
        with strategy.scope():
            trained = custom(fw, cls(LEARNING_RATE, **kwargs), step)
        fit_and_compare(fw, trained, "logs/{}".format(number))
        print("compared", step.__name__, *kwargs)


def test_every_way_to_reduce(fw, tmp_path):
    script = """
from compat_tests import test_train_step

test_train_step.train_under(strategy, fw)
print("all compared")
"""
    printed = run_replicas(script, fw, tmp_path)
    assert printed.endswith("all compared\n")


def test_an_update_in_a_branch(fw, tmp_path):
    """Every other step updates, which only the step knows; update k has gradient k."""

    class EveryOther(fw.keras.Model):
        def train_step(self, data):
            x, _ = data
            optimizer, variables = self.optimizer, self.trainable_variables
            number = tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.float32)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(x, training=True)) * number
            gradients = tape.gradient(loss, variables)

            def update():
                optimizer.apply_gradients(zip(gradients, variables))
                return 0

            tf.cond(tf.equal(steps % 2, 0), update, lambda: 0)
            steps.assign_add(1)
            return {"loss": loss}

    steps = tf.Variable(0)
    inputs = fw.layers.Input((1,))
    outputs = fw.layers.Dense(1, use_bias=False, name="d")(inputs)
    model = EveryOther(inputs, outputs)
    optimizer = fw.optimizer()
    model.compile(optimizer, "mse")
    # Before its first step, where a branch could not make its variables.
    getattr(optimizer, "build", lambda variables: None)(model.trainable_variables)
    logger = GradientLogger(str(tmp_path), freq=3)
    x = np.ones((80, 1), "float32")
    fw.fit(model, x, x, epochs=2, callbacks=[logger])
    events = read_events(fw, tmp_path)
    norms = {e.step: e.value for e in events if e.tag == "grad_norm/d/kernel"}
    assert norms == {step: step for step in (0, 3, 6, 9)}
