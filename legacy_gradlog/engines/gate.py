"""What one request adds to a compiled step: a gate, and variables behind it.

The host opens the gate and reads the variables; the step decides for itself whether an
update is due. Knows neither Keras nor optimizers.
"""

from .. import runtime, sketch
from .base import Capture
from .sketch_ops import sketch_rows

__all__ = ["Gate"]


class Gate:
    """The part of one request that lives in the step: a gate and what it lets through.

    Several due updates of one call (``steps_per_execution``) go into the rows of a
    ring.

    Args:
        request: What is wanted.
        select: Returns the selected weights once the model has variables.
        steps: Batches in one call of the train function.
        raw: The gradients themselves are kept, and sketched when they are read.
        parts: Each replica has a part of the gradient only, and their sum is meant.
    """

    def __init__(self, request, select, steps, raw, parts):
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
        self._store = RawStore(parts) if raw else SketchStore(self._pooled_inside)
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
        update, filled = _read(self._state).tolist()
        if filled:
            self._state.assign([update, 0])
        return update, filled

    def read(self, rows):
        """Returns the `Capture` of each of the first ``rows`` ring rows."""
        stamps = _read(self._stamps)
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
        self._no_moments = tf.tile(tf.constant([[nothing]], tf.float64), shape + [1])
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
        return _read(self._counts)[row], _read(self._moments)[row]


class RawStore:
    """The gradients of some updates themselves, sketched when they are read.

    XLA fuses a step differently when the sketch is computed inside it, which rounds
    the training differently; assigning the gradient does not.
    """

    def __init__(self, parts):
        self._parts = parts

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
                zeros = tf.zeros(shape, gradient.dtype)
                self._gradients[position] = _variable(zeros, self._parts)
                if isinstance(gradient, tf.IndexedSlices):
                    zeros = tf.zeros(shape[:2], tf.int32)
                    self._touched[position] = _variable(zeros, self._parts)
                self._sketch = None

    def empty(self):
        """What is not stamped is not read."""

    def store(self, row, positions, gradients):
        tf = runtime.tensorflow()
        for position, gradient in zip(positions, gradients):
            touched = self._touched[position]
            if touched is not None:
                indices = tf.cast(gradient.indices, tf.int64)
                size = tf.constant([touched.shape[1]], tf.int64)
                ones = tf.ones_like(indices, tf.int32)
                _put_row(touched, row, tf.scatter_nd(indices[:, None], ones, size))
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
                continue
            value = gradient.read_value()[row]
            if touched is not None:
                value = tf.boolean_mask(value, touched.read_value()[row] > 0)
            values.append(value)
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


def _read(variable):
    """Returns the value of a variable, of all replicas together, as a NumPy array."""
    return variable.read_value().numpy()


def _variable(value, parts=False):
    """Returns a variable that every replica may assign within a branch.

    Read by the host, it is the first replica's, or with ``parts`` the sum of all.
    """
    tf = runtime.tensorflow()
    aggregation = tf.VariableAggregation
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=aggregation.SUM if parts else aggregation.ONLY_FIRST_REPLICA,
    )
