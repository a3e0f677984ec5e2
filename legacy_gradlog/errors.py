"""Exceptions and warnings of the package, and the one place that contains a failure.

Every message states the rule, what was received, and the remedy. A failure of the
package itself must not reach the training run: ``contain`` turns it into one warning.
"""

import contextlib
import warnings

__all__ = [
    "GradlogError",
    "GradlogWarning",
    "InvalidArgumentError",
    "LogDirectoryError",
    "UnknownArgumentError",
    "UnsupportedError",
]

#: Set by the project's own test suite: a contained failure raises instead of warning.
strict = False


class GradlogError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidArgumentError(GradlogError, ValueError):
    """An argument has a value that the package cannot honour."""

    # AutoGraph keeps the class of an error that it can make from a message alone.
    __init__ = Exception.__init__


class UnknownArgumentError(GradlogError, TypeError):
    """An argument that no generation of the stock callback ever had."""


class LogDirectoryError(GradlogError, OSError):
    """The log directory cannot be written."""


class UnsupportedError(GradlogError, RuntimeError):
    """The gradient cannot be captured correctly here, so it is not captured."""

    __init__ = Exception.__init__


class GradlogWarning(UserWarning):
    """Everything that this package warns about."""


def warn(message):
    """Emits ``message`` as a `GradlogWarning`."""
    warnings.warn(message, GradlogWarning, stacklevel=3)


@contextlib.contextmanager
def contain(on_failure):
    """Keeps a failure of the package away from the training run.

    Args:
        on_failure: Called with the exception, once, in place of the exception. Errors
            that the package raises on purpose and control flow (`KeyboardInterrupt`)
            pass through.
    """
    try:
        yield
    except GradlogError:
        raise
    except Exception as error:
        if strict:
            raise
        on_failure(error)
