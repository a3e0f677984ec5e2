"""Several optimizers in one model, and several calls of one in one training step.

Each weight's gradient is that of the call that updated it, and its step is the number
of the update that the call made.
"""

import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import GradientLogger, errors

from .frameworks import BATCH, LEARNING_RATE, Trained, small_data
from .oracle import (
    Gradient,
    assert_histogram,
    assert_scalars,
    expected_keys,
    gradient_events,
    keys,
    read_events,
    updates_of,
)

if Version(tf.__version__) < Version("2.2"):
    pytest.skip("models have a `train_step` since TF 2.2", allow_module_level=True)

CRITIC_CALLS = 2


@pytest.fixture(autouse=True)
def eager(fw):
    if not fw.eager:
        pytest.skip("a `train_step` is called in eager mode only")


def adversarial(fw, steps=None, shared=None, **compile_kwargs):
    """A tiny GAN: two calls of the critic's optimizer, then one of the generator's.

    Without ``shared`` each has its own. ``steps`` collects the weights around every
    update, which is possible where the step runs eagerly.

    Returns:
        The model and, for the oracle, what the critic and the generator train.
    """
    layers = fw.layers

    class Adversarial(fw.keras.Model):
        def __init__(self):
            super().__init__()
            self.generator = layers.Dense(4, name="generator")
            self.critic = layers.Dense(1, name="critic")
            self.critic_optimizer = shared or fw.optimizer()
            self.generator_optimizer = shared or fw.optimizer(rate=LEARNING_RATE / 2)

        def call(self, x):
            return self.critic(self.generator(x))

        def train_step(self, data):
            x, y = data
            critic = self.critic.trainable_variables
            generator = self.generator.trainable_variables
            for _ in range(CRITIC_CALLS):
                with tf.GradientTape() as tape:
                    fake = self.critic(self.generator(x, training=True))
                    loss = tf.reduce_mean(tf.square(fake - y))
                gradients = tape.gradient(loss, critic)
                self._apply(self.critic_optimizer, gradients, critic)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x) - 1.0))
            gradients = tape.gradient(loss, generator)
            self._apply(self.generator_optimizer, gradients, generator)
            return {"loss": loss}

        def _apply(self, optimizer, gradients, variables):
            before = [variable.numpy() for variable in variables] if probe else None
            optimizer.apply_gradients(zip(gradients, variables))
            if probe:
                after = [variable.numpy() for variable in variables]
                steps.append((before, after))

    probe = steps is not None
    model = Adversarial()
    model(np.zeros((1, 4), "float32"))
    model.compile(**compile_kwargs)
    critic = ["critic/kernel", "critic/bias"]
    generator = ["generator/kernel", "generator/bias"]
    return model, critic, generator


def compare(events, tag_step, paths, before, after, rate):
    for path, first, second in zip(paths, before, after):
        gradient = Gradient.of_update(first, second, rate=rate)
        tag = path + "_0_grad"
        (histogram,) = [e.value for e in events if (e.tag, e.step) == (tag, tag_step)]
        assert_histogram(histogram, gradient)
        assert_scalars(events, tag_step, path, gradient, ("mean_abs", "norm"))


def test_two_optimizers(fw, tmp_path):
    """The critic's weights have the critic's steps, twice as many."""
    updates = []
    model, critic, generator = adversarial(fw, updates, run_eagerly=True)
    logger = GradientLogger(str(tmp_path), freq="batch")
    x, y = small_data(3 * BATCH)
    fw.fit(model, x, y, callbacks=[logger])

    events = gradient_events(read_events(fw, tmp_path))
    expected = expected_keys(critic, range(6)) + expected_keys(generator, range(3))
    expected = [key for key in expected if key[1] != "grad_global_norm"]
    for name, steps in (("critic_optimizer", 6), ("generator_optimizer", 3)):
        tag = "grad_global_norm/" + name
        expected += [(".", tag, step) for step in range(steps)]
    assert keys(events) == sorted(expected)
    for number, (before, after) in enumerate(updates):
        step, call = divmod(number, CRITIC_CALLS + 1)
        if call < CRITIC_CALLS:
            at = CRITIC_CALLS * step + call
            compare(events, at, critic, before, after, LEARNING_RATE)
        else:
            compare(events, step, generator, before, after, LEARNING_RATE / 2)


def recorded(fw, tmp_path, **kwargs):
    """Trains a new model on the same data; returns its events."""
    fw.clear()
    model, critic, generator = adversarial(fw, **kwargs)
    initial = np.random.RandomState(3)
    model.set_weights([initial.randn(*w.shape) * 0.3 for w in model.get_weights()])
    loggers = [
        GradientLogger(str(tmp_path / "steps"), freq="batch"),
        GradientLogger(str(tmp_path / "third"), freq=3),
        GradientLogger(str(tmp_path / "last")),
        GradientLogger(str(tmp_path / "pool"), reduce="pool"),
    ]
    x, y = small_data(6 * BATCH)
    fw.fit(model, x, y, epochs=2, callbacks=loggers)
    return [gradient_events(read_events(fw, logger.log_dir)) for logger in loggers]


def histogram(events, path, step):
    (found,) = [e.value for e in events if (e.tag, e.step) == (path + "_0_grad", step)]
    return found


