"""The sketches of gradients as TensorFlow operations.

Runs inside the training step, on every TensorFlow from 1.4 on and in both modes. The
layout is `sketch`'s; this module only computes it.

A gradient that is shorter than a sketch leaves the step as it is, and the host sketches
it: an operation costs more than so few values. Where it must be sketched in the step,
several are together. Large ones go through in chunks, so that what is made of them
stays in the processor's cache. A chunk is counted by its top bits as they are; where
that is not exact, because some value is not finite or below the normal numbers, all is
done again with care.
"""

import numpy as np

from .. import runtime, sketch

__all__ = ["Packing", "sketch_rows"]

#: Largest number of values of a gradient that is sketched together with others.
SMALL = 2048

#: Number of values in a chunk.
CHUNK = 2**17

#: In how many rows a vector is summed, where its length allows. TensorFlow sums a whole
#: one on several threads, which takes several times as long as those of its rows.
ROWS = 4


class Packing:
    """How the sketches of some gradients lie in one float64 vector.

    First come the bits of every gradient that has at most `sketch.SIZE` values, as
    numbers of 32 bits, then the rest's sketches, each its counts and its moments.

    Args:
        gradients: As for `sketch_rows`. Others that are packed have their shapes and
            types; one whose shape is not known now is sketched.
        sketched: All of them are sketched, so that what is packed can be merged.

    Attributes:
        empty: float64, shape ``(size,)``: what is packed of gradients without values.
    """

    def __init__(self, gradients, sketched=False):
        raw = {}
        self._sketched = []
        for number, gradient in enumerate(gradients):
            size = _static_size(gradient)
            if sketched or size is None or size > sketch.SIZE:
                self._sketched.append(number)
            else:
                raw.setdefault(_type_of(gradient), []).append((number, size))
        #: By type: the numbers of gradients, their sizes, and their part of the vector.
        self._raw, end = [], 0
        for dtype, found in sorted(raw.items()):
            numbers, sizes = zip(*found)
            start, end = end, end + sum(sizes) * np.dtype(dtype).itemsize // 4
            self._raw.append((dtype, numbers, sizes, slice(start, end)))
        self._end = end
        row = [0.0] * sketch.SIZE + list(sketch.NO_MOMENTS)
        self.empty = np.array([0.0] * end + row * len(self._sketched))
        numbers = [number for _, numbers, _, _ in self._raw for number in numbers]
        self._places = _places(numbers + self._sketched)

    def pack(self, gradients):
        """Returns the vector as a tensor."""
        tf = runtime.tensorflow()
        parts = []
        for dtype, numbers, _, _ in self._raw:
            values = tf.concat([_vector(tf, gradients[n]) for n in numbers], axis=0)
            bits = tf.reshape(tf.bitcast(values, tf.int32), [-1])
            parts.append(tf.cast(bits, tf.float64))
        if self._sketched:
            counts, moments = sketch_rows([gradients[n] for n in self._sketched])
            rows = tf.concat([tf.cast(counts, tf.float64), moments], axis=1)
            parts.append(tf.reshape(rows, [-1]))
        return tf.concat(parts, axis=0)

    def merge(self, first, second):
        """Returns the vector of two together, where all gradients are sketched."""
        tf = runtime.tensorflow()
        # The counts, the extremes, and the sums.
        parts = (
            tf.split(
                tf.reshape(vector, [len(self._sketched), -1]),
                [sketch.SIZE, 1, 1, 3],
                axis=1,
            )
            for vector in (first, second)
        )
        merges = tf.add, tf.minimum, tf.maximum, tf.add
        merged = [merge(*pair) for merge, pair in zip(merges, zip(*parts))]
        return tf.reshape(tf.concat(merged, axis=1), [-1])

    def unpack(self, vector):
        """Returns counts ``(n, SIZE)`` and moments ``(n, 5)`` out of a NumPy vector."""
        found = []
        for dtype, _, sizes, place in self._raw:
            values = vector[place].astype(np.int32).view(dtype)
            found.append(sketch.from_rows(values, sizes))
        if self._sketched:
            rows = vector[self._end :].reshape(len(self._sketched), -1)
            counts = rows[:, : sketch.SIZE].astype(np.int64)
            found.append((counts, rows[:, sketch.SIZE :]))
        counts, moments = found[0]
        if len(found) > 1:
            counts, moments = (np.concatenate(parts) for parts in zip(*found))
        if self._places is None:
            return counts, moments
        return counts[self._places], moments[self._places]


def sketch_rows(gradients):
    """Returns the sketches of several gradients: counts ``(n, SIZE)``, moments
    ``(n, 5)``.

    Args:
        gradients: Dense tensors of any shape and float type, or `tf.IndexedSlices`,
            whose duplicate rows are summed and of which only these rows count.
    """
    tf = runtime.tensorflow()
    vectors = [_vector(tf, gradient) for gradient in gradients]
    groups = {}
    for number, vector in enumerate(vectors):
        size = vector.shape.num_elements()
        small = size is not None and size <= SMALL
        groups.setdefault((small, vector.dtype.name), []).append(number)
    order, parts = [], []
    for (small, _), numbers in sorted(groups.items()):
        order += numbers
        sketch_group = _sketch_small if small else _sketch_large
        parts.append(sketch_group(tf, [vectors[number] for number in numbers]))
    counts, moments = (tf.concat(column, axis=0) for column in zip(*parts))
    places = _places(order)
    if places is None:
        return counts, moments
    return tf.gather(counts, places), tf.gather(moments, places)


