"""What every engine promises, and what is asked of it.

An engine makes the training step yield the sketches of the gradients that the
optimizer uses, on chosen steps only. It knows nothing of files, tags or arguments.
"""

from typing import Any, List, NamedTuple, Optional, Tuple

import numpy as np

from .. import runtime, sketch
from ..errors import UnsupportedError
from ..schedule import Cadence, EpochLength

__all__ = ["Capture", "Engine", "Request", "refuse_own_gradients"]


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
        optimizer: What the model calls the optimizer that makes the update.
    """

    update: int
    weights: List[Any]
    counts: np.ndarray
    moments: np.ndarray
    optimizer: str = "optimizer"


class Engine:
    """One logger's way into the training step of one model.

    ``attach`` and ``detach`` may be called in any order and any number of times;
    subclasses implement ``_attach`` and ``_detach``, which are not.

    An engine that has failed stays attached to the end of the fit, inactive: to take it
    out of the step would trace the step anew, and so change the training.

    Args:
        model: The compiled model whose `fit` is running.
        request: What is wanted.
        select: Called with the variables of an update, once the model's variables
            exist; returns the weights that the request means, as `tags.Weight`.
        deliver: At step level, called with the `Capture` of each due update.
        fail: Called with an exception of ours inside a step.
        first_updates: By what the model calls an optimizer: no update of it gets a
            lower number, whatever it counts itself.
    """

    def __init__(self, model, request, select, deliver, fail, first_updates=()):
        self.model = model
        self.request = request
        self.select = select
        self.deliver = deliver
        self._fail = fail
        self.active = True
        self._first_updates = dict(first_updates)
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
        """Ends an epoch, returns its epoch-level captures, one for each optimizer.

        None for an epoch that ended on another batch than was foretold: what was
        captured then is not the epoch's last update.
        """
        raise NotImplementedError

    def optimizers(self):
        """Returns what the model calls the optimizers that have updated weights."""
        raise NotImplementedError

    def next_updates(self):
        """Returns the number of the next update, by what the model calls optimizers."""
        raise NotImplementedError

    def missing(self):
        """Returns the selected weights that no gradient has reached."""
        raise NotImplementedError

    def first_update(self, name, optimizer):
        """Returns the number that the first update of this fit gets."""
        counted = runtime.update_count(self.model, optimizer)
        return max(self._first_updates.get(name, 0), counted)

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

    @classmethod
    def combined(cls, captures, pool):
        """Returns one `Capture` for each optimizer out of several of an epoch.

        Args:
            captures: In the order of their updates, of any of the optimizers' weights.
            pool: A weight has all of its updates together, instead of the last.
        """
        places = {}
        for capture in captures:
            names = tuple(weight.path for weight in capture.weights)
            places.setdefault((capture.optimizer, names), []).append(capture)
        rows = {}
        # Of a weight that is in several places the newest comes last.
        for found in sorted(places.values(), key=lambda found: found[-1].update):
            whole = cls.pooled(found) if pool else found[-1]
            parts = rows.setdefault(whole.optimizer, {})
            for row, weight in enumerate(whole.weights):
                part = whole._replace(
                    weights=[weight],
                    counts=whole.counts[row : row + 1],
                    moments=whole.moments[row : row + 1],
                )
                known = parts.get(weight.path)
                if known is not None and pool:
                    part = cls.pooled([known, part])
                parts[weight.path] = part
        return [_joined(list(parts.values())) for parts in rows.values()]


def refuse_own_gradients(model, variables):
    """Raises an error where symbolic gradients are known after clipping only.

    Raises:
        UnsupportedError: The optimizer's class, or what wraps it, makes its own.
    """
    optimizer = model.optimizer
    if runtime.makes_own_gradients(optimizer, model.total_loss, variables):
        raise UnsupportedError(
            "An optimizer must leave `get_gradients` to Keras for its gradients to be "
            "known before clipping. Received: {!r}. With `clipped=True` what its "
            "`get_gradients` returns is logged.".format(type(optimizer).__name__)
        )


def _joined(parts):
    return parts[0]._replace(
        update=max(part.update for part in parts),
        weights=[part.weights[0] for part in parts],
        counts=np.concatenate([part.counts for part in parts]),
        moments=np.concatenate([part.moments for part in parts]),
    )
