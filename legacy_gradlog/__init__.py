"""Per-weight gradients in TensorBoard, on every Keras and TensorFlow generation."""

from . import errors
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

__all__ = ["GradientLogger", "TensorBoard", "detect"] + errors.__all__

__version__ = "0.1.0"
