"""The graph engine: sessions, in TensorFlow 1 and in TensorFlow 2 with eager off.

The gradients are built once and fetched in the session run of the training step
itself, on due steps only. `fit` has bound the function object before any callback is
told of the model, so the object is changed in place: its class dispatches the due steps
to a copy that has more outputs. What was built is kept on the loss tensor that it is
the gradient of.
"""

import copy

from .. import errors, runtime
from ..errors import UnsupportedError
from .base import Capture, Engine, refuse_own_gradients
from .reductions import Reductions
from .sketch_ops import Packing

__all__ = ["GraphEngine"]

_CACHE = "_legacy_gradlog"

#: Of what is built here. Horovod's workers find each other's operations by name, and
#: one that logs must not name what is built after it otherwise than the others do.
_SCOPE = "legacy_gradlog"


class GraphEngine(Engine):
    """Counts the calls of the train function and fetches sketches on the due ones."""

    def __init__(self, *args, in_fit=True, **kwargs):
        super().__init__(*args, **kwargs)
        self._in_fit = in_fit
        self._dispatcher = None
        self._captures = []
        self._next_update = None

    def _attach(self):
        optimizer = self.model.optimizer
        if runtime.inner_optimizer(optimizer) is not optimizer:
            # Both are done in one session run, in no order.
            raise UnsupportedError(
                "With loss scaling gradients can be logged in eager mode only, since a "
                "session may change the scale before it is read. Received: {!r}. Leave "
                "eager execution on, or train with float32.".format(
                    type(optimizer).__name__
                )
            )
        names = runtime.stateful_loops(self.model)
        if names:
            raise UnsupportedError(
                "A stateful recurrent layer must be unrolled for its gradients to be "
                "logged on this TensorFlow, where a step may read the state that it "
                "has just written. Received: {}. Build it with `unroll=True`, or take "
                "TensorFlow 1.10 or later.".format(", ".join(names))
            )
        function = runtime.session_train_function(self.model, self._in_fit)
        self.outputs = _Outputs.of(self.model, function, self.request, self.select)
        self._dispatcher = _Dispatcher.of(function)
        self._dispatcher.engines.append(self)

    def _detach(self):
        if self._dispatcher is not None:
            self._dispatcher.leave(self)

    def begin_epoch(self, logged):
        super().begin_epoch(logged)
        self._captures = []

    def before_call(self):
        """Returns whether the update of this call is due."""
        if self._next_update is None:
            self._next_update = self.first_update("optimizer", self.model.optimizer)
        cadence = self.request.cadence
        if cadence.every is not None:
            return self._next_update % cadence.every == 0
        return self.epoch_logged and (cadence.pool or self.length.ends_with(1))

    def after_call(self, fetched):
        """Takes what was fetched, packed, or None; counts the update."""
        update = self._next_update
        self._next_update += 1
        self.length.advance(1)
        if fetched is None:
            return
        outputs = self.outputs
        capture = Capture(update, outputs.weights, *outputs.packing.unpack(fetched))
        if self.request.cadence.every is not None:
            self.deliver(capture)
        elif self.request.cadence.pool and self._captures:
            self._captures = [self.pooled(self._captures + [capture])]
        else:
            self._captures = [capture]

    def end_epoch(self):
        as_foretold = self.length.finish(1)
        captures, self._captures = self._captures, []
        if captures and (as_foretold or self.request.cadence.pool):
            return captures
        return None

    def optimizers(self):
        return ["optimizer"]

    def next_updates(self):
        if self._next_update is None:
            return {}
        return {"optimizer": self._next_update}

    def missing(self):
        return self.outputs.missing


