"""Which updates are logged, and the step that each record gets.

Plain Python: knows nothing of TensorFlow, Keras or files. Updates are counted like
`optimizer.iterations`: the first update of a fresh optimizer is update 0.
"""

from typing import NamedTuple, Optional

from .errors import InvalidArgumentError

__all__ = ["Cadence", "EpochLength", "EpochSteps", "parse_freq", "parse_reduce"]


class Cadence(NamedTuple):
    """When gradients are logged.

    Attributes:
        every: Log the updates whose number is a multiple of this; None at epoch level.
        pool: At epoch level, one histogram over every update instead of the last one.
        epochs: At epoch level, log the epochs whose index is a multiple of this.
    """

    every: Optional[int] = None
    pool: bool = False
    epochs: int = 1

    def logs_epoch(self, epoch):
        """Whether epoch-level gradients of epoch index ``epoch`` are wanted."""
        return self.every is None and epoch % self.epochs == 0

    def has_due(self, first, last):
        """Whether an update in ``[first, last)`` is to be logged at step level."""
        return -(-first // self.every) * self.every < last


def parse_freq(value, argument):
    """Returns the step-level period of a ``freq`` argument, None for "epoch".

    Raises:
        InvalidArgumentError: Neither "epoch", "batch" nor an integer >= 1.
    """
    if value == "epoch":
        return None
    if value == "batch":
        return 1
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        raise InvalidArgumentError(
            '`{}` must be "epoch", "batch" or an integer >= 1. Received: {!r}.'.format(
                argument, value
            )
        )
    return int(value)


def parse_reduce(value, argument):
    """Returns whether a ``reduce`` argument asks for pooling.

    Raises:
        InvalidArgumentError: Neither "last" nor "pool".
    """
    if value not in ("last", "pool"):
        raise InvalidArgumentError(
            '`{}` must be "last" (the last update of the epoch) or "pool" (all of its '
            "updates in one histogram). Received: {!r}.".format(argument, value)
        )
    return value == "pool"


class EpochLength:
    """Foretells which call of the train function ends an epoch.

    The length that Keras announces is believed until an epoch contradicts it; where
    none is announced, the length of the epoch before is used.
    """

    def __init__(self):
        self._steps = None
        self._trusted = True
        self._seen = 0

    def announce(self, steps):
        """Takes the number of batches per epoch that Keras announced, or None."""
        self._steps = steps
        self._trusted = True

    def begin(self):
        """Starts an epoch."""
        self._seen = 0

    @property
    def known(self):
        return self._trusted and self._steps is not None

    def ends_with(self, steps):
        """Whether a call of up to ``steps`` batches may hold the epoch's last one."""
        return not self.known or self._seen + steps >= self._steps

    def advance(self, steps):
        """Counts a finished call of ``steps`` batches."""
        self._seen += steps

    def finish(self, steps_per_call):
        """Ends an epoch; False if its last batch came earlier or later than foretold.

        A last call may have been shorter than ``steps_per_call``.
        """
        if not self.known:
            self._steps = self._seen
            return True
        if self._steps <= self._seen < self._steps + steps_per_call:
            return True
        self._trusted = False
        return False


class EpochSteps:
    """Numbers epoch-level records so that no step is written twice.

    The step is the epoch index. When a later fit starts over, its first record takes
    the step after the last one written, and the epochs that follow keep the distance.
    """

    def __init__(self):
        self._last = -1
        self._offset = None

    def begin_fit(self):
        self._offset = None

    def step(self, epoch):
        if self._offset is None:
            self._offset = max(0, self._last + 1 - epoch)
        self._last = epoch + self._offset
        return self._last
