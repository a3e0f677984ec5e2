"""The part of `doctor` that imports frameworks and trains: a process of its own.

What is broken may end the process that imports it, and says much before that. So this
one is started by `doctor`, tells each thing that it knows as a line of JSON, and may
end at any of them. Trains by the public callbacks, and reads back what they wrote.
"""

import json
import os
import tempfile
import warnings

import numpy as np

from . import events, runtime
from .callbacks import GradientLogger
from .errors import UnsupportedError

__all__ = ["main"]

STEPS = 10
BATCH = 8
#: Of the SGD that every Keras makes of its name.
LEARNING_RATE = 0.01
WEIGHTS = ["hidden/kernel", "hidden/bias", "out/kernel", "out/bias"]


def main():
    """Writes to stdout one JSON object a line: a package, a Keras, or what comes now.

    What others write there goes to stderr.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    warnings.simplefilter("ignore")
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stream:
        os.dup2(2, 1)

        def tell(**facts):
            stream.write(json.dumps(facts) + "\n")
            stream.flush()

        for name in ("numpy", "tensorflow", "tensorboard"):
            tell(doing="importing " + name)
            version, problem = runtime.installed(name)
            tell(package=name, version=version, problem=problem)
        tell(line=runtime.nearest_line())
        trained = {}
        for name in ("keras", "tf.keras", "tf_keras"):
            tell(doing="importing " + name)
            keras, version, problem = runtime.find_keras(name)
            tell(package=name, version=version, problem=problem)
            if keras is None:
                continue
            # From 2.4 to 2.15, and where Keras 3 is `tf.keras`, two names are one.
            same = trained.setdefault(keras.models.Model, name)
            if same != name:
                tell(keras=name, same_as=same)
                continue
            tell(doing="training " + name, keras=name)
            tell(keras=name, **_examine(keras))


def _examine(keras):
    """Returns the engine that a model gets, and how ten steps of it came out."""
    try:
        model = _make_model(keras)
        found = runtime.detect(model)
    except Exception as error:
        return dict(state="failed", problem=_told(error))
    facts = dict(mode=found.mode, engine=found.engine, reason=found.reason)
    if found.engine is None:
        return dict(facts, state="refused", problem=found.reason)
    try:
        with tempfile.TemporaryDirectory() as log_dir:
            problem = _train(keras, model, log_dir)
    except UnsupportedError as error:
        return dict(facts, state="refused", problem=_told(error))
    except Exception as error:
        return dict(facts, state="failed", problem=_told(error))
    return dict(facts, state="wrong" if problem else "right", problem=problem)


def _told(error):
    return "{}: {}".format(type(error).__name__, error)


def _make_model(keras):
    layers = keras.layers
    inputs = layers.Input((4,), name="inputs")
    hidden = layers.Dense(3, activation="tanh", name="hidden")(inputs)
    model = keras.models.Model(inputs, layers.Dense(1, name="out")(hidden))
    # `keras` 2.6 to 2.8 have no class of that name.
    model.compile("sgd", "mse")
    return model


def _train(keras, model, log_dir):
    """Trains `STEPS` updates of plain SGD; returns what was logged wrongly, or None."""
    weights = []

    class Weights(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            weights.append(model.get_weights())

        def on_batch_end(self, batch, logs=None):
            weights.append(model.get_weights())

    numbers = np.random.RandomState(1)
    x = numbers.randn(STEPS * BATCH, 4).astype("float32")
    y = numbers.randn(STEPS * BATCH, 1).astype("float32")
    logger = GradientLogger(log_dir, freq="batch")
    callbacks = [logger, Weights()]
    model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0, callbacks=callbacks)
    return compare(weights, list(events.Reader(log_dir)))


def compare(weights, values):
    """Compares what was logged with the change of the weights.

    Args:
        weights: The weights, in the order of `WEIGHTS`, before the first and after
            every update: lists of float32 arrays.
        values: The `events.Value`s that were logged.

    Returns:
        What is wrong first, None where all is right.
    """
    logged = {}
    for value in values:
        if isinstance(value.data, events.Histogram):
            logged.setdefault((value.tag, value.step), []).append(value.data)
    for step, (before, after) in enumerate(zip(weights, weights[1:])):
        for path, old, new in zip(WEIGHTS, before, after):
            found = logged.pop((path + "_0_grad", step), [])
            if len(found) != 1:
                return "{} records of {} at step {}".format(len(found), path, step)
            problem = _difference(found[0], old, new)
            if problem:
                return "{} at step {}: {}".format(path, step, problem)
    if len(weights) != STEPS + 1 or logged:
        return "{} updates, and {} records too many".format(
            len(weights) - 1, len(logged)
        )
    return None


def _difference(histogram, old, new):
    gradient = (old.astype(np.float64) - new) / LEARNING_RATE
    largest = max(np.abs(old).max(), np.abs(new).max())
    # The weights before and after are rounded to float32, and so is the update itself.
    error = 2 * np.finfo(np.float32).eps * largest / LEARNING_RATE
    if histogram.count != gradient.size:
        return "{:g} values in place of {}".format(histogram.count, gradient.size)
    for name, logged, true, size in (
        ("minimum", histogram.min, gradient.min(), 1),
        ("maximum", histogram.max, gradient.max(), 1),
        ("sum", histogram.sum, gradient.sum(), gradient.size),
    ):
        slack = size * (error + 1e-5 * np.abs(gradient).max())
        # NaN is near nothing.
        if not abs(logged - true) <= slack:
            return "{} {:.6g}, the weights say {:.6g}".format(name, logged, true)
    return None