class _Outputs:
    """The sketches of one request as tensors of the training graph.

    Attributes:
        weights: The weights that have a gradient.
        missing: Those that have none.
        packing: How their sketches are packed.
        tensor: The packed sketches, None where there are no weights.
    """

    def __init__(self, model, reductions, request, select):
        weights = [w for w in select([]) if runtime.is_floating(w.variable)]
        if reductions is not None:
            gradients = self._reduced_gradients(model, reductions, request, weights)
        else:
            gradients = self._gradients(model, request, weights)
        found = [(w, g) for w, g in zip(weights, gradients) if g is not None]
        #: Copies of train functions that fetch these: ``(function, outputs, copy)``.
        self.copies = []
        self.weights = [weight for weight, _ in found]
        self.missing = [w for w, g in zip(weights, gradients) if g is None]
        gradients = [gradient for _, gradient in found]
        self.packing = Packing(gradients)
        self.tensor = self.packing.pack(gradients) if gradients else None

    @classmethod
    def of(cls, model, function, request, select):
        """Returns the outputs for a train function, built in an earlier fit or now."""
        model = runtime.session_model(model)
        loss = model.total_loss
        # `compile` makes another loss tensor, and what is built here goes with it.
        built = getattr(loss, _CACHE, None)
        if built is None:
            built = {}
            setattr(loss, _CACHE, built)
        reductions = _reductions_of(model, function)
        key = (request.clipped, request.layers)
        if reductions is not None:
            # Another train function has reductions of its own.
            key += (function.updates_op.name,)
        if key not in built:
            with loss.graph.as_default(), runtime.tensorflow().name_scope(_SCOPE):
                built[key] = cls(model, reductions, request, select)
        return built[key]

    @staticmethod
    def _reduced_gradients(model, reductions, request, weights):
        """Returns the gradients that Horovod reduces in every step anyway.

        To build gradients of our own would be to reduce them once more, on those
        workers only that log.
        """
        early = runtime.clips_in_get_gradients(model.optimizer)
        if runtime.clips(model.optimizer) and early != request.clipped:
            raise UnsupportedError(
                "Under Horovod the gradient is known where it is reduced, and this "
                "optimizer clips {} that. Received: `clipped={}`. With `clipped={}` "
                "the reduced gradient is logged.".format(
                    "before" if early else "after", request.clipped, early
                )
            )
        return [reductions.gradient_of(w.variable, w.path) for w in weights]

    @staticmethod
    def _gradients(model, request, weights):
        if not request.clipped:
            variables = [weight.variable for weight in weights]
            refuse_own_gradients(model, variables)
            return runtime.backend_of(model).gradients(model.total_loss, variables)
        # By the norm of all weights together, so all of them go in.
        trained = runtime.trained_weights(model)
        gradients = runtime.clipped_gradients(
            model.optimizer, model.total_loss, trained
        )
        by_id = {id(v): gradient for v, gradient in zip(trained, gradients)}
        return [by_id[id(weight.variable)] for weight in weights]


def _reductions_of(model, function):
    """Returns the `Reductions` of a train function, None where Horovod is not used."""
    if not runtime.horovod_is_imported():
        return None
    reductions = Reductions(function.updates_op)
    if reductions or runtime.reduces_with_horovod(model.optimizer):
        return reductions
    return None


class _Dispatcher:
    """Sends the due calls of one train function to a copy that fetches more."""

    def __init__(self, function):
        self._function = function
        self._original = type(function)
        self._copies = []
        self._replacement = type(
            self._original.__name__, (self._original,), {"__call__": _dispatch}
        )
        self.engines = []

    @classmethod
    def of(cls, function):
        """Returns the dispatcher in place on ``function``, or a new one."""
        current = vars(function).get(_CACHE)
        if current is None:
            current = cls(function)
            current._install()
        return current

    def _install(self):
        vars(self._function)[_CACHE] = self
        self._function.__class__ = self._replacement

    def call(self, inputs):
        """Runs one training step."""
        due = []
        engines = [engine for engine in self.engines if engine.active]
        for engine in engines:
            with errors.contain(engine.fail):
                if engine.before_call() and engine.outputs.tensor is not None:
                    due.append(engine)
        try:
            if due:
                results = self._copy_for(due)(inputs)
            else:
                results = self._original.__call__(self._function, inputs)
        except runtime.end_of_data_errors():
            raise
        except BaseException:
            self.close()
            raise
        own = len(self._function.outputs)
        fetched = iter(results[own:] if due else ())
        for engine in engines:
            packed = next(fetched) if engine in due else None
            if engine.active:
                with errors.contain(engine.fail):
                    engine.after_call(packed)
        return results[:own] if due else results

    def _copy_for(self, due):
        """Returns a copy of the function that fetches the sketches of some engines.

        A copy for each set of engines, kept with their outputs: a function that changes
        its fetches from step to step builds its session callable anew each time.
        """
        outputs = [engine.outputs for engine in due]
        for function, wanted, made in outputs[0].copies:
            if function is self._function and wanted == outputs:
                return made
        made = copy.copy(self._function)
        made.__class__ = self._original
        vars(made).pop(_CACHE)
        made.outputs = list(made.outputs)
        made.outputs += [wanted.tensor for wanted in outputs]
        if hasattr(made, "_outputs_structure"):
            made._outputs_structure = list(made.outputs)
        if hasattr(made, "_callable_fn"):
            made._callable_fn = None
        outputs[0].copies.append((self._function, outputs, made))
        return made

    def leave(self, engine):
        """Takes one engine out; the last one puts the function back."""
        if engine in self.engines:
            self.engines.remove(engine)
        if not self.engines:
            self.close()

    def close(self):
        """Puts the function back as it was. Doing it twice is harmless.

        If somebody else has changed its class meanwhile, theirs stays and goes through
        this dispatcher, which has no engines any more.
        """
        self.engines = []
        if type(self._function) is self._replacement:
            self._function.__class__ = self._original
            vars(self._function).pop(_CACHE, None)


def _dispatch(function, inputs):
    """The ``__call__`` of a function object that has a dispatcher."""
    return vars(function)[_CACHE].call(inputs)
