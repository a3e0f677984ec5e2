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
from .base import Capture, Engine
from .sketch_ops import sketch_rows

__all__ = ["GraphEngine"]

_CACHE = "_legacy_gradlog"


class GraphEngine(Engine):
    """Counts the calls of the train function and fetches sketches on the due ones."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._dispatcher = None
        self._captures = []
        self._counting = False

    def _attach(self):
        names = runtime.stateful_loops(self.model)
        if names:
            raise UnsupportedError(
                "A stateful recurrent layer must be unrolled for its gradients to be "
                "logged on this TensorFlow, where a step may read the state that it "
                "has just written. Received: {}. Build it with `unroll=True`, or take "
                "TensorFlow 1.10 or later.".format(", ".join(names))
            )
        self.outputs = _Outputs.of(self.model, self.request, self.select)
        self._dispatcher = _Dispatcher.of(runtime.session_train_function(self.model))
        self._dispatcher.engines.append(self)

    def _detach(self):
        if self._dispatcher is not None:
            self._dispatcher.leave(self)

    def begin_epoch(self, logged):
        super().begin_epoch(logged)
        self._captures = []

    def before_call(self):
        """Returns whether the update of this call is due."""
        if not self._counting:
            self._counting = True
            self.next_update = max(self.next_update, runtime.update_count(self.model))
        cadence = self.request.cadence
        if cadence.every is not None:
            return self.next_update % cadence.every == 0
        return self.epoch_logged and (cadence.pool or self.length.ends_with(1))

    def after_call(self, fetched):
        """Takes what was fetched, ``(counts, moments)``, or None; counts the update."""
        update = self.next_update
        self.next_update += 1
        self.length.advance(1)
        if fetched is None:
            return
        outputs = self.outputs
        capture = Capture(update, outputs.weights, *fetched, missing=outputs.missing)
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
            return captures[0]
        return None


class _Outputs:
    """The sketches of one request as tensors of the training graph.

    Attributes:
        weights: The weights that have a gradient.
        missing: Those that have none.
        tensors: counts ``(n, SIZE)`` and moments ``(n, 5)``.
    """

    def __init__(self, model, request, select):
        weights = [w for w in select() if runtime.is_floating(w.variable)]
        gradients = self._gradients(model, request, weights)
        found = [(w, g) for w, g in zip(weights, gradients) if g is not None]
        #: Copies of train functions that fetch these: ``(function, outputs, copy)``.
        self.copies = []
        self.weights = [weight for weight, _ in found]
        self.missing = [w for w, g in zip(weights, gradients) if g is None]
        self.tensors = []
        if found:
            self.tensors = list(sketch_rows([gradient for _, gradient in found]))

    @classmethod
    def of(cls, model, request, select):
        """Returns the outputs for a model, built in an earlier fit or now."""
        model = runtime.session_model(model)
        loss = model.total_loss
        # `compile` makes another loss tensor, and what is built here goes with it.
        built = getattr(loss, _CACHE, None)
        if built is None:
            built = {}
            setattr(loss, _CACHE, built)
        key = (request.clipped, request.layers)
        if key not in built:
            with loss.graph.as_default():
                built[key] = cls(model, request, select)
        return built[key]

    @staticmethod
    def _gradients(model, request, weights):
        if not request.clipped:
            if runtime.makes_own_gradients(model.optimizer):
                raise UnsupportedError(
                    "An optimizer must leave `get_gradients` to Keras for its "
                    "gradients to be known before clipping. Received: {!r}. With "
                    "`clipped=True` what its `get_gradients` returns is logged.".format(
                        type(model.optimizer).__name__
                    )
                )
            variables = [weight.variable for weight in weights]
            return runtime.backend_of(model).gradients(model.total_loss, variables)
        # By the norm of all weights together, so all of them go in.
        trained = runtime.trained_weights(model)
        gradients = runtime.clipped_gradients(
            model.optimizer, model.total_loss, trained
        )
        by_id = {id(v): gradient for v, gradient in zip(trained, gradients)}
        return [by_id[id(weight.variable)] for weight in weights]


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
                if engine.before_call() and engine.outputs.tensors:
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
            sketches = (next(fetched), next(fetched)) if engine in due else None
            with errors.contain(engine.fail):
                engine.after_call(sketches)
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
        for wanted in outputs:
            made.outputs += wanted.tensors
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
