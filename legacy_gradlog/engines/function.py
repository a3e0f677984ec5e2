"""The function engine: TensorFlow 2 and Keras 3, training in a compiled function.

The step is traced once with a hook on the optimizer, which hands its gradients to a
gate inside the graph. The step is never traced in two forms, since two traces hold two
sets of random states and would change the training. A dispatcher stands in for
``model.train_function`` during `fit`; the hook is on the optimizer only while the
dispatcher runs. A trace is kept for the next `fit`, as long as the model keeps the
train function that it stands in for: `compile` drops that.
"""

import functools
import weakref

from .. import errors, runtime
from ..errors import UnsupportedError
from ..patching import Patch
from .base import Engine
from .gate import Gate
from .hook import OptimizerHook, unconverted

__all__ = ["FunctionEngine"]

_CACHE = "_legacy_gradlog_instrument"


class FunctionEngine(Engine):
    """Reads the gate's variables after the calls that opened it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._dispatcher = None
        self._gate = None
        self._pool = []
        self._foretold = None

    def _attach(self):
        strategy = runtime.unsupported_strategy(self.model)
        if strategy is not None:
            raise UnsupportedError(
                "The model must train in one process for its gradients to be logged. "
                "Received: {!r}. Train with `MirroredStrategy`, or without a "
                "strategy.".format(type(strategy).__name__)
            )
        symbolic = runtime.training_loop(self.model) == runtime.SYMBOLIC
        if runtime.optimizer_generation(self.model.optimizer, symbolic) is None:
            raise UnsupportedError(
                "Gradients can be logged for Keras optimizers whose step is known. "
                "Received: {!r}. Train without loss scaling, or with an optimizer of "
                "the model's own Keras.".format(type(self.model.optimizer).__name__)
            )
        self._dispatcher = Dispatcher.of(self.model)
        self._dispatcher.engines.append(self)

    def _detach(self):
        if self._dispatcher is not None:
            self._dispatcher.leave(self)
        self._gate = None
        self._pool = []

    def enter(self, gate):
        """Takes the gate that this fit's train function was traced with."""
        self._gate = gate
        self.next_update = max(self.next_update, runtime.update_count(self.model))
        self._foretold = self.next_update
        gate.reset(self.next_update)

    def before_call(self, steps):
        """Opens the gate for a call of up to ``steps`` updates if one is wanted."""
        cadence = self.request.cadence
        if cadence.every is None:
            wanted = self.epoch_logged and (
                cadence.pool or self.length.ends_with(steps)
            )
            self._gate.open(wanted)

    def after_call(self, steps, updates):
        """Delivers what a call of ``steps`` batches captured.

        ``updates`` is the largest number of updates that the call can have made. What
        was foretold is never less than what was counted in the graph, so that the
        variables are read on the calls that may hold a due update and on no other.
        """
        self.length.advance(steps)
        gate = self._gate
        if not gate.made:
            self.fail(
                UnsupportedError(
                    "Gradients are taken where the model's optimizer applies them. The "
                    "training step did not call it. Let `train_step` call "
                    "`self.optimizer.apply_gradients`."
                )
            )
            return
        if gate.pooled_outside and self.epoch_logged:
            _, filled = gate.progress()
            self._pool.extend(gate.read(filled))
        cadence = self.request.cadence
        if cadence.every is None:
            return
        first = self.next_update
        self._foretold += updates
        if cadence.has_due(first, self._foretold):
            self.next_update, filled = gate.progress()
            self._foretold = self.next_update
            if filled > gate.rows:
                self.fail(
                    UnsupportedError(
                        "At step level the optimizer must be called once in a training "
                        "step. It was called {} times. Log the gradients at epoch "
                        "level.".format(filled)
                    )
                )
                return
            for capture in gate.read(filled):
                self.deliver(capture)

    def end_epoch(self):
        gate, pool = self._gate, self.request.cadence.pool
        captures, self._pool = self._pool, []
        as_foretold = self.length.finish(self._dispatcher.steps)
        if gate is None or not gate.made or not self.epoch_logged:
            return None
        self.next_update, _ = gate.progress()
        if not (pool or as_foretold):
            return None
        if not gate.pooled_outside:
            captures = [c for c in gate.read(1) if c.update >= 0]
            gate.empty()
        return self.pooled(captures) if captures else None


