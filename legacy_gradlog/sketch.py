"""The histogram of one gradient: its bucket layout, and what is read out of it.

NumPy only. A sketch is a pair of arrays:

* ``counts``, int64, shape ``(..., SIZE)``: how many values fell into each bucket, and
  in the last place how many were not finite;
* ``moments``, float64, shape ``(..., 5)``: minimum, maximum, sum, sum of squares and
  sum of absolute values of the finite values (+inf and -inf where there are none).

The bits of a float are a log-linear bucket number already: exponent and the top three
mantissa bits make eight buckets an octave, so that no bucket is wider than 12.5 % of
its value. The buckets run from 2**-60 (below 1e-18) to 2**20 (above 1e6) on both
signs, with one for exact zeros between them; values outside go into the end buckets.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

__all__ = [
    "EDGES",
    "LAYOUTS",
    "PER_SIGN",
    "Record",
    "SIZE",
    "ZERO",
    "decode",
    "from_rows",
    "from_values",
    "merge",
]

LOWEST_EXPONENT = -60
HIGHEST_EXPONENT = 20
BUCKETS_PER_OCTAVE = 8
PER_SIGN = (HIGHEST_EXPONENT - LOWEST_EXPONENT) * BUCKETS_PER_OCTAVE

#: Bucket number of exact zeros; the negative buckets lie below, the positive above.
ZERO = PER_SIGN
#: Where the values that are not finite are counted: after the last bucket.
NONFINITE = 2 * PER_SIGN + 1
SIZE = NONFINITE + 1


class Layout(NamedTuple):
    """How one float type's bits become a bucket number.

    Attributes:
        integer: Name of the signed integer type of the same width.
        shift: Mantissa bits to drop, all but the top three.
        first: The number that the lowest bucket has after the shift.
        infinity: The bits of positive infinity; anything above is not a number.
        tops: How many values the bits have that the shift leaves, sign included.
        numbers: int32, shape ``(tops,)``: the bucket number that each of them means,
            from the lowest signed integer on, if the value is zero or a normal number,
            or not finite.
    """

    integer: str
    shift: int
    first: int
    infinity: int
    tops: int
    numbers: np.ndarray


def _layout(integer, mantissa, bias, infinity):
    shift = mantissa - 3
    first = (bias + LOWEST_EXPONENT) * BUCKETS_PER_OCTAVE
    magnitudes = np.arange((infinity >> shift) + BUCKETS_PER_OCTAVE)
    bucket = np.clip(magnitudes - first, 0, PER_SIGN - 1) + 1
    bucket[0] = 0
    positive, negative = ZERO + bucket, ZERO - bucket
    for numbers in (positive, negative):
        numbers[magnitudes >= infinity >> shift] = NONFINITE
    numbers = np.concatenate([negative, positive]).astype(np.int32)
    return Layout(integer, shift, first, infinity, len(numbers), numbers)


#: By float type. Narrower floats are widened to float32 first, which is exact.
LAYOUTS = {
    "float32": _layout("int32", 23, 127, 0x7F800000),
    "float64": _layout("int64", 52, 1023, 0x7FF0000000000000),
}


#: The moments of no values.
NO_MOMENTS = (np.inf, -np.inf, 0.0, 0.0, 0.0)


def _edges():
    octaves = 2.0 ** np.arange(LOWEST_EXPONENT, HIGHEST_EXPONENT)
    within = 1 + np.arange(BUCKETS_PER_OCTAVE) / float(BUCKETS_PER_OCTAVE)
    positive = np.append(np.outer(octaves, within).ravel(), 2.0**HIGHEST_EXPONENT)
    edges = np.concatenate([-positive[::-1], positive])
    edges.flags.writeable = False
    return edges


#: The ``NONFINITE + 1`` ascending bucket edges, shared by every record.
EDGES = _edges()


class Record(NamedTuple):
    """One weight's gradient at one logged step.

    Attributes:
        step: Update number (step level) or epoch step (epoch level).
        count: Number of finite values; the touched rows only, for a sparse gradient.
        min, max, sum, sum_squares: Of the finite values, float64; 0 where none is.
        mean_abs: Mean of the absolute values.
        norm: Euclidean norm.
        nonfinite: Number of values that are NaN or infinite.
        counts: int64, shape ``(n,)``: values per bucket.
        edges: float64, shape ``(n + 1,)``: the bucket edges.
    """

    step: int
    count: int
    min: float
    max: float
    sum: float
    sum_squares: float
    mean_abs: float
    norm: float
    nonfinite: int
    counts: np.ndarray
    edges: np.ndarray

    @property
    def max_abs(self):
        """The largest absolute value."""
        return max(-self.min, self.max)


def decode(step, counts, moments):
    """Returns the `Record` of each sketch.

    Args:
        counts: Shape ``(n, SIZE)``.
        moments: Shape ``(n, 5)``.
    """
    records = []
    totals = counts[:, :NONFINITE].sum(axis=1).tolist()
    nonfinite = counts[:, NONFINITE].tolist()
    for row, (count, values) in enumerate(zip(totals, moments.tolist())):
        minimum, maximum, total, squares, absolute = values if count else (0.0,) * 5
        records.append(
            Record(
                step=int(step),
                count=count,
                min=minimum,
                max=maximum,
                sum=total,
                sum_squares=squares,
                mean_abs=absolute / count if count else 0.0,
                norm=math.sqrt(squares),
                nonfinite=nonfinite[row],
                counts=counts[row, :NONFINITE],
                edges=EDGES,
            )
        )
    return records


def merge(first, second):
    """Returns the sketch of the values of two sketches together, exactly."""
    counts = first[0] + second[0]
    a, b = first[1], second[1]
    moments = np.concatenate(
        [
            np.minimum(a[..., :1], b[..., :1]),
            np.maximum(a[..., 1:2], b[..., 1:2]),
            a[..., 2:] + b[..., 2:],
        ],
        axis=-1,
    )
    return counts, moments


def from_values(values):
    """Returns the sketch of a NumPy array of any shape and float type."""
    counts, moments = from_rows(np.ravel(values), [np.size(values)])
    return counts[0], moments[0]


def from_rows(values, sizes):
    """Returns the sketches of arrays that lie end to end.

    Args:
        values: One-dimensional, of any float type.
        sizes: How many of them belong to each array.

    Returns:
        counts ``(n, SIZE)`` and moments ``(n, 5)``.
    """
    if values.dtype != np.float64:
        values = values.astype(np.float32)
    layout = LAYOUTS[values.dtype.name]
    rows, filled, starts = _places(tuple(sizes))
    tops = values.view(layout.integer) >> layout.shift
    number = layout.numbers[tops + layout.tops // 2]
    # The top bits of zero are those of numbers below the normal ones, too.
    subnormal = (number == ZERO) & (values != 0)
    if subnormal.any():
        number[subnormal] += np.where(tops[subnormal] < 0, -1, 1).astype(np.int32)
    counts = np.bincount(number + rows, minlength=len(sizes) * SIZE)
    counts = counts.astype(np.int64, copy=False).reshape(len(sizes), SIZE)

    lowest = highest = values
    if counts[:, NONFINITE].any():
        is_finite = np.isfinite(values)
        lowest = np.where(is_finite, values, np.inf)
        highest = np.where(is_finite, values, -np.inf)
        values = np.where(is_finite, values, 0)
    values = values.astype(np.float64)
    moments = np.tile(NO_MOMENTS, (len(sizes), 1))
    if filled.size:
        moments[filled, 0] = np.minimum.reduceat(lowest, starts)
        moments[filled, 1] = np.maximum.reduceat(highest, starts)
        summands = np.stack([values, np.square(values), np.abs(values)])
        moments[filled, 2:] = np.add.reduceat(summands, starts, axis=1).T
    return counts, moments


@functools.lru_cache(maxsize=16)
def _places(sizes):
    """Returns where arrays that lie end to end are.

    Returns:
        What each value's bucket number is raised by, which arrays have values, and
        where those begin.
    """
    sizes = np.array(sizes, np.intp)
    filled = np.flatnonzero(sizes)
    starts = np.cumsum(sizes) - sizes
    # Of one array, which may be long, nothing is kept.
    rows = np.repeat(np.arange(len(sizes)) * SIZE, sizes) if len(sizes) > 1 else 0
    return rows, filled, starts[filled]
