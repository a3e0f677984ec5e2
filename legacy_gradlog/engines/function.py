"""The function engine: TensorFlow 2 and Keras 3, training in a compiled function.

The step is traced once with a hook on the optimizer, which hands its gradients to a
gate inside the graph. The step is never traced in two forms, since two traces hold two
sets of random states and would change the training. A dispatcher stands in for
``model.train_function`` during `fit`; the hook is on the optimizer only while the
dispatcher runs. A trace is kept for the next `fit`, as long as the model keeps the train
function that it stands in for: `compile` drops that.
"""

import functools
import operator
import threading
import weakref

from .. import errors, runtime, sketch
from ..errors import UnsupportedError
from ..patching import Patch
from .base import Capture, Engine
from .sketch_ops import sketch_rows

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
        self._dispatcher.leave(self)
        self._gate = None
        self._pool = []

    def enter(self, gate):
        """Takes the gate that this fit's train function was traced with."""
        self._gate = gate
        if self.next_update < runtime.update_count(self.model):
            self.next_update = runtime.update_count(self.model)
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
            updates = self.steps * max(self._instrument.updates.values(), default=1)
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
            raw = runtime.is_compiled_by_xla(model)
            gates = [
                Gate(engine.request, engine.select, self.steps, raw)
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
        strategy = getattr(self._model, "_distribution_strategy", None)
        if strategy and strategy.num_replicas_in_sync > len(
            strategy.extended.worker_devices
        ):
            raise UnsupportedError(
                "On TensorFlow 2.0 and 2.1 the model must train in one process. "
                "Received: {!r}, whose gradients other workers have a part in. Train "
                "with `MirroredStrategy`, or on TensorFlow 2.2 or later.".format(
                    type(strategy).__name__
                )
            )
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
        @_unconverted(original)
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


class OptimizerHook:
    """Sees the gradients of every update of one optimizer while it is entered.

    Args:
        optimizer: The optimizer; its class tells which of its methods are wrapped.
        on_update: Called inside the step with the gradients before clipping and those
            after it, two lists of ``(gradient, variable)``. Both are reduced over
            replicas and accumulated, as the optimizer does it before it clips.
        symbolic: The step is made from the optimizer's symbolic updates.
    """

    def __init__(self, optimizer, on_update, symbolic=False):
        self._on_update = on_update
        self._optimizer = optimizer
        # Two replicas of a mirrored step are traced in two threads.
        self._clipping = threading.local()
        wraps = {
            "symbolic": {"get_updates": self._wrap_get_updates},
            "v2 of 2.0": {"_distributed_apply": self._wrap_distributed_apply},
            "v2 of 2.2": {
                "_clip_gradients": self._wrap_clip,
                "_aggregate_gradients": self._wrap_aggregate,
                "apply_gradients": self._wrap_apply_gradients,
            },
            "v2": {
                "_transform_gradients": self._wrap_transform,
                "apply_gradients": self._wrap_apply_gradients,
            },
            "experimental": {
                "_clip_gradients": self._wrap_clip,
                "_internal_apply_gradients": self._wrap_apply,
            },
            "keras3": {
                "_clip_gradients": self._wrap_clip,
                "_backend_update_step": self._wrap_update,
            },
        }[runtime.optimizer_generation(optimizer, symbolic)]
        self._patches = [Patch(optimizer, name, wrap) for name, wrap in wraps.items()]

    def __enter__(self):
        for patch in self._patches:
            patch.apply()

    def __exit__(self, *exc_info):
        for patch in reversed(self._patches):
            patch.undo()

    def _wrap_get_updates(self, original):
        def get_updates(loss, params):
            tf = runtime.tensorflow()
            with loss.graph.as_default():
                before = after = tf.gradients(loss, params)
                if runtime.clips(self._optimizer):
                    after = self._optimizer.get_gradients(loss, params)

                # A function keeps its reads and writes in order; this graph does not.
                @tf.function(autograph=False)
                def capture(before, after):
                    self._on_update(list(zip(before, params)), list(zip(after, params)))
                    return tf.constant(0)

                # Standalone Keras would make new ones on new slots, all zero.
                updates = getattr(self._optimizer, "updates", None)
                updates = updates or original(loss=loss, params=params)
                return list(updates) + [capture(before, after)]

        return get_updates

    def _wrap_distributed_apply(self, original):
        # TF 2.0 and 2.1 reduce in here, and `fit` does not clip.
        @_unconverted(original)
        def _distributed_apply(distribution, grads_and_vars, **kwargs):
            pairs = list(grads_and_vars)
            updates = [(_summed(distribution, g), variable) for g, variable in pairs]
            self._on_update(updates, updates)
            return original(distribution, pairs, **kwargs)

        return _distributed_apply

    def _wrap_apply_gradients(self, original):
        # Gradients that are reduced already pass none of the other methods.
        @_unconverted(original)
        def apply_gradients(
            grads_and_vars, name=None, experimental_aggregate_gradients=True
        ):
            pairs = list(grads_and_vars)
            clipping = self._clipping
            if not experimental_aggregate_gradients:
                before, after = pairs, [gradient for gradient, _ in pairs]
                clipped = getattr(clipping, "after", [])
                if len(clipped) == len(after) and all(map(operator.is_, clipped, after)):
                    before = zip(clipping.before, [variable for _, variable in pairs])
                self._on_update(list(before), pairs)
            clipping.applying = experimental_aggregate_gradients
            try:
                return original(pairs, name, experimental_aggregate_gradients)
            finally:
                clipping.applying = False

        return apply_gradients

    def _wrap_aggregate(self, original):
        # TF 2.2 and 2.3: a custom `train_step` reaches this from `apply_gradients`, and
        # is not clipped. `fit` itself calls it before clipping.
        @_unconverted(original)
        def _aggregate_gradients(grads_and_vars):
            pairs = list(grads_and_vars)
            reduced = original(pairs)
            if getattr(self._clipping, "applying", False):
                updates = list(zip(reduced, [variable for _, variable in pairs]))
                self._on_update(updates, updates)
            return reduced

        return _aggregate_gradients

    def _wrap_transform(self, original):
        @_unconverted(original)
        def _transform_gradients(grads_and_vars):
            before = list(grads_and_vars)
            after = list(original(before))
            self._on_update(before, after)
            return after

        return _transform_gradients

    def _wrap_clip(self, original):
        @_unconverted(original)
        def _clip_gradients(grads):
            clipped = original(grads)
            self._clipping.before, self._clipping.after = list(grads), list(clipped)
            return clipped

        return _clip_gradients

    def _wrap_apply(self, original):
        @_unconverted(original)
        def _internal_apply_gradients(grads_and_vars):
            grads_and_vars = list(grads_and_vars)
            self._updated([variable for _, variable in grads_and_vars])
            return original(grads_and_vars)

        return _internal_apply_gradients

    def _wrap_update(self, original):
        @_unconverted(original)
        def _backend_update_step(grads, trainable_variables, learning_rate):
            self._updated(trainable_variables)
            return original(grads, trainable_variables, learning_rate)

        return _backend_update_step

    def _updated(self, variables):
        self._on_update(
            list(zip(self._clipping.before, variables)),
            list(zip(self._clipping.after, variables)),
        )


def _summed(distribution, gradient):
    """Returns the sum of the replicas' parts of one gradient."""
    tf = runtime.tensorflow()
    parts = distribution.experimental_local_results(gradient)
    if len(parts) == 1:
        return parts[0]
    if not isinstance(parts[0], tf.IndexedSlices):
        return tf.add_n(parts)
    return tf.IndexedSlices(
        tf.concat([part.values for part in parts], axis=0),
        tf.concat([part.indices for part in parts], axis=0),
        parts[0].dense_shape,
    )


def _unconverted(original):
    """Decorates a wrapper of ``original`` that AutoGraph must leave alone."""

    def decorate(wrapper):
        wrapper = functools.wraps(original)(wrapper)
        return runtime.tensorflow().autograph.experimental.do_not_convert(wrapper)

    return decorate


class Gate:
    """The part of one request that lives in the step: a gate and what it lets through.

    Several due updates of one call (``steps_per_execution``) go into the rows of a
    ring.

    Args:
        request: What is wanted.
        select: Returns the selected weights once the model has variables.
        steps: Batches in one call of the train function.
        raw: The step is compiled by XLA.
    """

    def __init__(self, request, select, steps, raw):
        cadence = request.cadence
        self._every = cadence.every
        self._select = select
        self._start = 0
        self._wanted = False
        #: Pooled outside the step, one ring row an update.
        self.pooled_outside = cadence.pool and raw
        self._pooled_inside = cadence.pool and not raw
        self.rows = 1
        if self.pooled_outside:
            self.rows = steps
        elif self._every is not None:
            self.rows = -(-steps // self._every)
        self._store = RawStore() if raw else SketchStore(self._pooled_inside)
        self.made = False

    def _make(self):
        """Creates the variables, outside the step being traced."""
        tf = runtime.tensorflow()
        self.weights = [w for w in self._select() if runtime.is_floating(w.variable)]
        self._positions = {}
        for position, weight in enumerate(self.weights):
            self._positions[id(weight.variable)] = position
            self._positions[id(runtime.raw_variable(weight.variable))] = position
        with tf.init_scope():
            self._state = _variable(tf.constant([self._start, 0], tf.int64))
            self._is_open = _variable(tf.constant(self._wanted))
            self._stamps = _variable(self._no_stamps())
            self._store.make(self.rows, self.weights)
        self.made = True

    def _no_stamps(self):
        tf = runtime.tensorflow()
        return tf.fill([self.rows, len(self.weights)], tf.constant(-1, tf.int64))

    # Called by the host, between steps.

    def reset(self, update):
        """Starts a fit whose first update has the number ``update``."""
        self._start = update
        if self.made:
            self._state.assign([update, 0])
            self.empty()

    def empty(self):
        """Forgets what was captured."""
        self._stamps.assign(self._no_stamps())
        self._store.empty()

    def open(self, wanted):
        """Opens or shuts the gate of an epoch-level request."""
        if wanted != self._wanted:
            self._wanted = wanted
            if self.made:
                self._is_open.assign(wanted)

    def progress(self):
        """Returns the number of the next update and of ring rows filled since."""
        update, filled = self._state.numpy().tolist()
        if filled:
            self._state.assign([update, 0])
        return update, filled

    def read(self, rows):
        """Returns the `Capture` of each of the first ``rows`` ring rows."""
        stamps = self._stamps.numpy()
        return [self._capture(stamps[row], row) for row in range(rows)]

    def _capture(self, stamps, row):
        counts, moments = self._store.read(row)
        update = int(stamps.max()) if len(stamps) else -1
        present = stamps == update
        if self._pooled_inside or update < 0:
            present = stamps >= 0
        return Capture(
            update=update,
            weights=[w for w, has in zip(self.weights, present) if has],
            counts=counts[present],
            moments=moments[present],
            missing=[w for w, has in zip(self.weights, present) if not has],
        )

    # Called while the step is traced, or inside it where it runs eagerly.

    def pass_through(self, pairs):
        """Captures one update's gradients if it is due, and counts the update.

        Args:
            pairs: List of ``(gradient, variable)``.
        """
        tf = runtime.tensorflow()
        if not self.made:
            self._make()
        positions, gradients = [], []
        for gradient, variable in pairs:
            position = self._positions.get(id(variable))
            if gradient is not None and position is not None:
                positions.append(position)
                gradients.append(gradient)
        update, filled = tf.unstack(self._state)
        if self._every is None:
            due = tf.convert_to_tensor(self._is_open)
        else:
            due = tf.equal(update % self._every, 0)
        row = filled % self.rows

        def store():
            self._store.store(row, positions, gradients)
            stamps = tf.fill([len(positions)], update)
            _put(self._stamps, row, positions, stamps)
            return update

        if gradients:
            with tf.init_scope():
                self._store.make_room(positions, gradients)
            # TF 2.0: a branch of `tf.cond` must return a tensor.
            tf.cond(due, store, lambda: update)
        counted = self._every is not None or self.pooled_outside
        # A call that finds no data left runs what does not depend on the data.
        with tf.control_dependencies([g for g, _ in pairs if g is not None]):
            self._state.assign_add([1, tf.cast(due, tf.int64) if counted else 0])


class SketchStore:
    """Sketches of the gradients of some updates, computed inside the step."""

    def __init__(self, pool):
        self._pool = pool

    def make(self, rows, weights):
        tf = runtime.tensorflow()
        shape = [rows, len(weights)]
        nothing = [float("inf"), float("-inf"), 0.0, 0.0, 0.0]
        self._no_counts = tf.zeros(shape + [sketch.SIZE], tf.int64)
        self._no_moments = tf.tile(
            tf.constant([[nothing]], tf.float64), shape + [1]
        )
        self._counts = _variable(self._no_counts)
        self._moments = _variable(self._no_moments)

    def make_room(self, positions, gradients):
        """Everything has its place already."""

    def empty(self):
        if self._pool:
            self._counts.assign(self._no_counts)
            self._moments.assign(self._no_moments)

    def store(self, row, positions, gradients):
        tf = runtime.tensorflow()
        counts, moments = sketch_rows(gradients)
        if self._pool:
            counts += tf.gather(self._counts[0], positions)
            before = tf.gather(self._moments[0], positions)
            moments = tf.concat(
                [
                    tf.minimum(before[:, :1], moments[:, :1]),
                    tf.maximum(before[:, 1:2], moments[:, 1:2]),
                    before[:, 2:] + moments[:, 2:],
                ],
                axis=1,
            )
        _put(self._counts, row, positions, counts)
        _put(self._moments, row, positions, moments)

    def read(self, row):
        return self._counts[row].numpy(), self._moments[row].numpy()


class RawStore:
    """The gradients of some updates themselves, sketched when they are read.

    XLA fuses a step differently when the sketch is computed inside it, which rounds
    the training differently; assigning the gradient does not.
    """

    def make(self, rows, weights):
        self._rows = rows
        self._weights = weights
        self._gradients = [None] * len(weights)
        self._touched = [None] * len(weights)
        self._sketch = None

    def make_room(self, positions, gradients):
        """Creates the variables of the weights that have not had a gradient yet."""
        tf = runtime.tensorflow()
        for position, gradient in zip(positions, gradients):
            if self._gradients[position] is None:
                shape = [self._rows] + list(self._weights[position].variable.shape)
                self._gradients[position] = _variable(tf.zeros(shape, gradient.dtype))
                if isinstance(gradient, tf.IndexedSlices):
                    self._touched[position] = _variable(tf.zeros(shape[:2], tf.int32))
                self._sketch = None

    def empty(self):
        """What is not stamped is not read."""

    def store(self, row, positions, gradients):
        tf = runtime.tensorflow()
        for position, gradient in zip(positions, gradients):
            touched = self._touched[position]
            if touched is not None:
                rows = tf.ones_like(gradient.indices, tf.int32)
                rows = tf.scatter_nd(
                    gradient.indices[:, None],
                    rows,
                    tf.constant(touched.shape[1:], gradient.indices.dtype),
                )
                _put_row(touched, row, rows)
            # Sums the duplicate rows of `IndexedSlices`.
            _put_row(self._gradients[position], row, tf.convert_to_tensor(gradient))

    def read(self, row):
        tf = runtime.tensorflow()
        if self._sketch is None:
            self._sketch = tf.function(self._sketch_outside, autograph=False)
        counts, moments = self._sketch(tf.constant(row))
        return counts.numpy(), moments.numpy()

    def _sketch_outside(self, row):
        tf = runtime.tensorflow()
        values = []
        for gradient, touched in zip(self._gradients, self._touched):
            if gradient is None:
                values.append(tf.zeros([0], tf.float32))
            elif touched is None:
                values.append(gradient[row])
            else:
                values.append(tf.boolean_mask(gradient[row], touched[row] > 0))
        return sketch_rows(values)


def _put(variable, row, positions, values):
    """Writes ``values`` at ``positions`` of one ring row of ``variable``."""
    tf = runtime.tensorflow()
    rows, width = variable.shape[:2]
    if positions == list(range(width)):
        _put_row(variable, row, values)
        return
    columns = tf.constant(positions, tf.int64)
    indices = tf.stack([tf.fill([len(positions)], row), columns], axis=1)
    variable.assign(tf.tensor_scatter_nd_update(variable, indices, values))


def _put_row(variable, row, values):
    """Writes ``values`` as one ring row of ``variable``."""
    tf = runtime.tensorflow()
    if variable.shape[0] == 1:
        variable.assign(values[None])
    else:
        variable.assign(tf.tensor_scatter_nd_update(variable, [[row]], values[None]))


def _variable(value):
    return runtime.tensorflow().Variable(value, trainable=False)
