"""The models that the benchmark trains, from a few large weights to many small ones."""

from typing import Any, Callable, NamedTuple

import numpy as np

__all__ = ["WORKLOADS", "Workload", "branches_of", "stack_of"]


class Workload(NamedTuple):
    """One model and its data.

    Attributes:
        name: As printed.
        outputs: Called with a framework and an input, returns the output tensor.
        shape: Of one row of input.
        classes: Above 0, the input are integers below it.
        optimizer: What it is trained with.
        width: Of one row of output.
        steps: Batches per epoch.
        short: Batches per epoch where something is done once an epoch.
        batch: Rows per batch.
    """

    name: str
    outputs: Callable[[Any, Any], Any]
    shape: tuple
    width: int
    steps: int
    short: int
    batch: int = 32
    classes: int = 0
    optimizer: str = "Adam"

    def model(self, fw, make=None, **compile_arguments):
        """Returns a compiled model."""
        kind = {"dtype": "int32"} if self.classes else {}
        inputs = fw.layers.Input(self.shape, **kind)
        model = (make or fw.keras.models.Model)(inputs, self.outputs(fw, inputs))
        optimizer = fw.optimizer(self.optimizer, rate=1e-4)
        model.compile(optimizer, "mse", **compile_arguments)
        return model

    def data(self, steps=None):
        """Returns inputs and targets, of an epoch if ``steps`` are not given."""
        random = np.random.RandomState(0)
        rows = (steps or self.steps) * self.batch
        if self.classes:
            x = random.randint(0, self.classes, (rows,) + self.shape).astype("int32")
        else:
            x = random.randn(rows, *self.shape).astype("float32")
        return x, random.randn(rows, self.width).astype("float32")


def stack_of(*widths):
    """Returns a builder of ``Dense`` layers one after the other."""

    def outputs(fw, inputs):
        for width in widths[:-1]:
            inputs = fw.layers.Dense(width, activation="relu")(inputs)
        return fw.layers.Dense(widths[-1])(inputs)

    return outputs


def _convnet(fw, inputs):
    layers = fw.layers
    for filters in (32, 64, 64):
        inputs = layers.Conv2D(filters, 3, activation="relu", padding="same")(inputs)
        inputs = layers.MaxPooling2D()(inputs)
    return layers.Dense(10)(layers.Flatten()(inputs))


def _embedding(fw, inputs):
    hidden = fw.layers.Embedding(50000, 64)(inputs)
    return stack_of(64, 1)(fw, fw.layers.Flatten()(hidden))


def branches_of(number):
    """Returns a builder of small ``Dense`` layers, all of one input."""

    def outputs(fw, inputs):
        branches = [fw.layers.Dense(4)(inputs) for _ in range(number)]
        return fw.layers.Concatenate()(branches)

    return outputs


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mlp", stack_of(256, 256, 256, 256, 1), (64,), 1, steps=100, short=20),
        Workload("convnet", _convnet, (32, 32, 3), 10, steps=10, short=5),
        Workload("embedding", _embedding, (20,), 1, steps=20, short=10, classes=50000),
        # TensorFlow takes minutes to trace a step of Adam with so many weights.
        Workload(
            "wide", branches_of(500), (16,), 2000, steps=20, short=10, optimizer="SGD"
        ),
        Workload("big", stack_of(5000, 8000, 600), (1000,), 600, steps=3, short=2),
    )
}