def test_traced_as_eagerly(fw, tmp_path):
    """A traced step logs what the eager one does, which the oracle has compared."""
    eager = recorded(fw, tmp_path / "eager", run_eagerly=True)
    traced = recorded(fw, tmp_path / "traced")
    for first, second in zip(eager, traced):
        assert keys(first) == keys(second)
        for one, two in zip(first, second):
            if one.tag.endswith("_grad"):
                assert one.value.num == two.value.num
                np.testing.assert_allclose(one.value.sum, two.value.sum, rtol=1e-4)
                np.testing.assert_allclose(one.value.max, two.value.max, rtol=1e-4)
    steps, third, last, pool = traced
    critic, generator = "critic/kernel", "generator/kernel"
    assert sorted({e.step for e in third if e.tag == critic + "_0_grad"}) == list(
        range(0, 24, 3)
    )
    for epoch in range(2):
        for path, end, count in ((critic, 12, 12), (generator, 6, 6)):
            newest = histogram(steps, path, end * (epoch + 1) - 1)
            assert histogram(last, path, epoch) == newest
            pooled = histogram(pool, path, epoch)
            parts = [histogram(steps, path, end * epoch + k) for k in range(count)]
            assert pooled.num == sum(part.num for part in parts)
            assert pooled.max == max(part.max for part in parts)
            np.testing.assert_allclose(pooled.sum, sum(p.sum for p in parts), rtol=1e-6)


def test_one_optimizer_for_both(fw, tmp_path):
    """Its own count runs through all calls, and each call has its weights."""
    updates = []
    optimizer = fw.optimizer()
    model, critic, generator = adversarial(
        fw, updates, shared=optimizer, optimizer=optimizer, run_eagerly=True
    )
    if hasattr(optimizer, "build"):
        optimizer.build(model.trainable_variables)
    logger = GradientLogger(str(tmp_path / "steps"), freq="batch")
    last = GradientLogger(str(tmp_path / "last"))
    x, y = small_data(2 * BATCH)
    fw.fit(model, x, y, callbacks=[logger, last])
    events = gradient_events(read_events(fw, tmp_path / "steps"))
    found = [key for key in keys(events) if key[1] != "grad_global_norm"]
    expected = expected_keys(critic, [0, 1, 3, 4]) + expected_keys(generator, [2, 5])
    assert found == sorted(k for k in expected if k[1] != "grad_global_norm")
    for number, (before, after) in enumerate(updates):
        paths = generator if number % 3 == 2 else critic
        compare(events, number, paths, before, after, LEARNING_RATE)
    # At the end of an epoch every weight has the last gradient of its own.
    events = gradient_events(read_events(fw, tmp_path / "last"))
    assert keys(events) == expected_keys(critic + generator, [0])
    compare(events, 0, critic, *updates[4], rate=LEARNING_RATE)
    compare(events, 0, generator, *updates[5], rate=LEARNING_RATE)


@pytest.mark.parametrize("kind", [list, dict])
def test_optimizers_in_a_container(fw, tmp_path, kind):
    """Found in a list or a dict of the model, too."""

    class Pair(fw.keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [layers.Dense(4, name="first"), layers.Dense(1, name="last")]
            self.mine = [fw.optimizer(), fw.optimizer()]
            if kind is dict:
                self.mine = dict(zip("ab", self.mine))

        def call(self, x):
            return self.parts[1](self.parts[0](x))

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x) - y))
            weights = [part.trainable_variables for part in self.parts]
            optimizers = [self.mine[key] for key in ("ab" if kind is dict else (0, 1))]
            gradients = tape.gradient(loss, weights)
            for optimizer, pairs in zip(optimizers, zip(gradients, weights)):
                optimizer.apply_gradients(zip(*pairs))
            return {"loss": loss}

    layers = fw.layers
    model = Pair()
    x, y = small_data()
    model(x)
    model.compile()
    trained = Trained(
        model,
        [(part.name + "/kernel", part, 0) for part in model.parts],
    )
    weights = fw.recorder(trained)
    logger = GradientLogger(str(tmp_path), freq=2)
    fw.fit(model, x, y, callbacks=[logger, weights])
    events = gradient_events(read_events(fw, tmp_path))
    for path in trained.paths:
        for step in (0, 2, 4):
            gradient = updates_of(weights, path)[step]
            (found,) = [
                e.value for e in events if (e.tag, e.step) == (path + "_0_grad", step)
            ]
            assert_histogram(found, gradient)
    norms = {e.tag for e in events if e.tag.startswith("grad_global_norm")}
    keys_ = "ab" if kind is dict else "01"
    assert norms == {"grad_global_norm/mine_" + key for key in keys_}


def test_a_weight_of_two_optimizers_is_refused(fw, tmp_path):
    class Twice(fw.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = fw.layers.Dense(1, name="d")
            self.other = fw.optimizer()

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            for optimizer in (self.optimizer, self.other):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(self(x) - y))
                variables = self.trainable_variables
                gradients = tape.gradient(loss, variables)
                optimizer.apply_gradients(zip(gradients, variables))
            return {"loss": loss}

    model = Twice()
    x, y = small_data()
    model(x)
    model.compile(fw.optimizer())
    before = model.get_weights()
    logger = GradientLogger(str(tmp_path), freq="batch")
    with pytest.raises(errors.UnsupportedError, match="`optimizer` and `other`"):
        fw.fit(model, x, y, callbacks=[logger])
    for first, second in zip(before, model.get_weights()):
        np.testing.assert_array_equal(first, second)


def test_training_is_bit_identical(fw, tmp_path):
    def train(callbacks):
        fw.clear()
        model, _, _ = adversarial(fw)
        initial = np.random.RandomState(3)
        weights = [initial.randn(*w.shape) * 0.1 for w in model.get_weights()]
        model.set_weights(weights)
        fw.fit(model, *small_data(), epochs=2, callbacks=callbacks)
        return model.get_weights()

    plain, again = train([]), train([])
    ours = train([GradientLogger(str(tmp_path), freq=2)])
    for first, second, third in zip(plain, again, ours):
        np.testing.assert_array_equal(first, second, "two plain runs differ")
        np.testing.assert_array_equal(first, third)
