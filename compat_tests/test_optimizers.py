"""What an optimizer does beside the gradient: constraints, averages, accumulation.

The oracle is the mean squared error of a linear model on the weights before the update,
which NumPy differentiates, for the change of the weights is not the gradient here.
"""

import inspect

import numpy as np
import pytest

from legacy_gradlog import GradientLogger

from .conftest import available
from .frameworks import BATCH, small_data
from .oracle import Gradient, assert_histogram, assert_scalars, read_events

UPDATES = 5


def gradients(values, x, y):
    """Returns the gradient of every update from the weights before each."""
    found = []
    for before, start in zip(values, range(0, len(x), BATCH)):
        here = slice(start, start + BATCH)
        error = x[here].astype(np.float64).dot(before["d/kernel"]) - y[here]
        found.append(2 * x[here].T.dot(error) / BATCH)
    return found


def means_of_two(values, x, y):
    """Returns the means of the gradients of every two batches."""
    found = gradients(values, x, y)
    return [(first + second) / 2 for first, second in zip(found[::2], found[1::2])]


def compare(fw, log_dir, expected):
    """Compares the one weight of the linear model at steps 0, 1, 2, ..."""
    events = read_events(fw, log_dir)
    steps = [event.step for event in events if event.tag == "d/kernel_0_grad"]
    assert steps == list(range(len(expected)))
    for step, values in enumerate(expected):
        gradient = Gradient(values, 1e-5)
        (histogram,) = [
            event.value
            for event in events
            if (event.tag, event.step) == ("d/kernel_0_grad", step)
        ]
        assert_histogram(histogram, gradient)
        assert_scalars(events, step, "d/kernel", gradient, ("mean_abs", "norm"))


def test_a_constraint_is_no_part_of_the_gradient(fw, tmp_path):
    class Unit(fw.keras.constraints.Constraint):
        """The weights have the norm 1 after every update."""

        def __call__(self, w):
            return w / fw.tf.sqrt(fw.tf.reduce_sum(fw.tf.square(w)))

    trained = fw.linear_model(kernel_constraint=Unit())
    x, y = small_data()
    weights = fw.recorder(trained)
    logger = GradientLogger(str(tmp_path), freq="batch")
    fw.fit(trained.model, x, y, callbacks=[logger, weights])
    for values in weights.values[1:]:
        np.testing.assert_allclose(np.linalg.norm(values["d/kernel"]), 1, rtol=1e-5)
    compare(fw, tmp_path, gradients(weights.values[:-1], x, y))


def optimizers_with(name):
    """Returns the frameworks whose `SGD` has an argument of this name."""
    return [
        pytest.param(fw, id=fw.name)
        for fw in available()
        if name in inspect.signature(fw.optimizer_class().__init__).parameters
    ] or [
        pytest.param(
            None,
            marks=pytest.mark.skip("no optimizer of this line has `{}`".format(name)),
        )
    ]


@pytest.mark.parametrize("framework", optimizers_with("use_ema"))
def test_moving_averages_of_the_weights(framework, tmp_path):
    """Every other update the weights are replaced by their average."""
    averaging = dict(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
    optimizer = framework.optimizer(**averaging)
    trained = framework.linear_model(optimizer)
    x, y = small_data()
    weights = framework.recorder(trained)
    logger = GradientLogger(str(tmp_path), freq="batch")
    framework.fit(trained.model, x, y, callbacks=[logger, weights])
    compare(framework, tmp_path, gradients(weights.values[:-1], x, y))


CLIPNORM = 2.0


@pytest.mark.parametrize("framework", optimizers_with("gradient_accumulation_steps"))
@pytest.mark.parametrize("clipped", [False, True], ids=["before", "after"])
def test_accumulation(framework, tmp_path, clipped):
    """One record for every two batches: their mean, which is what is clipped."""
    optimizer = framework.optimizer(gradient_accumulation_steps=2, clipnorm=CLIPNORM)
    trained = framework.linear_model(optimizer)
    x, y = small_data(rows=6 * BATCH)
    weights = framework.recorder(trained)
    loggers = [
        GradientLogger(str(tmp_path / "steps"), freq="batch", clipped=clipped),
        GradientLogger(str(tmp_path / "epochs"), clipped=clipped),
        GradientLogger(str(tmp_path / "pool"), reduce="pool", clipped=clipped),
    ]
    framework.fit(trained.model, x, y, epochs=2, callbacks=loggers + [weights])

    means = means_of_two(weights.values[:-1], np.tile(x, (2, 1)), np.tile(y, (2, 1)))
    assert min(np.linalg.norm(mean) for mean in means) < CLIPNORM
    assert max(np.linalg.norm(mean) for mean in means) > CLIPNORM
    if clipped:
        means = [mean * min(1, CLIPNORM / np.linalg.norm(mean)) for mean in means]
    compare(framework, tmp_path / "steps", means)
    compare(framework, tmp_path / "epochs", [means[2], means[5]])
    parts = [np.concatenate(part) for part in (means[:3], means[3:])]
    compare(framework, tmp_path / "pool", parts)


def train_on_five_batches(framework, log_dir, **kwargs):
    """Returns the means of the two epochs' updates: the third belongs to both."""
    optimizer = framework.optimizer(gradient_accumulation_steps=2)
    trained = framework.linear_model(optimizer)
    x, y = small_data(rows=5 * BATCH)
    weights = framework.recorder(trained)
    logger = GradientLogger(str(log_dir), **kwargs)
    framework.fit(trained.model, x, y, epochs=2, callbacks=[logger, weights])
    return means_of_two(weights.values[:-1], np.tile(x, (2, 1)), np.tile(y, (2, 1)))


@pytest.mark.parametrize("framework", optimizers_with("gradient_accumulation_steps"))
def test_the_updates_of_an_epoch_that_ends_between_two(framework, tmp_path):
    """An update belongs to the epoch in which it was made."""
    means = train_on_five_batches(framework, tmp_path, reduce="pool")
    compare(framework, tmp_path, [np.concatenate(m) for m in (means[:2], means[2:])])


@pytest.mark.parametrize("framework", optimizers_with("gradient_accumulation_steps"))
def test_the_last_update_of_an_epoch_that_ends_between_two(framework, tmp_path):
    """Five batches: the last update of the first epoch was that of the fourth."""
    means = train_on_five_batches(framework, tmp_path)
    compare(framework, tmp_path, [means[1], means[4]])
