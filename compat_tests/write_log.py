"""A tiny log of this line: ``python -m compat_tests.write_log DIRECTORY``.

Each Keras of the line has a directory of its own in it, of one Dense layer without bias
that learns for two epochs of one update. `INPUTS` are chosen so that all numbers are
exact in float32, and halve with each update: `LOSSES` and `GRADIENTS`.
"""

import os
import sys

import numpy as np

from legacy_gradlog import TensorBoard

from . import conftest, frameworks

#: One sample, eight times. The kernel begins as ones, so the output is 4.
INPUTS = (3, -2, 1, 1, 1, 0)
TARGET = 2
#: Halves the error, as the sum of the squared inputs is 16: 1 - 2 * 16 / 64.
LEARNING_RATE = 1 / 64

#: Step -> the loss, error ** 2.
LOSSES = {0: 4.0, 1: 1.0}
#: Step -> {value: how many weights have that gradient}, 2 * error * input.
GRADIENTS = {
    0: {-8.0: 1, 0.0: 1, 4.0: 3, 12.0: 1},
    1: {-4.0: 1, 0.0: 1, 2.0: 3, 6.0: 1},
}


def write(fw, log_dir):
    """Trains with one Keras and logs into ``log_dir``."""
    fw.clear()
    x = np.array([INPUTS] * frameworks.BATCH, "float32")
    y = np.full((len(x), 1), TARGET, "float32")
    optimizer = fw.optimizer(rate=LEARNING_RATE)
    model = fw.linear_model(optimizer, inputs=len(INPUTS)).model
    callback = TensorBoard(log_dir, write_grads=True)
    fw.fit(model, x, y, epochs=len(LOSSES), callbacks=[callback])


if __name__ == "__main__":
    for framework in conftest.available():
        write(framework, os.path.join(sys.argv[1], framework.name))
