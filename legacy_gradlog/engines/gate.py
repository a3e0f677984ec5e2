"""What one request adds to a compiled step: a gate, and variables behind it.

The host opens the gate and reads the variables; the step decides for itself whether an
update is due. Knows neither Keras nor how an optimizer comes by its gradients.
"""

import numpy as np

from .. import runtime
from ..errors import UnsupportedError
from .base import Capture
from .replicas import ReplicaVariable
from .sketch_ops import Packing

__all__ = ["Gate", "RawStore", "Selection", "SketchStore"]


class Selection:
    """The weights that one request means, and the gate that each passes.

    Args:
        select: Called with the variables of an update, returns the selected weights.
    """

    def __init__(self, select):
        self._select = select
        self._weights = []
        self._found = {}
        self._gates = {}

    def find(self, variables, gate):
        """Returns the weight of each variable, None for one that is not meant.

        Raises:
            UnsupportedError: Another optimizer updates one of them, too.
        """
        if any(id(variable) not in self._found for variable in variables):
            weights = self._select(variables)
            self._weights = [w for w in weights if runtime.is_floating(w.variable)]
            for weight in self._weights:
                for known in (weight.variable, runtime.raw_variable(weight.variable)):
                    self._found[id(known)] = known, weight
            for other in variables:
                # Kept, so that nothing else gets its id.
                self._found.setdefault(id(other), (other, None))
        found = [self._found[id(variable)][1] for variable in variables]
        for weight in found:
            if weight is not None and self._gates.setdefault(weight.path, gate) != gate:
                raise UnsupportedError(
                    "A weight must be updated by one optimizer. Received: {}, updated "
                    "by `{}` and `{}`. Leave it out with `layers`.".format(
                        weight.path, self._gates[weight.path].name, gate.name
                    )
                )
        return found

    def missing(self):
        """Returns the weights that no gradient has reached."""
        return [weight for weight in self._weights if weight.path not in self._gates]


