"""The demo: gradients of a small network that learns real handwritten digits.

Uses the package as any script does: one Keras, the public callbacks and what they offer
other callbacks. Must not know how gradients are captured, nor read what was written.
"""

import importlib
import itertools
import logging
import os
import shlex

import numpy as np

from . import runtime, terminal, writers
from .callbacks import GradientLogger, TensorBoard
from .errors import GradlogError, LogDirectoryError, UnsupportedError
from .terminal import say

__all__ = ["EPOCHS", "FREQ", "LOG_DIR", "load_digits", "run"]

EPOCHS = 10
LOG_DIR = os.path.join(os.curdir, "logs", "gradlog-demo")
#: Updates between the step-level records.
FREQ = 10

BATCH_SIZE = 32
#: The last ones, unshuffled: neighbours may be of one writer, whom validation should
#: not know.
VALIDATION_IMAGES = 360


def run(log_dir, epochs, seed=None):
    """Trains, logs and prints.

    Args:
        log_dir: Directory in which this run makes its own, ``run-<number>``.
        epochs: Passes over the training images, at least 1.
        seed: Seed of every random number, None for none.

    Returns:
        0, the exit code.

    Raises:
        GradlogError: The directory cannot be written, or gradients cannot be logged
            with what is installed.
    """
    # Importing TensorFlow takes seconds; a directory that cannot be used is told first.
    writers.check_directory(log_dir)
    keras = _import_keras()
    if seed is not None:
        runtime.set_seed(keras, seed)
    model = _make_model(keras)
    say(str(runtime.detect(model)))

    run_dir = _make_run_directory(log_dir)
    logger = GradientLogger(os.path.join(run_dir, "steps"), freq=FREQ)
    progress = _progress(keras, logger, epochs)
    epoch_level = TensorBoard(
        os.path.join(run_dir, "epochs"), histogram_freq=1, write_grads=True
    )
    images, labels = load_digits()
    validation = images[-VALIDATION_IMAGES:], labels[-VALIDATION_IMAGES:]
    model.fit(
        images[:-VALIDATION_IMAGES],
        labels[:-VALIDATION_IMAGES],
        batch_size=BATCH_SIZE,
        epochs=epochs,
        verbose=0,
        validation_data=validation,
        callbacks=[epoch_level, logger, progress],
    )
    _, accuracy = model.evaluate(*validation, verbose=0)

    _report(logger.latest, progress.norms)
    say("validation accuracy: {:.1%}".format(accuracy))
    say("log directory: {}".format(run_dir))
    say("look at it with: tensorboard --logdir {}".format(shlex.quote(run_dir)))
    return 0


def _import_keras():
    """Returns the Keras of this environment, without the chatter of its start."""
    terminal.quieten_frameworks()
    try:
        # TensorFlow brings it up to 2.20; without it the stock callback ends the run.
        importlib.import_module("tensorboard")
        keras = runtime.default_keras()
    except ImportError as error:
        raise UnsupportedError(
            "The demo must have TensorFlow and TensorBoard. Received: {}. Install them "
            "with: python -m pip install tensorflow tensorboard".format(error)
        ) from error
    # TensorFlow sets the level itself when it is imported.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    return keras


def load_digits():
    """Returns the digits that come with the package; `data/digits.txt` tells whose.

    Returns:
        Images, float32, shape ``(1797, 8, 8, 1)``, from 0 to 1, and labels, int32,
        shape ``(1797,)``.
    """
    path = os.path.join(os.path.dirname(__file__), "data", "digits.npz")
    with np.load(path) as arrays:
        images = arrays["images"].astype(np.float32)[..., np.newaxis] / 16
        return images, arrays["labels"].astype(np.int32)


def _make_model(keras):
    layers = keras.layers
    image = layers.Input(shape=(8, 8, 1), name="image")
    # A bias before BatchNormalization would get no gradient but rounding.
    x = layers.Conv2D(16, 3, padding="same", use_bias=False, name="conv1")(image)
    # The usual 0.99 averages over more updates than a short run has.
    x = layers.BatchNormalization(momentum=0.9, name="norm1")(x)
    x = layers.Activation("relu", name="relu1")(x)
    x = layers.MaxPooling2D(2, name="pool1")(x)
    x = layers.Conv2D(32, 3, padding="same", activation="relu", name="conv2")(x)
    x = layers.MaxPooling2D(2, name="pool2")(x)
    x = layers.Flatten(name="flat")(x)
    x = layers.Dropout(0.25, name="dropout")(x)
    x = layers.Dense(64, activation="relu", name="hidden")(x)
    output = layers.Dense(10, activation="softmax", name="output")(x)
    model = keras.models.Model(inputs=image, outputs=output, name="digits")
    model.compile(
        optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def _make_run_directory(log_dir):
    """Makes and returns the first free one of ``run-1``, ``run-2``, ..."""
    for number in itertools.count(1):
        path = os.path.join(log_dir, "run-{}".format(number))
        try:
            # Fails where the directory exists, so that two runs never share one.
            os.mkdir(path)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise LogDirectoryError(
                "`log_dir` must be a local directory that can be written. Received: "
                "{!r} ({}). Give another directory.".format(log_dir, error)
            ) from error


def _progress(keras, logger, epochs):
    """Returns a callback that collects what ``logger`` logs, and tells each epoch.

    Its ``norms`` is a dict of weight path -> {update number: norm}.
    """

    class Progress(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.norms = {}

        def on_batch_end(self, batch, logs=None):
            for path, record in logger.latest.items():
                self.norms.setdefault(path, {})[record.step] = record.norm

        def on_epoch_end(self, epoch, logs=None):
            say(
                "epoch {:>{}}/{}  loss {:.4f}  validation loss {:.4f}".format(
                    epoch + 1, len(str(epochs)), epochs, logs["loss"], logs["val_loss"]
                )
            )

    return Progress()


def _report(records, norms):
    """Prints one line a weight.

    Args:
        records: Weight path -> newest record.
        norms: Weight path -> {update number: norm}.

    Raises:
        GradlogError: There are no records.
    """
    if not records:
        raise GradlogError("No gradient was logged. A warning above tells the cause.")
    last = max(record.step for record in records.values())
    width = max(len(path) for path in records)
    bars = terminal.bars()
    say("gradients of update {}; norms of every {}th update".format(last, FREQ))
    row = "{:<{}}  {:>9}  {:>9}  {}"
    title = "norm over the run, from 0 to its largest"
    say(row.format("weight", width, "mean |g|", "norm", title))
    for path, record in records.items():
        mean_abs, norm = "{:.3e}".format(record.mean_abs), "{:.3e}".format(record.norm)
        line = terminal.sparkline(list(norms[path].values()), bars)
        say(row.format(path, width, mean_abs, norm, line))
