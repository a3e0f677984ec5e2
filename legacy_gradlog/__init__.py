"""Per-weight gradients in TensorBoard, on every Keras and TensorFlow generation."""

from .callbacks import GradientLogger, TensorBoard
from .errors import (
    GradlogError,
    GradlogWarning,
    InvalidArgumentError,
    LogDirectoryError,
    UnknownArgumentError,
    UnsupportedError,
)
from .runtime import detect

__all__ = [
    "GradientLogger",
    "GradlogError",
    "GradlogWarning",
    "InvalidArgumentError",
    "LogDirectoryError",
    "TensorBoard",
    "UnknownArgumentError",
    "UnsupportedError",
    "detect",
]

__version__ = "0.1.0"
