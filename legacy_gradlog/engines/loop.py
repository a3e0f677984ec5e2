"""The function engine's sibling for loops that nobody but the user knows.

A hand-written loop calls the optimizer itself, eagerly or in a `tf.function` of its
own. There is no call of a train function after which variables could be read, so a due
update hands its sketches to the host from within the step.
"""

import functools
import weakref

from .. import errors, runtime
from ..errors import UnsupportedError
from .base import Capture, Engine
from .gate import Gate, Selection
from .hook import OptimizerHook, generation_of
from .sketch_ops import Packing

__all__ = ["LoopEngine"]

#: By optimizer, the taps that its users' functions may have been traced with.
_taps = weakref.WeakKeyDictionary()


class LoopEngine(Engine):
    """Sees every update of one optimizer between `attach` and `detach`."""

    def __init__(self, optimizer, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._optimizer = optimizer
        self._tap = None

    def _attach(self):
        generation_of(self._optimizer)
        first = self.first_update("optimizer", self._optimizer)
        self._tap = Tap.of(self._optimizer, self.request)
        self._tap.begin(self, first)
        self._hook = OptimizerHook(self._optimizer, self._on_update)
        self._hook.__enter__()

    def _detach(self):
        if self._tap is not None:
            self._hook.__exit__()
            self._tap.end()

    def _on_update(self, before, after):
        if self.active:
            replicas = runtime.replicas_here()
            if runtime.leaves_reduction_to_the_update(self._optimizer, replicas):
                raise UnsupportedError(
                    "An optimizer must sum the replicas' parts of a gradient before it "
                    "makes an update for a hand-written loop to be logged. Received: "
                    "{} replicas, and {!r}, which sums them within. Train with "
                    "`fit`.".format(replicas, type(self._optimizer).__name__)
                )
            with errors.contain(self.fail):
                self._tap.gate.pass_through(
                    0, False, after if self.request.clipped else before
                )

    def next_updates(self):
        return {"optimizer": self._tap.gate.look()} if self._tap else {}

    def optimizers(self):
        return ["optimizer"]

    def missing(self):
        # What other weights there are is not known.
        return []


class Tap:
    """A gate in functions of the user's, which outlive the engine that made it.

    While no engine listens it is shut. A later engine with the same request takes it
    up, since the functions are not traced again.
    """

    def __init__(self, request):
        self._engine = None
        self.gate = Gate(
            "optimizer",
            request,
            Selection(self._select),
            functools.partial(HandingStore, self._hand_over),
            steps=1,
            pooled_outside=False,
            closable=True,
        )

    @classmethod
    def of(cls, optimizer, request):
        """Returns the tap of earlier engines with this request, or a new one."""
        taps = _taps.setdefault(optimizer, {})
        if request not in taps:
            taps[request] = cls(request)
        if taps[request]._engine is not None:
            # Two loggers of one request.
            return cls(request)
        return taps[request]

    def begin(self, engine, update):
        """Hands what is captured to ``engine``; its first update has this number."""
        self._engine = engine
        self.gate.reset(update)
        self.gate.open(True)

    def end(self):
        """Hands nothing over any more."""
        self._engine = None
        self.gate.open(False)

    def _select(self, variables):
        return self._engine.select(variables)

    def _hand_over(self, weights, update, counts, moments):
        engine = self._engine
        if engine.active:
            with errors.contain(engine.fail):
                engine.deliver(Capture(int(update), weights, counts, moments))


class HandingStore:
    """Keeps nothing: calls the host with the sketches of each due update."""

    def __init__(self, hand_over, weights, gradients, rows):
        self._hand_over = functools.partial(hand_over, list(weights))
        self._packing = Packing(gradients)

    def empty(self):
        """There is nothing to forget."""

    def write(self, row, update, gradients):
        tf = runtime.tensorflow()
        if runtime.is_in_xla():
            raise UnsupportedError(
                "A function that XLA compiles cannot call the host, so the gradients "
                "in it cannot be handed over. Received: a `tf.function` with "
                "`jit_compile=True`. Call the optimizer outside of it, or train with "
                "`fit`."
            )
        if runtime.replica_number() == 0:
            packed = self._packing.pack(gradients)
            tf.numpy_function(self._call, (update, packed), tf.int64)

    def _call(self, update, packed):
        self._hand_over(update, *self._packing.unpack(packed))
        return update
