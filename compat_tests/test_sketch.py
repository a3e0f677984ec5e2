"""The histogram: its layout, what NumPy and TensorFlow make of the same values."""

import numpy as np
import pytest
import tensorflow as tf

from legacy_gradlog import sketch, writers
from legacy_gradlog.engines import sketch_ops

V1 = getattr(getattr(tf, "compat", None), "v1", tf)

VALUES = {
    "normal": np.random.RandomState(0).randn(1000) * 1e-3,
    "wide": np.random.RandomState(1).randn(500)
    * 10.0 ** np.random.RandomState(2).uniform(-25, 12, 500),
    "zeros": np.zeros(7),
    "negative zero": np.array([-0.0, 0.0]),
    "constant": np.full(9, 0.1),
    "single": np.array([-3.0]),
    "empty": np.array([]),
    "nan": np.full(4, np.nan),
    "mixed": np.array([np.nan, np.inf, -np.inf, 1.0, -2.0, 0.0]),
    # Zeros in the place of what is not finite would be the minimum and the maximum.
    "positive beside nan": np.array([np.nan, 3.0, 4.0, -np.inf]),
    "negative beside nan": np.array([np.nan, -3.0, -4.0, np.inf]),
    "matrix": np.arange(-6.0, 6.0).reshape(3, 4),
    "scalar": np.array(0.25),
    # Below the normal numbers, of float32 and of float64.
    "subnormal": np.array([1e-39, -2e-42, 0.0, -0.0, 1e-310, -5e-324, 1.0, -1.0]),
}


#: Longer than its sketch, with zeros.
LONG = np.append(np.random.RandomState(3).randn(sketch.SIZE), np.zeros(5))
LONG = LONG.astype("float32")


def by_definition(values):
    """Returns the bucket counts by NumPy's histogram, ends clamped, zeros apart."""
    finite = values[np.isfinite(values)].astype(np.float64)
    nonzero = finite[finite != 0]
    magnitude = np.clip(np.abs(nonzero), 2.0**-60, np.nextafter(2.0**20, 0))
    edges = sketch.EDGES[sketch.ZERO + 1 :]
    positive, _ = np.histogram(magnitude[nonzero > 0], edges)
    negative, _ = np.histogram(magnitude[nonzero < 0], edges)
    zeros = [len(finite) - len(nonzero)]
    return np.concatenate([negative[::-1], zeros, positive])


def check(values, counts, moments):
    finite = values[np.isfinite(values)].astype(np.float64)
    (record,) = sketch.decode(7, counts[None], moments[None])
    np.testing.assert_array_equal(record.counts, by_definition(values.ravel()))
    assert record.step == 7
    assert record.count == finite.size
    assert record.nonfinite == values.size - finite.size
    if finite.size:
        assert (record.min, record.max) == (finite.min(), finite.max())
        assert record.max_abs == np.abs(finite).max()
        np.testing.assert_allclose(record.mean_abs, np.abs(finite).mean(), rtol=1e-6)
    else:
        assert (record.min, record.max, record.mean_abs, record.norm) == (0, 0, 0, 0)
    scale = np.abs(finite).sum()
    np.testing.assert_allclose(record.sum, finite.sum(), rtol=1e-6, atol=1e-12 * scale)
    np.testing.assert_allclose(record.sum_squares, (finite**2).sum(), rtol=1e-6)
    np.testing.assert_allclose(record.norm, np.sqrt((finite**2).sum()), rtol=1e-6)


def test_no_bucket_is_wider_than_an_eighth():
    edges = sketch.EDGES
    assert (np.diff(edges) > 0).all()
    assert len(edges) == sketch.NONFINITE + 1
    np.testing.assert_array_equal(edges, -edges[::-1])
    positive = edges[sketch.ZERO + 1 :]
    assert positive[0] <= 1e-18 and positive[-1] >= 1e6
    assert (np.diff(positive) / positive[:-1]).max() <= 0.125
    # Zero has the bucket between the two smallest edges to itself.
    assert edges[sketch.ZERO] < 0 < edges[sketch.ZERO + 1]


