"""Makes the pictures of README.rst: four trainings, drawn by ``show --png``.

    python docs/pictures.py DIRECTORY

writes pictures into a new directory, and logs below it. One training is the demo, the
others have a fault each. Uses the package as any script does; must not know how
gradients are captured or drawn.
"""

import os
import sys

import tensorflow as tf

from legacy_gradlog import GradientLogger, demo, runtime
from legacy_gradlog.__main__ import main as legacy_gradlog

SEED = 1
EPOCHS = 3
#: Updates between two records.
FREQ = 5
#: Of each training the weights in its picture, by a pattern.
WEIGHTS = {
    "dead": "*[2t]/*",
    "exploding": "*",
    "healthy": "*[2nt]/kernel",
    "vanishing": "*[15t]/kernel",
}


def network(depth, units, **options):
    """Returns a network of ``depth`` hidden layers, from ``hidden1`` on."""
    layers = tf.keras.layers
    image = layers.Input(shape=(8, 8, 1), name="image")
    x = layers.Flatten(name="flat")(image)
    for number in range(1, depth + 1):
        x = layers.Dense(32, name="hidden{}".format(number), **options)(x)
    activation = "softmax" if units > 1 else "linear"
    output = layers.Dense(units, activation=activation, name="output")(x)
    return tf.keras.models.Model(inputs=image, outputs=output)


def train(log_dir):
    """Trains what has a fault, a run each: ``dead``, ``exploding``, ``vanishing``."""
    runtime.set_seed(tf.keras, SEED)
    classes = "sparse_categorical_crossentropy"
    off = tf.keras.initializers.Constant(-10.0)
    faults = {
        # Every unit is off, whatever the image.
        "dead": (network(2, 10, activation="relu", bias_initializer=off), classes),
        # Takes the digit for a number. Its loss is so curved that a rate above 0.087
        # makes each update overshoot by more than the one before.
        "exploding": (network(0, 1), "mse"),
        # The slope of a sigmoid is a quarter at most, and there are eight in a row.
        "vanishing": (network(8, 10, activation="sigmoid"), classes),
    }
    # Batches of 32: a shorter last one would have a larger gradient.
    images, labels = [array[:1792] for array in demo.load_digits()]
    for name, (model, loss) in sorted(faults.items()):
        model.compile(tf.keras.optimizers.SGD(0.09), loss)
        logger = GradientLogger(os.path.join(log_dir, name), freq=FREQ)
        model.fit(
            images, labels, batch_size=32, epochs=EPOCHS, verbose=0, callbacks=[logger]
        )


def draw(log_dir, folder):
    """Draws a picture of each run below ``log_dir`` into ``folder``."""
    for name, pattern in sorted(WEIGHTS.items()):
        path = os.path.join(folder, name + ".png")
        logs = os.path.join(log_dir, name)
        legacy_gradlog(["show", logs, "--tag", pattern, "--png", path])


def main(folder):
    log_dir = os.path.join(folder, "logs")
    legacy_gradlog(["demo", "--logdir", log_dir, "--seed", str(SEED)])
    os.rename(os.path.join(log_dir, "run-1", "steps"), os.path.join(log_dir, "healthy"))
    train(log_dir)
    draw(log_dir, folder)


if __name__ == "__main__":
    main(sys.argv[1])
