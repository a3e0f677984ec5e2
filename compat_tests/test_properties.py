"""What holds for any values, names, arguments and bytes, not only for chosen ones."""

import inspect

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from legacy_gradlog import (
    GradientLogger,
    InvalidArgumentError,
    TensorBoard,
    UnknownArgumentError,
    events,
    sketch,
    tags,
)
from legacy_gradlog.arguments import NATIVE

from .test_events import event, read, write_records
from .test_sketch import check, sketched

# A failure is repeated by its own line alone: nothing is kept on disk.
properties = settings(max_examples=60, deadline=None, database=None, derandomize=True)
few = settings(properties, max_examples=15)

values = st.sampled_from(["float16", "float32", "float64"]).flatmap(
    # Of larger ones the sums overflow, in TensorFlow and in NumPy alike.
    lambda dtype: arrays.arrays(
        dtype,
        arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6),
        elements=st.one_of(
            st.floats(-60000, 60000, width=16),
            st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0]),
        ),
    )
)


@properties
@given(values)
def test_a_sketch_is_what_numpy_says(array):
    check(array, *sketch.from_values(array))


@few
@given(values)
def test_tensorflow_says_the_same(array):
    counts, moments = sketched(tf.constant(array))
    np.testing.assert_array_equal(counts, sketch.from_values(array)[0])
    check(array, counts, moments)


@properties
@given(st.lists(values, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_merging_in_any_order_is_sketching_all(parts, random):
    """The counts and extremes to the last bit, the sums to rounding."""
    whole = np.concatenate([part.ravel().astype(np.float64) for part in parts])
    sketches = [sketch.from_values(part) for part in parts]
    random.shuffle(sketches)
    merged = sketches[0]
    for other in sketches[1:]:
        merged = sketch.merge(merged, other)
    expected = sketch.from_values(whole)
    np.testing.assert_array_equal(merged[0], expected[0])
    np.testing.assert_array_equal(merged[1][:2], expected[1][:2])
    scale = np.abs(whole[np.isfinite(whole)]).sum()
    np.testing.assert_allclose(
        merged[1][2:], expected[1][2:], rtol=1e-9, atol=1e-9 * scale
    )


class Variable:
    """All that the naming of weights looks at where no model is known."""

    def __init__(self, name):
        self.name = name


names = st.lists(
    st.sampled_from(["d/kernel", "d/kernel_1", "d/kernel_0", "d", "kernel_1_1", "e/d"]),
    max_size=12,
)


@properties
@given(names)
def test_no_two_weights_share_a_name(given_names):
    weights = tags.name_variables([Variable(name + ":0") for name in given_names])
    assert len(weights) == len(given_names)
    for each in ([w.path for w in weights], [w.tag for w in weights]):
        assert len(set(each)) == len(each)
    # The first of a name has it, whatever follows.
    assert [w.path for w in weights[:1]] == given_names[:1]
    for weight in weights:
        # `[` has a meaning of its own in a pattern, and none of these names has it.
        assert tags.select(weights, [weight.path], "layers").count(weight) == 1
    assert tags.select(weights, None, "layers") == weights


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 3),
        st.floats(),
        st.text(max_size=5),
        st.binary(max_size=3),
        st.sampled_from(["epoch", "batch", "last", "pool", "norm", "mean_abs"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=4,
)
ARGUMENTS = ["freq", "layers", "reduce", "clipped", "scalars", "histograms"]


@properties
@given(st.sampled_from(ARGUMENTS), anything)
def test_an_argument_is_taken_or_refused(name, value):
    """A refusal says which argument it is, what was received, and is on one line."""
    for cls, prefix in ((GradientLogger, ""), (TensorBoard, "grads_")):
        if prefix and name == "histograms":
            continue
        try:
            cls("logs", **{prefix + name: value})
        except InvalidArgumentError as error:
            assert str(error).startswith("`{}{}` must ".format(prefix, name))
            assert "Received: " in str(error) and len(str(error).splitlines()) == 1
        else:
            assert name != "layers" or value is None or all(map(is_text, value))


def is_text(value):
    return isinstance(value, str)


KNOWN = set(NATIVE).union(inspect.signature(TensorBoard.__init__).parameters)


@properties
@given(st.text(max_size=20).filter(lambda name: name not in KNOWN))
def test_an_unknown_argument_is_refused(name):
    with pytest.raises(UnknownArgumentError):
        TensorBoard("logs", **{name: 1})


@few
@given(st.lists(st.tuples(st.integers(0, 10**4), st.integers(0, 255)), max_size=8))
def test_damage_never_makes_a_value(tmp_path_factory, damage):
    """Whatever bytes are changed: what is read was written, and nothing is raised."""
    folder = tmp_path_factory.mktemp("damaged")
    written = [event(step, "loss/{}".format(step)) for step in range(20)]
    path = write_records(folder, written)
    with open(path, "rb") as file:
        data = bytearray(file.read())
    for place, byte in damage:
        data[place % len(data)] = byte
    with open(path, "wb") as file:
        file.write(data)
    found, causes = read(folder)
    assert all(v.tag == "loss/{}".format(v.step) and v.data == 0.5 for v in found)
    assert len(found) == 20 or causes


@few
@given(st.lists(st.binary(max_size=60), max_size=6))
def test_any_records_are_read(tmp_path_factory, records):
    """Sound frames around any bytes: nothing is raised, and what follows is read."""
    folder = tmp_path_factory.mktemp("records")
    write_records(folder, records + [event(7)])
    assert read(folder)[0][-1] == (".", "loss", 7, 7.5, 0.5)


@properties
@given(st.text(alphabet=st.characters(), max_size=300))
def test_what_is_printed_is_printable(text):
    shown = events.printable(text)
    assert shown.isprintable()
    if text.isprintable() and len(text) <= 200:
        assert shown == text
