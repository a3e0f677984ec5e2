"""Training is bit-identical with and without the callbacks."""

import numpy as np
import pytest

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

    plain = final_state(fw, lambda number: [], build, fits=2)
    again = final_state(fw, lambda number: [], build, fits=2)
    ours = final_state(fw, logged, build, fits=2)
    assert len(plain) == len(again) == len(ours)
    for number, (first, second) in enumerate(zip(plain, again)):
        np.testing.assert_array_equal(first, second, "plain runs differ: %d" % number)
    for number, (first, second) in enumerate(zip(plain, ours)):
        np.testing.assert_array_equal(first, second, "value %d" % number)
