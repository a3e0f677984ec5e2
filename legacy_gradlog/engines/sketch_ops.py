"""The sketch of one gradient as TensorFlow operations.

Runs inside the training step, on every TensorFlow from 1.4 on and in both modes. The
layout is `sketch`'s; this module only computes it.
"""

from .. import runtime, sketch

__all__ = ["sketch_gradient", "sketch_rows"]


def sketch_gradient(gradient):
    """Returns the sketch of one gradient: counts ``(SIZE,)``, moments ``(5,)``.

    Args:
        gradient: A dense tensor of any shape and float type, or `tf.IndexedSlices`,
            whose duplicate rows are summed and of which only these rows count.
    """
    tf = runtime.tensorflow()
    values = _flat_values(tf, gradient)
    if values.dtype != tf.float64:
        values = tf.cast(values, tf.float32)
    layout = sketch.LAYOUTS[values.dtype.name]
    integer = getattr(tf, layout.integer)

    bits = tf.bitcast(values, integer)
    magnitude = tf.bitwise.bitwise_and(bits, tf.constant(integer.max, integer))
    bucket = runtime.shift_right(magnitude, layout.shift) - layout.first
    bucket = tf.cast(tf.clip_by_value(bucket, 0, sketch.PER_SIGN - 1) + 1, tf.int32)
    is_finite = magnitude < layout.infinity
    number = sketch.ZERO + runtime.where(bits < 0, -bucket, bucket)
    zero, nonfinite = (
        tf.fill(tf.shape(number), place) for place in (sketch.ZERO, sketch.NONFINITE)
    )
    number = runtime.where(tf.equal(magnitude, 0), zero, number)
    number = runtime.where(is_finite, number, nonfinite)
    counts = tf.cast(runtime.bincount(number, sketch.SIZE), tf.int64)

    zeros = tf.zeros_like(values)
    infinities = tf.fill(tf.shape(values), tf.constant(float("inf"), values.dtype))
    finite = tf.cast(runtime.where(is_finite, values, zeros), tf.float64)
    lowest = tf.reduce_min(runtime.where(is_finite, values, infinities))
    highest = tf.reduce_max(runtime.where(is_finite, values, -infinities))
    moments = [
        tf.cast(lowest, tf.float64),
        tf.cast(highest, tf.float64),
        tf.reduce_sum(finite),
        tf.reduce_sum(tf.square(finite)),
        tf.reduce_sum(tf.abs(finite)),
    ]
    return counts, tf.stack(moments)


def sketch_rows(gradients):
    """Returns the sketches of several gradients: counts ``(n, SIZE)``, moments
    ``(n, 5)``."""
    tf = runtime.tensorflow()
    counts, moments = zip(*[sketch_gradient(gradient) for gradient in gradients])
    return tf.stack(counts), tf.stack(moments)


def _flat_values(tf, gradient):
    if isinstance(gradient, tf.IndexedSlices):
        rows, positions = tf.unique(gradient.indices)
        gradient = runtime.segment_sum(gradient.values, positions, tf.size(rows))
    return tf.reshape(gradient, [-1])