def test_the_edges_belong_to_the_bucket_above():
    edges = sketch.EDGES[sketch.ZERO + 1 : -1]
    counts, _ = sketch.from_values(edges)
    np.testing.assert_array_equal(counts[sketch.ZERO + 1 : -1], np.ones(len(edges)))
    counts, _ = sketch.from_values(-edges)
    np.testing.assert_array_equal(counts[: sketch.ZERO], np.ones(len(edges)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", sorted(VALUES))
def test_numpy(name, dtype):
    with np.errstate(over="ignore"):
        values = VALUES[name].astype(dtype)
    check(values, *sketch.from_values(values))


@pytest.fixture(autouse=True)
def graph():
    """A graph for each test: one for all of them grows, and slows them down."""
    if hasattr(tf, "executing_eagerly") and tf.executing_eagerly():
        yield
    else:
        with tf.Graph().as_default():
            yield


def evaluate(tensors):
    if hasattr(tf, "executing_eagerly") and tf.executing_eagerly():
        return [tensor.numpy() for tensor in tensors]
    with V1.Session() as session:
        return session.run(list(tensors))


def sketched(gradient):
    counts, moments = evaluate(sketch_ops.sketch_rows([gradient]))
    return counts[0], moments[0]


#: Values of ``SMALL`` and ``CHUNK``: together with others, whole, in chunks.
WAYS = {
    "small": (2048, 2**17),
    "large": (-1, 2**17),
    "chunks": (-1, 3),
    # Whose sums go by rows.
    "chunks of rows": (-1, sketch_ops.ROWS),
}


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", sorted(VALUES))
def test_tensorflow(name, dtype, way, monkeypatch):
    for setting, value in zip(("SMALL", "CHUNK"), WAYS[way]):
        monkeypatch.setattr(sketch_ops, setting, value)
    with np.errstate(over="ignore"):
        values = VALUES[name].astype(dtype)
    check(values, *sketched(tf.constant(values)))


def duplicate_rows():
    """Returns slices of the rows 4, 1 and 4 again, and the values of their sums."""
    slices = tf.IndexedSlices(
        values=tf.constant([[1.0, -2.0], [3.0, 4.0], [0.5, 2.0]]),
        indices=tf.constant([4, 1, 4]),
        dense_shape=tf.constant([10, 2]),
    )
    return slices, np.array([1.5, 0.0, 3.0, 4.0], "float32")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arrays_that_lie_end_to_end(dtype):
    with np.errstate(over="ignore"):
        arrays = [VALUES[name].astype(dtype).ravel() for name in sorted(VALUES)]
    found = sketch.from_rows(np.concatenate(arrays), [array.size for array in arrays])
    for array, counts, moments in zip(arrays, *found):
        check(array, counts, moments)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", sorted(VALUES))
def test_packed(name, dtype):
    """Beside gradients of another type, and of more values than a sketch has numbers.

    The order of what is packed is not that of the gradients.
    """
    with np.errstate(over="ignore"):
        gradients = [LONG, VALUES[name].astype(dtype), VALUES["wide"], -2 * LONG]
    packing = sketch_ops.Packing([tf.constant(values) for values in gradients])
    (vector,) = evaluate([packing.pack([tf.constant(g) for g in gradients])])
    assert vector.dtype == np.float64
    # Twice as many numbers for float64.
    short = 2 * VALUES["wide"].size + gradients[1].size * (1 + (dtype == "float64"))
    assert vector.shape == packing.empty.shape == (short + 2 * (sketch.SIZE + 5),)
    for values, counts, moments in zip(gradients, *packing.unpack(vector)):
        check(values, counts, moments)


def test_packed_gradients_are_merged():
    first, second = [LONG, VALUES["matrix"]], [3 * LONG, VALUES["matrix"] ** 3]
    packing = sketch_ops.Packing([tf.constant(g) for g in first], sketched=True)
    vectors = [packing.pack([tf.constant(g) for g in part]) for part in (first, second)]
    empty = tf.constant(packing.empty)
    merged = packing.merge(packing.merge(empty, vectors[0]), vectors[1])
    (vector,) = evaluate([merged])
    for one, other, counts, moments in zip(first, second, *packing.unpack(vector)):
        check(np.concatenate([one, other]), counts, moments)


def test_packed_rows_are_summed():
    """Of `tf.IndexedSlices`, however few they are."""
    slices, summed = duplicate_rows()
    gradients = [slices, tf.constant(VALUES["matrix"])]
    packing = sketch_ops.Packing(gradients)
    (vector,) = evaluate([packing.pack(gradients)])
    expected = summed, VALUES["matrix"]
    for values, counts, moments in zip(expected, *packing.unpack(vector)):
        check(values, counts, moments)


def test_bfloat16():
    values = np.array([1.5, -2.0, 0.0, np.inf], "float32")
    gradient = tf.cast(tf.constant(values), tf.bfloat16)
    check(values, *sketched(gradient))


def test_duplicate_rows_are_summed():
    """Two touched rows, and no other is counted."""
    slices, summed = duplicate_rows()
    check(summed, *sketched(slices))


def test_rows_are_the_single_sketches():
    first, second = np.array([1.0, 2.0], "float32"), np.array([[-1.0]], "float32")
    counts, moments = evaluate(
        sketch_ops.sketch_rows([tf.constant(first), tf.constant(second)])
    )
    check(first, counts[0], moments[0])
    check(second, counts[1], moments[1])


def test_stored_buckets():
    """The filled ones, and the last empty one of each gap within a histogram."""
    arrays = [
        np.array([-1e9, 0.5, 1e9]),
        np.array([]),
        # Beside the last bucket of the one before.
        np.array([-1e9, 3.0, 3.0]),
        np.array([0.25, 0.25 * 1.125, 7.0]),
    ]
    counts, moments = (
        np.stack(parts) for parts in zip(*map(sketch.from_values, arrays))
    )
    summary = V1.Summary()
    tags = ["a", "b", "c", "d"]
    records = sketch.decode(7, counts, moments)
    writers.add_histograms(summary, tags, records, counts)
    assert [value.tag for value in summary.value] == tags
    for value, row in zip(summary.value, counts[:, : sketch.NONFINITE]):
        expected, last = [], None
        for bucket in np.flatnonzero(row):
            if last is not None and bucket > last + 1:
                expected.append((sketch.EDGES[bucket], 0))
            expected.append((sketch.EDGES[bucket + 1], row[bucket]))
            last = bucket
        found = list(zip(value.histo.bucket_limit, value.histo.bucket))
        assert found == expected, value.tag


def test_merging_is_sketching_both():
    first, second = VALUES["normal"], VALUES["wide"]
    merged = sketch.merge(sketch.from_values(first), sketch.from_values(second))
    check(np.concatenate([first, second]), *merged)
    alone = sketch.merge(sketch.from_values(first), sketch.from_values(np.array([])))
    check(first, *alone)
