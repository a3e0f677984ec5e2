"""What works, what is refused and what stock Keras gets wrong, by line of the matrix.

Data, from which `doctor` tells what is known of the versions that it finds. The table
of README.rst says the same, in the same words; a test compares them. What begins with
the name of a Keras is true of that one alone.
"""

from typing import NamedTuple, Tuple

__all__ = ["LINES", "Line"]


class Line(NamedTuple):
    """One environment of tox.ini.

    Attributes:
        name: Its name there.
        tensorflow: The TensorFlow release that it runs.
        works: What works.
        refused: What is refused, with the reason, before the first step.
        stock: What the stock `TensorBoard` callback gets wrong.
    """

    name: str
    tensorflow: str
    works: str
    refused: Tuple[str, ...]
    stock: Tuple[str, ...]


_BOTH = "``keras`` and ``tf.keras``"
_NO_GRADIENTS = ("no gradients",)
_EAGER = ("eager execution",)
#: The first family of stock callbacks, which wrote gradients.
_SLICES = (
    "gradients of validation slices, several at one step",
    "needs validation arrays",
    "files of one second overwrite each other",
)
_ON_AND_OFF = "``tf.keras``, eager on and off"
_PARAMETER_SERVERS = "with parameter servers all but the last update of an epoch"
_OFF_OR_REPLICAS = "loss scaling with eager off or several replicas"
_TPU = ("loss scaling with eager off", "TPU", _PARAMETER_SERVERS)
_KERAS_3 = (
    "TPU, several workers, parameter servers",
    "loss scaling of accumulated gradients",
    "other backends than TensorFlow",
)

LINES = (
    Line("py36-tf1.4-keras2.1.2", "1.4", _BOTH, _EAGER, _SLICES),
    Line(
        "py36-tf1.10-keras2.1.6",
        "1.10",
        _BOTH,
        _EAGER,
        _SLICES + ("``tf.keras``: histograms at steps that run into later epochs",),
    ),
    Line(
        "py36-tf1.13-keras2.2.4",
        "1.13",
        _BOTH,
        _EAGER,
        _SLICES
        + (
            "``tf.keras``: fails without validation data, histogram steps count "
            "validation batches",
        ),
    ),
    Line(
        "py37-tf1.15-keras2.3.1",
        "1.15",
        _BOTH,
        _EAGER,
        _SLICES + ("``tf.keras``: no histograms without validation data",),
    ),
    Line(
        "py37-tf1.15-keras2.3.1-horovod",
        "1.15",
        "the same under Horovod 0.28, two workers: the reduced gradient",
        (
            "``clipped=False`` where the optimizer clips",
            "``backward_passes_per_step`` above 1",
            "local layers",
        ),
        _SLICES + ("its gradients stop the run",),
    ),
    Line(
        "py37-tf2.0-keras2.3.1",
        "2.0",
        _BOTH + ", eager on and off",
        (
            _OFF_OR_REPLICAS,
            "strategies but Mirrored and OneDevice",
            "weight histograms of ``keras`` with eager off",
        ),
        ("``keras`` with eager off: its histograms fail",),
    ),
    Line(
        "py37-tf2.2-keras2.4.3",
        "2.2",
        _ON_AND_OFF,
        (_OFF_OR_REPLICAS, "parameter servers, TPU"),
        _NO_GRADIENTS,
    ),
    Line(
        "py38-tf2.4",
        "2.4",
        _ON_AND_OFF,
        (_OFF_OR_REPLICAS, "parameter servers, TPU"),
        _NO_GRADIENTS,
    ),
    Line("py39-tf2.8", "2.8", _ON_AND_OFF, _TPU, _NO_GRADIENTS + ("no batch scalars",)),
    Line(
        "py310-tf2.10", "2.10", _ON_AND_OFF, _TPU, _NO_GRADIENTS + ("no batch scalars",)
    ),
    Line(
        "py311-tf2.15",
        "2.15",
        _ON_AND_OFF + "; new and legacy optimizers",
        _TPU,
        _NO_GRADIENTS,
    ),
    Line(
        "py311-tf2.16-tf_keras",
        "2.16",
        "``keras`` 3 and ``tf_keras`` in one process",
        (
            "``tf_keras``: TPU, " + _PARAMETER_SERVERS,
            "``keras`` 3: TPU, several workers, parameter servers",
        ),
        _NO_GRADIENTS,
    ),
    Line("py312-tf2.19-keras3", "2.19", "``keras`` 3", _KERAS_3, _NO_GRADIENTS),
    Line(
        "py313-tf2.21-keras3.15",
        "2.21",
        "``keras`` 3",
        _KERAS_3,
        _NO_GRADIENTS
        + (
            "drops epoch scalars and histograms where ``update_freq`` does not divide "
            "the batches",
        ),
    ),
)
