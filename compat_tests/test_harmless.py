"""Training is bit-identical with and without the callbacks."""

import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import GradientLogger, TensorBoard

from .frameworks import small_data


def final_state(fw, callbacks, build, fits):
    """Returns weights, optimizer state and history after some fits."""
    fw.clear()
    np.random.seed(3)
    trained = build(fw)
    model = trained.model
    random = np.random.RandomState(5)
    model.set_weights([random.randn(*w.shape) * 0.1 for w in model.get_weights()])
    state = []
    x, y = small_data()
    for number in range(fits):
        history = model.fit(
            x, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks(number)
        )
        state += [np.array(values) for values in history.history.values()]
    return state + model.get_weights() + fw.optimizer_state(model.optimizer)


def dropout_model(fw):
    return fw.small_model(fw.optimizer("Adam", rate=0.01))


def one_layer_model(fw):
    """Deeper models with ref variables are not reproducible by themselves."""
    return fw.linear_model(fw.optimizer("Adam", rate=0.01))


CADENCES = {
    "batch": dict(freq="batch"),
    "every third": dict(freq=3),
    "last": dict(),
    "pool": dict(reduce="pool"),
}


@pytest.mark.parametrize("name", sorted(CADENCES))
def test_bit_identical(fw, tmp_path, name):
    build = dropout_model if fw.reproducible else one_layer_model

    def logged(number):
        log_dir = str(tmp_path / str(number))
        return [
            GradientLogger(log_dir, **CADENCES[name]),
            TensorBoard(log_dir + "-tb", write_grads=True),
        ]

    check_identical(fw, logged, build)


def check_identical(fw, logged, build, fits=2, tolerance=0):
    """Compares two plain runs of some fits, and then one that is logged.

    Args:
        tolerance: Largest relative difference of what is logged.
    """
    plain = final_state(fw, lambda number: [], build, fits)
    again = final_state(fw, lambda number: [], build, fits)
    ours = final_state(fw, logged, build, fits)
    assert len(plain) == len(again) == len(ours)
    for number, (first, second) in enumerate(zip(plain, again)):
        np.testing.assert_array_equal(first, second, "plain runs differ: %d" % number)
    for number, (first, second) in enumerate(zip(plain, ours)):
        np.testing.assert_allclose(second, first, tolerance, 0, err_msg=str(number))


TENSORFLOW = Version(tf.__version__)
EAGER = hasattr(tf, "executing_eagerly") and tf.executing_eagerly()


def since(version, name):
    return pytest.mark.skipif(
        TENSORFLOW < Version(version) or not EAGER,
        reason="`{}` is of eager mode since TensorFlow {}".format(name, version),
    )


@pytest.mark.parametrize(
    "name, value",
    [
        pytest.param("jit_compile", True, marks=since("2.8", "jit_compile")),
        pytest.param("run_eagerly", True, marks=since("2.2", "run_eagerly")),
        pytest.param("steps_per_execution", 4, marks=since("2.4", "several steps")),
    ],
    ids=lambda value: str(value),
)
def test_bit_identical_however_it_is_compiled(fw, tmp_path, name, value):
    """XLA compiles the step that is logged anew, and may round it differently."""

    def build(fw):
        # What XLA draws for Dropout is seeded by nothing.
        return fw.linear_model(fw.optimizer("Adam", rate=0.01), **{name: value})

    def logged(number):
        return [GradientLogger(str(tmp_path / str(number)), freq=3)]

    xla = name == "jit_compile"
    # XLA takes seconds for a trace.
    check_identical(fw, logged, build, 1 if xla else 2, 1e-6 if xla else 0)


@pytest.mark.parametrize("fit", [0, 1], ids=["the first", "the second"])
@pytest.mark.parametrize("name", ["without dropout", "dropout"])
def test_one_fit_of_two_is_logged(fw, tmp_path, request, fit, name):
    """Two fits have a train function each then, as after another `compile`."""
    build = {"dropout": dropout_model, "without dropout": one_layer_model}[name]
    if name == "dropout":
        if not fw.reproducible:
            build = one_layer_model
        elif fw.keeps_random_state_in_functions:
            reason = "tf.keras 2 keeps the state of Dropout in the traced function"
            request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    check_identical(
        fw,
        lambda number: [GradientLogger(str(tmp_path / "logs"))] * (number == fit),
        build,
    )