class Gate:
    """The part of one request that lives in the updates of one optimizer.

    Every call of the optimizer within a step has a site of its own, with the weights
    that it updates. Several due updates of one site in one call of the train function
    (``steps_per_execution``) go into the rows of a ring.

    Args:
        name: What the model calls the optimizer.
        request: What is wanted.
        selection: The `Selection` of the request, shared by its gates.
        make_store: Called with the weights of a site, their gradients and the number
            of ring rows, returns its store.
        steps: Batches in one call of the train function.
        pooled_outside: The host pools, so that every update has a row.
        closable: At step level, too, nothing is due while the host has it shut.

    Attributes:
        next_update: Number of the next update, as far as the host has looked.
        made: Whether an update has passed, at least while it was traced.
        pooled_outside: As given.
    """

    def __init__(
        self,
        name,
        request,
        selection,
        make_store,
        steps,
        pooled_outside,
        closable=False,
    ):
        self.name = name
        self.made = False
        self.next_update = 0
        self._every = request.cadence.every
        self._cadence = request.cadence
        self._selection = selection
        self._make_store = make_store
        self._steps = steps
        self.pooled_outside = pooled_outside
        self._closable = closable
        self._foretold = 0
        self._wanted = False
        self._is_behind = False
        self._sites = {}

    # Called by the host, between steps.

    def reset(self, update):
        """Starts a fit whose first update has the number ``update``."""
        self.next_update = self._foretold = update
        self._is_behind = False
        if self.made:
            self._count.assign(update)
            self.empty()

    def empty(self):
        """Forgets what was captured."""
        for site in self._sites.values():
            site.store.empty()

    def open(self, wanted):
        """Opens or shuts the gate of an epoch-level or closable request."""
        if wanted != self._wanted:
            self._wanted = wanted
            if self.made:
                self._is_open.assign(wanted)

    def expects(self, updates):
        """Whether one of the next ``updates`` may be due, at step level."""
        return not self.made or self._cadence.has_due(
            self.next_update, self._foretold + updates
        )

    def skip(self, updates):
        """Counts updates that the step makes without passing the gate."""
        self._foretold += updates
        self.next_update = self._foretold
        self._is_behind = True

    def catch_up(self):
        """Lets the step know of the updates that were skipped."""
        if self._is_behind:
            self._is_behind = False
            self._count.assign(self.next_update)

    def advance(self, updates):
        """Counts up to ``updates`` more.

        What is foretold is never less than what is counted in the graph, so that the
        variables are read after the calls that may hold a due update and no other.
        """
        self._foretold += updates

    def may_hold_due(self):
        """Whether one of the updates since the last look may be due, at step level."""
        return self.made and self.expects(0)

    def take(self, exact=False):
        """Returns the `Capture` of each due update since the last time.

        Args:
            exact: What is foretold is what the step counts, so that nobody looks.
        """
        if not self.made:
            return []
        first, foretold = self.next_update, self._foretold
        self.next_update = foretold
        if not exact:
            self.next_update = self._foretold = int(runtime.value_now(self._count))
        if self._every is not None and self.next_update > foretold:
            raise UnsupportedError(
                "At step level each call of the optimizer must run once in a training "
                "step. It ran {} times where {} were traced. Call it outside of loops "
                "in the step, or log the gradients at epoch level.".format(
                    self.next_update - first, foretold - first
                )
            )
        return self.captures(first)

    def look(self):
        """Returns the number of the next update, as the step has counted it."""
        if self._is_behind or not self.made:
            return self.next_update
        return int(runtime.value_now(self._count))

    def missing(self):
        """Returns the selected weights that no gradient has reached."""
        return self._selection.missing()

    def captures(self, first=0):
        """Returns every `Capture` there is of the update ``first`` or a later one."""
        found = []
        for site in self._sites.values():
            for update, counts, moments in site.store.read(first):
                found.append(Capture(update, site.weights, counts, moments, self.name))
        return found

    # Called while the step is traced, or inside it where it runs eagerly.

    def pass_through(self, call, again, pairs):
        """Captures one update's gradients if it is due, and counts the update.

        Args:
            call: Which call of the optimizer within the train function this is.
            again: Whether the step has called the optimizer before.
            pairs: List of ``(gradient, variable)``.
        """
        tf = runtime.tensorflow()
        pairs = [pair for pair in pairs if pair[0] is not None]
        weights = self._selection.find([variable for _, variable in pairs], self)
        found = [
            (weight, gradient)
            for weight, (gradient, _) in zip(weights, pairs)
            if weight is not None
        ]
        gradients = [gradient for _, gradient in found]
        rows = self._rows(again, tf.executing_eagerly())
        with tf.init_scope():
            if not self.made:
                self._count = _variable(tf.constant(self.next_update, tf.int64))
                self._is_open = _variable(tf.constant(self._wanted))
                self.made = True
            site = self._site(call, found, rows) if found else None
        update = tf.convert_to_tensor(self._count)
        due = tf.convert_to_tensor(self._is_open)
        if self._every is not None:
            on_time = tf.equal(update % self._every, 0)
            due = tf.logical_and(due, on_time) if self._closable else on_time

        def capture():
            site.capture(update, gradients)
            return update

        if site is not None:
            # TF 2.0: a branch of `tf.cond` must return a tensor.
            tf.cond(due, runtime.outlined(capture), lambda: update)
        # A call that finds no data left runs what does not depend on the data.
        # TF 2.2 and 2.3: in a branch it must be a tensor of the branch.
        with tf.control_dependencies([_part(gradient) for gradient, _ in pairs]):
            self._count.assign_add(1)

    def _rows(self, again, eager):
        """Returns how many due updates of one site a call can make at most."""
        if self.pooled_outside:
            return self._steps
        if self._every is None or eager:
            return 1
        if again and self._every > 1 and self._steps > 1:
            raise UnsupportedError(
                "With several calls of one optimizer in a training step, either every "
                "update is logged or one step is made at a time. Received: every {}th "
                'update, `steps_per_execution={}`. Log with "batch", or compile with '
                "`steps_per_execution=1`.".format(self._every, self._steps)
            )
        return -(-self._steps // self._every)

    def _site(self, call, found, rows):
        key = (call,) + tuple(weight.path for weight, _ in found)
        if key not in self._sites:
            weights, gradients = zip(*found)
            store = self._make_store(weights, gradients, rows)
            self._sites[key] = _Site(weights, store, rows)
        return self._sites[key]


class _Site:
    """One call of an optimizer within a step."""

    def __init__(self, weights, store, rows):
        self.weights = list(weights)
        self.store = store
        self._rows = rows
        if rows > 1:
            self._captured = _variable(runtime.tensorflow().constant(0, "int64"))

    def capture(self, update, gradients):
        """Stores the gradients of one due update, inside the step."""
        if self._rows == 1:
            self.store.write(0, update, gradients)
            return
        row = runtime.tensorflow().convert_to_tensor(self._captured) % self._rows
        self.store.write(row, update, gradients)
        self._captured.assign_add(1)


class SketchStore:
    """Sketches of some updates of one site, computed inside the step.

    One variable, written at once: a record is never made of two updates, even where
    several workers write. A row is the number of the update and what is packed of it.

    Args:
        pool: An update is added to what is in its row.
    """

    def __init__(self, weights, gradients, rows, pool=False):
        tf = runtime.tensorflow()
        self._pool = pool
        self._packing = Packing(gradients, sketched=pool)
        nothing = np.append(-1.0, self._packing.empty)
        self._nothing = tf.tile(tf.constant(nothing[None]), [rows, 1])
        self._packed = _variable(self._nothing)

    def empty(self):
        self._packed.assign(self._nothing)

    def write(self, row, update, gradients):
        tf = runtime.tensorflow()
        packed = self._packing.pack(gradients)
        if self._pool:
            packed = self._packing.merge(self._packed[row, 1:], packed)
        number = tf.cast(update, tf.float64)
        _put_row(self._packed, row, tf.concat([[number], packed], axis=0))

    def read(self, first):
        """Returns ``(update, counts, moments)`` of the update ``first`` and later."""
        return [
            (int(row[0]),) + self._packing.unpack(row[1:])
            for row in runtime.value_now(self._packed)
            if row[0] >= first
        ]


class RawStore:
    """The gradients of some updates themselves, sketched when they are read.

    XLA fuses a step differently when the sketch is computed inside it, which rounds
    the training differently; assigning the gradient does not.

    Args:
        parts: Each replica has a part of the gradient only, and their sum is meant.
    """

    def __init__(self, weights, gradients, rows, parts=False):
        tf = runtime.tensorflow()
        self._stamps = _variable(tf.fill([rows], tf.constant(-1, tf.int64)))
        self._gradients, self._touched = [], []
        for weight, gradient in zip(weights, gradients):
            shape = [rows] + list(weight.variable.shape)
            self._gradients.append(_variable(tf.zeros(shape, gradient.dtype), parts))
            touched = None
            if isinstance(gradient, tf.IndexedSlices):
                touched = _variable(tf.zeros(shape[:2], tf.int32), parts)
            self._touched.append(touched)
        self._packing = Packing(gradients)
        self._pack = tf.function(self._pack_row, autograph=False)

    def empty(self):
        tf = runtime.tensorflow()
        self._stamps.assign(tf.fill(self._stamps.shape, tf.constant(-1, tf.int64)))

    def write(self, row, update, gradients):
        tf = runtime.tensorflow()
        for kept, touched, gradient in zip(self._gradients, self._touched, gradients):
            if touched is not None:
                indices = tf.cast(gradient.indices, tf.int64)
                size = tf.constant([touched.shape[1]], tf.int64)
                ones = tf.ones_like(indices, tf.int32)
                _put_row(touched, row, tf.scatter_nd(indices[:, None], ones, size))
            # Sums the duplicate rows of `IndexedSlices`.
            _put_row(kept, row, tf.convert_to_tensor(gradient))
        _put_row(self._stamps, row, update)

    def read(self, first):
        """Returns ``(update, counts, moments)`` of the update ``first`` and later."""
        tf = runtime.tensorflow()
        found = []
        for row, update in enumerate(runtime.value_now(self._stamps).tolist()):
            if update >= first:
                packed = self._pack(tf.constant(row)).numpy()
                found.append((update,) + self._packing.unpack(packed))
        return found

    def _pack_row(self, row):
        tf = runtime.tensorflow()
        values = []
        for gradient, touched in zip(self._gradients, self._touched):
            value = gradient.read_value()
            # A slice for each of many weights takes as long as all else.
            if gradient.shape[0] > 1 or touched is not None:
                value = value[row]
            if touched is not None:
                value = tf.boolean_mask(value, touched.read_value()[row] > 0)
            values.append(value)
        return self._packing.pack(values)


def _part(gradient):
    """Returns a tensor of the present graph that is made with a gradient."""
    tf = runtime.tensorflow()
    sparse = isinstance(gradient, tf.IndexedSlices)
    return tf.identity(gradient.values if sparse else gradient)


def _put_row(target, row, values):
    """Writes ``values`` as one ring row of the variable ``target``."""
    tf = runtime.tensorflow()
    if target.shape[0] == 1:
        target.assign(values[None])
    else:
        target.assign(tf.tensor_scatter_nd_update(target, [[row]], values[None]))


def _variable(value, parts=False):
    """Returns a variable that every replica may assign within a branch.

    Read by the host, it is the first replica's, or with ``parts`` the sum of all.
    """
    if runtime.shares_variables():
        return ReplicaVariable(value, parts)
    tf = runtime.tensorflow()
    aggregation = tf.VariableAggregation
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=aggregation.SUM if parts else aggregation.ONLY_FIRST_REPLICA,
    )
