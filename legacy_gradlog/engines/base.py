"""What every engine promises, and what is asked of it.

An engine makes the training step yield the sketches of the gradients that the
optimizer uses, on chosen steps only. It knows nothing of files, tags or arguments.
"""

from typing import Any, List, NamedTuple, Optional, Tuple

import numpy as np

from .. import sketch
from ..schedule import Cadence, EpochLength

__all__ = ["Capture", "Engine", "Request"]


class Request(NamedTuple):
    """What one logger wants of the training step.

    Attributes:
        cadence: When gradients are wanted.
        clipped: The gradient after the optimizer's clipping instead of before it.
        layers: The layer patterns, or None; a part of the request's identity.
    """

    cadence: Cadence
    clipped: bool
    layers: Optional[Tuple[str, ...]]


class Capture(NamedTuple):
    """The sketches of one update, or of all updates of one epoch.

    Attributes:
        update: Number of the (last) update, counted like `optimizer.iterations` and
            taken before the update that the gradient caused.
        weights: The captured weights, in the order of the rows.
        counts: int64, shape ``(len(weights), sketch.SIZE)``.
        moments: float64, shape ``(len(weights), 5)``.
        missing: The selected weights that got no gradient.
    """

    update: int
    weights: List[Any]
    counts: np.ndarray
    moments: np.ndarray
    missing: List[Any]


class Engine:
    """One logger's way into the training step of one model.

    ``attach`` and ``detach`` may be called in any order and any number of times;
    subclasses implement ``_attach`` and ``_detach``, which are not.

    An engine that has failed stays attached to the end of the fit, inactive: to take it
    out of the step would trace the step anew, and so change the training.

    Args:
        model: The compiled model whose `fit` is running.
        request: What is wanted.
        select: Returns the weights that the request means, as `tags.Weight`, once the
            model's variables exist.
        deliver: At step level, called with the `Capture` of each due update.
        fail: Called with an exception of ours inside a step.
        first_update: No update gets a lower number, whatever the optimizer counts.
    """

    def __init__(self, model, request, select, deliver, fail, first_update=0):
        self.model = model
        self.request = request
        self.select = select
        self.deliver = deliver
        self._fail = fail
        self.active = True
        self.next_update = first_update
        self.length = EpochLength()
        self.epoch_logged = False
        self._attached = False

    def attach(self):
        """Enters the training step."""
        if not self._attached:
            self._attached = True
            self._attach()

    def detach(self):
        """Leaves the training step and puts back what was there."""
        if self._attached:
            self._attached = False
            self._detach()

    def fail(self, error):
        """Stops capturing after a failure of ours."""
        self.active = False
        self._fail(error)

    def begin_epoch(self, logged):
        """Starts an epoch; ``logged``: its epoch-level gradients are wanted."""
        self.length.begin()
        self.epoch_logged = logged

    def end_epoch(self):
        """Ends an epoch and returns its epoch-level `Capture`, None if there is none.

        None for an epoch that ended on another batch than was foretold, too: what was
        captured then is not the epoch's last update.
        """
        raise NotImplementedError

    def _attach(self):
        raise NotImplementedError

    def _detach(self):
        raise NotImplementedError

    @staticmethod
    def pooled(captures):
        """Returns one `Capture` for several of the same weights."""
        last = captures[-1]
        merged = captures[0].counts, captures[0].moments
        for capture in captures[1:]:
            merged = sketch.merge(merged, (capture.counts, capture.moments))
        return last._replace(counts=merged[0], moments=merged[1])
