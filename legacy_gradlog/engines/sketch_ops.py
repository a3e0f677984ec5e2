"""The sketches of gradients as TensorFlow operations.

Runs inside the training step, on every TensorFlow from 1.4 on and in both modes. The
layout is `sketch`'s; this module only computes it.

Small gradients are sketched together, since an operation costs more than their values.
Large ones go through in chunks, so that what is made of them stays in the processor's
cache. A chunk is counted by its top bits as they are; where that is not exact, because
some value is not finite or below the normal numbers, all is done again with care.
"""

import numpy as np

from .. import runtime, sketch

__all__ = ["merge_moments", "sketch_rows"]

#: Largest number of values of a gradient that is sketched together with others.
SMALL = 2048

#: Number of values in a chunk.
CHUNK = 2**17

#: In how many rows a vector is summed, where its length allows. TensorFlow sums a whole
#: one on several threads, which takes several times as long as those of its rows.
ROWS = 4


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
    counts, moments = (
        tf.concat([tf.cast(part[i], dtype) for part in parts], axis=0)
        for i, dtype in enumerate((tf.int64, tf.float64))
    )
    if order == sorted(order):
        return counts, moments
    places = np.argsort(order).astype(np.int32)
    return tf.gather(counts, places), tf.gather(moments, places)


def merge_moments(first, second):
    """Returns the moments ``(..., 5)`` of the values of two sketches together."""
    tf = runtime.tensorflow()
    return tf.concat(
        [
            tf.minimum(first[..., :1], second[..., :1]),
            tf.maximum(first[..., 1:2], second[..., 1:2]),
            first[..., 2:] + second[..., 2:],
        ],
        axis=-1,
    )


def _vector(tf, gradient):
    """Returns the values of a gradient, float32 or float64."""
    if isinstance(gradient, tf.IndexedSlices):
        rows, positions = tf.unique(gradient.indices)
        gradient = runtime.segment_sum(gradient.values, positions, tf.size(rows))
    if gradient.dtype != tf.float64:
        gradient = tf.cast(gradient, tf.float32)
    return tf.reshape(gradient, [-1])


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
    tops, moments, zeros = _in_chunks(tf, vectors, _count_tops, layout.tops)
    counts = runtime.segment_sum(tf.transpose(tops), layout.numbers, sketch.SIZE)
    counts = tf.transpose(counts)
    exact = tf.logical_and(
        tf.reduce_all(tf.equal(counts[:, sketch.NONFINITE], 0)),
        tf.reduce_all(tf.equal(counts[:, sketch.ZERO], zeros)),
    )

    def with_care():
        return _in_chunks(tf, vectors, _count_with_care, sketch.SIZE)[:2]

    return tf.cond(exact, lambda: [counts, moments], runtime.outlined(with_care))


def _in_chunks(tf, vectors, sketch_chunk, size):
    """Returns what ``sketch_chunk`` makes of each vector, in rows.

    Args:
        sketch_chunk: Returns ``size`` int32 counts, the moments, and one more count.
    """
    none = np.zeros(size, np.int32), np.array(sketch.NO_MOMENTS), np.int32(0)

    def sketch_vector(vector):
        length = vector.shape.num_elements()
        if length is not None and length <= CHUNK:
            return sketch_chunk(tf, vector)

        def add_chunk(start, counts, moments, others):
            more = sketch_chunk(tf, vector[start : start + CHUNK])
            return (
                start + CHUNK,
                counts + more[0],
                merge_moments(moments, more[1]),
                others + more[2],
            )

        end = tf.size(vector)
        start = (tf.constant(0),) + tuple(tf.constant(value) for value in none)
        # One after the other, which bounds the memory.
        return tf.while_loop(
            lambda start, *_: start < end, add_chunk, start, parallel_iterations=1
        )[1:]

    return [tf.stack(rows) for rows in zip(*map(sketch_vector, vectors))]


def _count_tops(tf, values):
    """Returns counts of the top bits, the moments, and how many values are zero.

    Right for values that are finite; the top bits of zero are those of numbers below
    the normal ones, too.
    """
    layout = sketch.LAYOUTS[values.dtype.name]
    integer = getattr(tf, layout.integer)
    bits = tf.bitcast(values, integer)
    tops = tf.cast(runtime.shift_right(bits, layout.shift), tf.int32)
    counts = runtime.bincount(tops + layout.tops // 2, layout.tops)
    # Clearing the sign of a float takes a fraction of the time that an integer's does.
    magnitude = tf.bitcast(tf.abs(values), integer)
    others = tf.reduce_sum(tf.minimum(magnitude, tf.constant(1, integer)))
    zeros = tf.size(values) - tf.cast(others, tf.int32)
    return counts, _moments(tf, values, values, tf.cast(values, tf.float64)), zeros


def _count_with_care(tf, values):
    """Returns counts, moments and a zero for values of any kind."""
    numbers, is_finite = _bucket_numbers(tf, values)
    counts = runtime.bincount(numbers, sketch.SIZE)
    return counts, _moments(tf, *_finite(tf, values, is_finite)), tf.constant(0)


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


def _moments(tf, lowest, highest, finite):
    extremes = tf.stack([tf.reduce_min(lowest), tf.reduce_max(highest)])
    finite = _in_rows(tf, finite)
    summands = finite, tf.square(finite), tf.abs(finite)
    sums = tf.stack([tf.reduce_sum(values, axis=1) for values in summands])
    sums = tf.reduce_sum(sums, axis=1)
    return tf.concat([tf.cast(extremes, tf.float64), sums], axis=0)


def _in_rows(tf, values):
    size = values.shape.num_elements()
    if size and size % ROWS == 0:
        return tf.reshape(values, [ROWS, size // ROWS])
    return tf.expand_dims(values, 0)