def _places(order):
    """Returns where each number is in ``order``, or None where all are in place."""
    if order == sorted(order):
        return None
    return np.argsort(order).astype(np.int32)


def _static_size(gradient):
    """Returns the number of values of a gradient, None where it is not known."""
    if isinstance(gradient, runtime.tensorflow().IndexedSlices):
        return None
    return gradient.shape.num_elements()


def _type_of(gradient):
    """Returns the name of the type that a gradient is sketched in."""
    return "float64" if gradient.dtype.name == "float64" else "float32"


def _vector(tf, gradient):
    """Returns the values of a gradient, float32 or float64."""
    if isinstance(gradient, tf.IndexedSlices):
        rows, positions = tf.unique(gradient.indices)
        gradient = runtime.segment_sum(gradient.values, positions, tf.size(rows))
    return tf.reshape(tf.cast(gradient, _type_of(gradient)), [-1])


def _sketch_small(tf, vectors):
    """Returns counts and moments of small vectors of one type."""
    sizes = [vector.shape.num_elements() for vector in vectors]
    rows = np.repeat(np.arange(len(vectors), dtype=np.int32), sizes)
    values = tf.concat(vectors, axis=0)
    numbers, is_finite = _bucket_numbers(tf, values)
    counts = runtime.bincount(numbers + rows * sketch.SIZE, len(sizes) * sketch.SIZE)

    lowest, highest, finite = _finite(tf, values, is_finite)
    extremes = tf.cast(tf.stack([-lowest, highest], axis=1), tf.float64)
    extremes = runtime.segment_max(extremes, rows, len(sizes))
    sums = tf.stack([finite, tf.square(finite), tf.abs(finite)], axis=1)
    sums = runtime.segment_sum(sums, rows, len(sizes))
    moments = tf.concat([-extremes[:, :1], extremes[:, 1:], sums], axis=1)
    return tf.reshape(counts, [len(sizes), sketch.SIZE]), moments


def _sketch_large(tf, vectors):
    """Returns counts and moments of vectors of one type."""
    layout = sketch.LAYOUTS[vectors[0].dtype.name]
    tops, zeros, *parts = _in_chunks(tf, vectors, _sketch_tops, layout.tops)
    counts, moments = _counts_of_tops(tf, tf.stack(tops), layout), _joined(tf, *parts)
    exact = tf.logical_and(
        tf.reduce_all(tf.equal(counts[:, sketch.NONFINITE], 0)),
        # The top bits of zero are those of numbers below the normal ones, too.
        tf.reduce_all(tf.equal(counts[:, sketch.ZERO], tf.concat(zeros, axis=0))),
    )

    def with_care():
        counts, _, *parts = _in_chunks(tf, vectors, _sketch_with_care, sketch.SIZE)
        return [tf.stack(counts), _joined(tf, *parts)]

    return tf.cond(exact, lambda: [counts, moments], runtime.outlined(with_care))