class Instrument:
    """A train function traced with gates, kept for the next fit.

    It lives as long as the model: as an attribute of a weight, which is no part of a
    checkpoint or a saved model, and which no copy takes along.

    Attributes:
        key: What the gates were made for.
        plain: Weak reference to the train function that it stands in for.
        function: The train function, as Keras made it.
        tf_function: The `tf.function` within it, where Keras names that.
        gates: One for every engine, in their order.
        updates: By id of a traced graph, how many updates a step makes at most.
    """

    def __init__(self, key, plain, functions, gates):
        self.key = key
        self.plain = weakref.ref(plain)
        self.function, self.tf_function = functions
        self.gates = gates
        self.updates = {}

    @staticmethod
    def kept(model):
        """Returns the instrument of an earlier fit of ``model``, or None."""
        weights = runtime.trained_weights(model)
        return getattr(weights[0], _CACHE, None) if weights else None

    def keep(self, model):
        """Keeps the instrument for the next fit of ``model``."""
        object.__setattr__(runtime.trained_weights(model)[0], _CACHE, self)

    def __deepcopy__(self, memo):
        return None

    def __reduce__(self):
        return type(None), ()


class Dispatcher:
    """Stands in for the train function of one model during one `fit`."""

    #: Whether the step is made from a symbolic graph.
    symbolic = False

    def __init__(self, model):
        self._model = model
        self._patches = []
        self._instrument = None
        self._eager_updates = 0
        self._refusal = None
        self.engines = []
        self.steps = 1

    @classmethod
    def of(cls, model):
        """Returns the dispatcher in place on ``model``, a new one if there is none."""
        cls = {
            runtime.ATTRIBUTE: cls,
            runtime.CLOSURE: ClosureDispatcher,
            runtime.SYMBOLIC: SymbolicDispatcher,
        }[runtime.training_loop(model)]
        current = cls._in_place(model)
        if isinstance(current, cls):
            if current._instrument is None:
                return current
            current.close()
        dispatcher = cls(model)
        dispatcher._install()
        return dispatcher

    @staticmethod
    def _in_place(model):
        """Returns what `fit` of ``model`` would call now."""
        return vars(model).get("train_function")

    def _install(self):
        if self._model.train_function is None:
            self._model.make_train_function()
        self._plain = self._model.train_function
        self._patches.append(Patch(self._model, "train_function", lambda plain: self))
        self._patches[0].apply()

    def __getattr__(self, name):
        # The stock callback looks for the traced graph on the train function.
        if name.startswith("__"):
            raise AttributeError(name)
        instrument = self.__dict__.get("_instrument")
        return getattr(instrument.function if instrument else self._plain, name)

    def __call__(self, iterator):
        return self._step(iterator)

    def _step(self, *args, function=None):
        """Makes one call of the train function, or of ``function`` in its place."""
        if not self.engines:
            return (function or self._plain)(*args)
        if self._instrument is None:
            self._instrument = self._prepare()
            for engine, gate in zip(self.engines, self._instrument.gates):
                engine.enter(gate)
        active = [engine for engine in self.engines if engine.active]
        for engine in active:
            with errors.contain(engine.fail):
                engine.before_call(self.steps)
        self._eager_updates = 0
        try:
            with self._hook:
                result = (function or self._instrument.function)(*args)
        except runtime.end_of_data_errors():
            # A call that ran out of data may have made some of its updates.
            self._after_call(0)
            raise
        except BaseException:
            refusal = self._refusal
            self._instrument = None
            self.close()
            if refusal is not None:
                raise refusal from None
            raise
        self._after_call(self.steps)
        return result

    def _after_call(self, steps):
        updates = self._eager_updates
        if not updates:
            traced = max(self._instrument.updates.values(), default=1)
            # Every replica traces its own.
            updates = self.steps * -(-traced // runtime.replicas_of(self._model))
        for engine in self.engines:
            if engine.active:
                with errors.contain(engine.fail):
                    engine.after_call(steps, updates)

    def leave(self, engine):
        """Takes one engine out; the last one closes the dispatcher."""
        if engine in self.engines:
            self.engines.remove(engine)
        if not self.engines:
            self.close()

    def close(self):
        """Puts the user's train function back. Doing it twice is harmless."""
        self.engines = []
        for patch in reversed(self._patches):
            patch.undo()
        if self._instrument is not None and all(g.made for g in self._instrument.gates):
            self._instrument.keep(self._model)

    def _prepare(self):
        """Returns the instrument for the engines that are in, traced before or new."""
        model = self._model
        self.steps = runtime.steps_per_execution(model)
        key = (
            id(model.optimizer),
            self.steps,
            tuple(engine.request for engine in self.engines),
        )
        instrument = Instrument.kept(model)
        if (
            instrument is None
            or instrument.key != key
            or instrument.plain() is not self._plain
        ):
            parts = runtime.leaves_reduction_to_the_update(model)
            raw = parts or runtime.is_compiled_by_xla(model)
            gates = [
                Gate(engine.request, engine.select, self.steps, raw, parts)
                for engine in self.engines
            ]
            functions = self._make_functions()
            instrument = Instrument(key, self._plain, functions, gates)
        if "train_tf_function" in vars(model):
            # Where the stock callback looks for the graph since TF 2.5.
            patch = Patch(
                model, "train_tf_function", lambda plain: instrument.tf_function
            )
            patch.apply()
            self._patches.append(patch)
        self._hook = OptimizerHook(model.optimizer, self._on_update, self.symbolic)
        return instrument

    def _make_functions(self):
        """Returns a train function that has not been traced yet, and its core."""
        model = self._model
        core = vars(model).get("train_tf_function")
        try:
            # `make_train_function` returns the present one unless there is none.
            object.__setattr__(model, "train_function", None)
            model.make_train_function()
            return model.train_function, vars(model).get("train_tf_function")
        finally:
            object.__setattr__(model, "train_function", self)
            if core is not None:
                object.__setattr__(model, "train_tf_function", core)

    def _on_update(self, before, after):
        """Called inside the step with the gradients before and after clipping."""
        tf = runtime.tensorflow()
        if tf.executing_eagerly():
            self._eager_updates += 1
        else:
            graph = _traced_function(tf.compat.v1.get_default_graph())
            updates = self._instrument.updates
            updates[id(graph)] = updates.get(id(graph), 0) + 1
        for engine, gate in zip(self.engines, self._instrument.gates):
            if engine.active:
                try:
                    with errors.contain(engine.fail):
                        gate.pass_through(after if engine.request.clipped else before)
                except errors.GradlogError as refusal:
                    # Tracing wraps what passes through it; raised anew behind it.
                    self._refusal = refusal
                    raise


class ClosureDispatcher(Dispatcher):
    """Stands in for what the loop of TF 2.0 and 2.1 holds in a closure.

    `fit_generator` there has no train function: it runs each step eagerly, so that the
    optimizer's own call is the step.
    """

    _running = False

    @staticmethod
    def _in_place(model):
        return runtime.closure_cell(model).cell_contents

    def _install(self):
        cell = runtime.closure_cell(self._model)
        self._plain = cell.cell_contents
        self._patches = [
            Patch(cell, "cell_contents", lambda original: self),
            Patch(self._model.optimizer, "apply_gradients", self._wrap_apply_gradients),
        ]
        for patch in self._patches:
            patch.apply()

    def _make_functions(self):
        return runtime.untraced(self._plain), None

    def _step(self, *args, **kwargs):
        self._running = True
        try:
            return super()._step(*args, **kwargs)
        finally:
            self._running = False

    def _wrap_apply_gradients(self, original):
        @unconverted(original)
        def apply_gradients(grads_and_vars, name=None):
            if self._running or not runtime.tensorflow().executing_eagerly():
                return original(grads_and_vars, name)
            return self._step(grads_and_vars, name, function=original)

        return apply_gradients


class SymbolicDispatcher(Dispatcher):
    """Stands in for a function object that was made from a symbolic graph.

    `fit` has bound the object already, so its class is changed. The instrument's
    function is made like it from the same graph, with the gates among its updates.
    """

    symbolic = True

    @staticmethod
    def _in_place(model):
        function = runtime.session_train_function(model)
        return getattr(type(function), "dispatcher", None)

    def _install(self):
        function = runtime.session_train_function(self._model)
        original = type(function)
        replacement = type(
            original.__name__,
            (original,),
            {"__call__": lambda _, inputs: self(inputs), "dispatcher": self},
        )
        self._plain = function
        self._call_plain = functools.partial(original.__call__, function)
        self._patches = [Patch(function, "__class__", lambda _: replacement)]
        self._patches[0].apply()

    def __call__(self, inputs):
        if not self.engines:
            return self._call_plain(inputs)
        return self._step(inputs)

    def _make_functions(self):
        made = []

        def function(inputs):
            if not made:
                made.append(runtime.remade_train_function(self._model))
            return made[0](inputs)

        return function, None


def _traced_function(graph):
    """Returns the function's graph that a branch or loop body belongs to."""
    while graph.name.startswith(("cond", "while")) and hasattr(graph, "outer_graph"):
        graph = graph.outer_graph
    return graph
