"""Gradients that are not finite, and other odd ones: counted, and told once.

Of a loss that is the model's output, and batches of one row, the gradient of the kernel
is that row.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import GradientLogger, GradlogWarning

from .conftest import messages_of
from .frameworks import Trained, small_data
from .oracle import assert_step_level, read_events
from .test_sketch import V1, by_definition, sketched

NAN, INF = np.nan, np.inf
ROWS = [
    [0.5, 0.5, 0.5, 0.5],
    [0.0, 0.0, 0.0, 0.0],
    [NAN, 1.0, -2.0, 4.0],
    [INF, -INF, 3.0, 0.0],
    [-INF, -1.5, -3.0, -4.0],
    [NAN, NAN, NAN, NAN],
    [1.0, -2.0, 0.25, 8.0],
]

DTYPES = ["float16", "float32", "float64"]
if Version(tf.__version__) >= Version("2.9"):
    DTYPES.append("bfloat16")


def output(y_true, y_pred):
    """A loss."""
    return y_pred


def typed_model(fw, dtype):
    """Returns a linear model whose weights have the given type."""
    dense = fw.layers.Dense(1, use_bias=False, name="d", dtype=dtype)
    inputs = fw.layers.Input((4,), dtype=dtype)
    model = fw.keras.models.Model(inputs, dense(inputs))
    model.compile(fw.optimizer(), output)
    return model


@pytest.fixture(params=DTYPES)
def dtype(fw, request):
    """Makes one float type that of the weights, as far as this Keras goes."""
    before = fw.keras.backend.floatx()
    lacks_it = fw.name == "tf.keras" and fw.tf_version.release[:2] == (1, 13)
    if lacks_it and request.param == "float16":
        reason = "the `div_no_nan` of TF 1.13, in its losses, knows no float16"
        request.node.add_marker(pytest.mark.xfail(strict=True, reason=reason))
    if request.param != "bfloat16":
        fw.keras.backend.set_floatx(request.param)
    yield request.param
    fw.keras.backend.set_floatx(before)


def test_values_of_every_kind(fw, tmp_path, dtype):
    model = typed_model(fw, dtype)
    x = np.array(ROWS)
    logger = GradientLogger(str(tmp_path), freq="batch", scalars=["norm", "max_abs"])
    with pytest.warns(GradlogWarning, match="not finite"):
        fw.fit(model, x, np.zeros((len(x), 1)), batch_size=1, callbacks=[logger])
    assert model.get_weights()[0].dtype.name == dtype
    found = {(e.tag, e.step): e.value for e in read_events(fw, tmp_path)}
    for step, row in enumerate(x):
        finite = row[np.isfinite(row)]
        bad = len(row) - len(finite)
        assert found.get(("grad_nonfinite/d/kernel", step), 0) == bad
        histogram = found["d/kernel_0_grad", step]
        lowest, highest = (min(finite), max(finite)) if len(finite) else (0, 0)
        assert (histogram.min, histogram.max) == (lowest, highest)
        assert (histogram.num, histogram.sum) == (len(finite), finite.sum())
        counts = by_definition(row)
        # Of each run of empty buckets between filled ones, one is there.
        runs = [list(run) for _, run in itertools.groupby(counts, bool)]
        stored = [n for run in runs for n in (run if run[0] else run[:1])]
        assert list(histogram.bucket) == list(np.trim_zeros(stored))
        norm = np.sqrt(np.square(finite).sum())
        assert found["grad_norm/d/kernel", step] == pytest.approx(norm)
        assert found["grad_max_abs/d/kernel", step] == max(-lowest, highest)
        assert found["grad_global_norm", step] == pytest.approx(norm)


def test_one_warning_names_the_first(fw, tmp_path):
    """The rows 2 to 5 are not finite; a second fit says nothing any more."""
    model = typed_model(fw, "float32")
    x = np.array(ROWS, "float32")
    logger = GradientLogger(str(tmp_path), freq="batch")
    with pytest.warns(GradlogWarning) as caught:
        for _ in range(2):
            fw.fit(model, x, np.zeros((len(x), 1)), batch_size=1, callbacks=[logger])
    assert messages_of(caught) == [
        "A gradient is not finite: 1 of 4 values of d/kernel at step 2. Such values "
        "are counted in `grad_nonfinite/...` and left out of everything else. This is "
        "told once."
    ]


def exploding(fw, callbacks=(), epochs=8):
    """Trains a model whose weights get some thirty times larger with every update."""
    fw.clear()
    trained = fw.linear_model(fw.optimizer(rate=1e-3))
    x, y = small_data()
    # The gradient of the first weight is finite while those of the others overflow.
    x *= [1e-12, 100, 100, 100]
    weights = fw.recorder(trained)
    history = fw.fit(
        trained.model, x, y, epochs=epochs, callbacks=[weights] + list(callbacks)
    )
    assert len(history.epoch) == epochs
    return x, y, [values["d/kernel"] for values in weights.values]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_exploding_network_runs_to_its_end(fw, tmp_path):
    _, _, plain = exploding(fw)
    with pytest.warns(GradlogWarning) as caught:
        logger = GradientLogger(str(tmp_path), freq="batch")
        x, y, weights = exploding(fw, [logger])
    np.testing.assert_array_equal(np.stack(weights), np.stack(plain))
    found = {(e.tag, e.step): e.value for e in read_events(fw, tmp_path)}
    bad = []
    for step, before in enumerate(weights[:-1]):
        rows = slice(step % 5 * 8, step % 5 * 8 + 8)
        error = np.matmul(x[rows], before) - y[rows]
        gradient = np.matmul(x[rows].T, error / np.float32(4))
        finite = gradient[np.isfinite(gradient)]
        bad.append(len(gradient) - len(finite))
        assert found.get(("grad_nonfinite/d/kernel", step), 0) == bad[-1]
        histogram = found["d/kernel_0_grad", step]
        assert histogram.num == len(finite)
        extremes = (finite.min(), finite.max()) if len(finite) else (0, 0)
        assert (histogram.min, histogram.max) == pytest.approx(extremes, rel=1e-3)
    assert set(bad) == {0, 3, 4}, "the case needs a step that is partly finite"
    (message,) = messages_of(caught)
    first = next(step for step, count in enumerate(bad) if count)
    assert "values of d/kernel at step {}.".format(first) in message


@pytest.fixture
def empty_weights_train(fw, request):
    """Expects a test to fail where Keras makes no variable for an empty moment."""
    optimizer = fw.optimizer()
    first = hasattr(optimizer, "get_updates") and not hasattr(optimizer, "add_slot")
    if first and not hasattr(fw.keras.backend.zeros((0,)), "assign"):
        reason = "`K.zeros` of this Keras makes a constant of an empty shape"
        request.node.add_marker(pytest.mark.xfail(strict=True, reason=reason))


def test_a_scalar_and_an_empty_weight(fw, tmp_path, empty_weights_train):
    zeros = fw.keras.initializers.Zeros()

    class Odd(fw.layers.Layer):
        def build(self, input_shape):
            self.scale = self.add_weight(name="scale", shape=(), initializer=zeros)
            self.none = self.add_weight(name="none", shape=(0,), initializer=zeros)
            super(Odd, self).build(input_shape)

        def call(self, inputs):
            return inputs * self.scale + tf.reduce_sum(self.none)

        def compute_output_shape(self, input_shape):
            return input_shape

    odd = Odd(name="odd")
    inputs = fw.layers.Input((1,))
    model = fw.keras.models.Model(inputs, odd(inputs))
    model.compile(fw.optimizer(), "mse")
    scalar = Trained(model, [("odd/scale", odd, 0)])
    weights = fw.recorder(scalar)
    logger = GradientLogger(str(tmp_path), freq="batch")
    x, y = small_data()
    fw.fit(model, x[:, :1], y, callbacks=[logger, weights])
    events = read_events(fw, tmp_path)
    assert_step_level(events, weights, scalar.paths, range(5))
    empty = [event.value for event in events if event.tag == "odd/none_0_grad"]
    assert len(empty) == 5
    for value in empty:
        assert (value.num, value.min, value.max, list(value.bucket)) == (0, 0, 0, [])


def test_sixty_million_values():
    """More than a float32 counts."""
    # Nothing that TensorFlow could compute beforehand.
    times = V1.placeholder_with_default(tf.constant([10000000]), [1])
    values = tf.tile(tf.constant([0.0, 1.0, 1.0, -2.0, NAN, -INF]), times)
    counts, moments = sketched(values)
    finite = 10000000 * by_definition(np.array([0.0, 1.0, 1.0, -2.0]))
    assert counts.tolist() == finite.tolist() + [20000000]
    assert moments.tolist() == [-2, 1, 0, 60000000, 40000000]