def _counts_of_tops(tf, tops, layout):
    """Returns the counts of buckets ``(n, SIZE)`` out of those of the top bits."""
    tops = tf.reshape(tops, [-1, 2, layout.tops // 2])
    sizes = [1, layout.first, sketch.PER_SIGN - 2]
    infinity = layout.infinity >> layout.shift
    sizes += [infinity - sum(sizes), layout.tops // 2 - infinity]
    zero, lowest, within, highest, nonfinite = tf.split(tops, sizes, axis=2)
    lowest, highest = (
        tf.reduce_sum(counts, axis=2)[..., None] for counts in (lowest, highest)
    )
    negative, positive = tf.unstack(tf.concat([lowest, within, highest], 2), axis=1)
    zero, nonfinite = (
        tf.reduce_sum(counts, axis=[1, 2])[:, None] for counts in (zero, nonfinite)
    )
    return tf.concat([tf.reverse(negative, [1]), zero, positive, nonfinite], axis=1)


def _in_chunks(tf, vectors, sketch_chunk, size):
    """Returns what ``sketch_chunk`` makes of each vector: a list of each part.

    Args:
        sketch_chunk: Returns ``size`` int64 counts, one more, and the `_parts` of
            moments.
    """

    def sketch_vector(vector):
        length = vector.shape.num_elements()
        if length is not None and length <= CHUNK:
            return sketch_chunk(tf, vector)
        end = (tf.size(vector) if length is None else length) // CHUNK * CHUNK

        def add_chunk(start, *parts):
            chunk = tf.slice(vector, [start], [CHUNK])
            return (start + CHUNK,) + _merged(tf, parts, sketch_chunk(tf, chunk))

        none = [tf.zeros([size], tf.int64), tf.zeros([1], tf.int64)]
        none += [tf.constant(x, vector.dtype) for x in sketch.NO_MOMENTS[:2]]
        none += [tf.zeros([1], tf.float64)] * 3
        # One after the other, which bounds the memory.
        _, *parts = tf.while_loop(
            lambda start, *_: start < end,
            add_chunk,
            [tf.constant(0)] + none,
            parallel_iterations=1,
        )
        return _merged(tf, parts, sketch_chunk(tf, vector[end:]))

    return list(zip(*map(sketch_vector, vectors)))


def _merged(tf, first, second):
    """Returns what two chunks make together."""
    merges = tf.add, tf.add, tf.minimum, tf.maximum
    merged = [merge(*pair) for merge, pair in zip(merges, zip(first, second))]
    # Of as many rows as the chunks have.
    for sums in zip(first[4:], second[4:]):
        merged.append(tf.reduce_sum(tf.concat(sums, axis=0))[None])
    return tuple(merged)


def _sketch_tops(tf, values):
    """Returns counts of the top bits, how many values are zero, and `_parts`.

    Right for values that are finite.
    """
    layout = sketch.LAYOUTS[values.dtype.name]
    integer = getattr(tf, layout.integer)
    bits = tf.bitcast(values, integer)
    tops = tf.cast(runtime.shift_right(bits, layout.shift), tf.int32)
    counts = runtime.bincount(tops + layout.tops // 2, layout.tops)
    # Clearing the sign of a float takes a fraction of the time that an integer's does.
    magnitude = tf.bitcast(tf.abs(values), integer)
    others = tf.reduce_sum(tf.minimum(magnitude, tf.constant(1, integer)))
    zeros = tf.cast(tf.size(values) - tf.cast(others, tf.int32), tf.int64)[None]
    parts = _parts(tf, values, values, tf.cast(values, tf.float64))
    return (counts, zeros) + parts


def _sketch_with_care(tf, values):
    """Returns counts, one that says nothing, and `_parts` of values of any kind."""
    numbers, is_finite = _bucket_numbers(tf, values)
    counts = runtime.bincount(numbers, sketch.SIZE)
    parts = _parts(tf, *_finite(tf, values, is_finite))
    return (counts, tf.zeros([1], tf.int64)) + parts


def _bucket_numbers(tf, values):
    """Returns the number of each value's bucket, and whether it is finite."""
    layout = sketch.LAYOUTS[values.dtype.name]
    integer = getattr(tf, layout.integer)
    bits = tf.bitcast(values, integer)
    magnitude = tf.bitwise.bitwise_and(bits, tf.constant(integer.max, integer))
    bucket = runtime.shift_right(magnitude, layout.shift) - layout.first
    bucket = tf.cast(tf.clip_by_value(bucket, 0, sketch.PER_SIGN - 1) + 1, tf.int32)
    number = sketch.ZERO + runtime.where(bits < 0, -bucket, bucket)
    zero, nonfinite = (
        tf.fill(tf.shape(number), place) for place in (sketch.ZERO, sketch.NONFINITE)
    )
    is_finite = magnitude < layout.infinity
    number = runtime.where(tf.equal(magnitude, 0), zero, number)
    return runtime.where(is_finite, number, nonfinite), is_finite


def _finite(tf, values, is_finite):
    """Returns values for the minimum, for the maximum, and float64 for the sums."""
    zeros = tf.zeros_like(values)
    infinities = tf.fill(tf.shape(values), tf.constant(float("inf"), values.dtype))
    return (
        runtime.where(is_finite, values, infinities),
        runtime.where(is_finite, values, -infinities),
        tf.cast(runtime.where(is_finite, values, zeros), tf.float64),
    )


def _parts(tf, lowest, highest, finite):
    """Returns the extremes, and sums of rows: of values, squares, absolute values."""
    size = finite.shape.num_elements()
    rows = ROWS if size and size % ROWS == 0 else 1
    finite = tf.reshape(finite, [rows, 1, size // rows if size else -1])
    # Squares are summed as they are made.
    squares = tf.matmul(finite, finite, transpose_b=True)
    return (
        tf.reduce_min(lowest),
        tf.reduce_max(highest),
        tf.reduce_sum(finite, axis=[1, 2]),
        tf.reshape(squares, [rows]),
        tf.reduce_sum(tf.abs(finite), axis=[1, 2]),
    )


def _joined(tf, lowest, highest, *sums):
    """Returns the moments ``(n, 5)`` of vectors, of each of whose `_parts` is a list.

    An operation for each vector would cost more than all of these.
    """
    extremes = tf.cast(tf.stack([lowest, highest], axis=1), tf.float64)
    flat = [rows for vector in zip(*sums) for rows in vector]
    positions = np.repeat(
        range(len(flat)), [rows.shape.num_elements() for rows in flat]
    )
    sums = runtime.segment_sum(tf.concat(flat, axis=0), positions, len(flat))
    return tf.concat([extremes, tf.reshape(sums, [-1, 3])], axis=1)
