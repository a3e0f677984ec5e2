"""What only TensorFlow 1 has: its optimizers, its loaded models, its eager mode."""

import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import GradientLogger, UnsupportedError

from .frameworks import LEARNING_RATE, run_script, small_data
from .oracle import assert_step_level, expected_keys, keys, read_events

if Version(tf.__version__) >= Version("2.0"):
    pytest.skip("these are ways of TensorFlow 1", allow_module_level=True)


def logged(fw, trained, log_dir, fits=1, first=0):
    """Trains and compares every update with the weights; returns the loggers."""
    x, y = small_data()
    weights = fw.recorder(trained)
    logger = GradientLogger(str(log_dir), freq="batch")
    for _ in range(fits):
        fw.fit(trained.model, x, y, callbacks=[logger, weights])
    events = read_events(fw, log_dir)
    steps = range(first, first + 5 * fits)
    assert keys(events) == expected_keys(trained.paths, steps)
    assert_step_level(events, weights, trained.paths, steps, first=first)


def test_optimizer_of_tensorflow(fw, tmp_path):
    """Its `iterations` count double on many versions; the steps do not."""
    optimizer = tf.train.GradientDescentOptimizer(LEARNING_RATE)
    logged(fw, fw.small_model(optimizer), tmp_path, fits=2)


def test_train_function_of_before(fw, tmp_path):
    trained = fw.small_model()
    trained.model.train_on_batch(*small_data(rows=8))
    logged(fw, trained, tmp_path, first=1)


def test_slots_of_a_loaded_model_survive(fw, tmp_path):
    """Adam's moments are those of a run that was never logged."""
    x, y = small_data()
    path = str(tmp_path / "model.h5")
    saved = fw.linear_model(fw.optimizer("Adam", rate=0.01))
    fw.fit(saved.model, x, y)
    saved.model.save(path)

    def go_on(callbacks):
        model = fw.keras.models.load_model(path)
        before = model.optimizer.get_weights()
        assert sum(np.abs(value).sum() for value in before) > 0
        fw.fit(model, x, y, callbacks=callbacks)
        return model.get_weights() + model.optimizer.get_weights()

    logger = GradientLogger(str(tmp_path / "logs"), freq="batch")
    plain, ours = go_on([]), go_on([logger])
    assert len(plain) == len(ours) > 2
    for expected, value in zip(plain, ours):
        np.testing.assert_array_equal(value, expected)
    steps = [e.step for e in read_events(fw, tmp_path) if e.tag == "d/kernel_0_grad"]
    assert steps == [5, 6, 7, 8, 9]


def test_own_gradients_of_an_optimizer(fw, tmp_path):
    """What `get_gradients` of a user's class returns cannot be told unclipped."""
    base = type(fw.optimizer())

    class Halved(base):
        def get_gradients(self, loss, params):
            return [g / 2 for g in super(Halved, self).get_gradients(loss, params)]

    optimizer = Halved(LEARNING_RATE)
    trained = fw.small_model(optimizer)
    with pytest.raises(UnsupportedError) as caught:
        logger = GradientLogger(str(tmp_path / "a"))
        fw.fit(trained.model, *small_data(), callbacks=[logger])
    assert "`clipped=True`" in str(caught.value)
    weights = fw.recorder(trained)
    logger = GradientLogger(str(tmp_path / "b"), freq="batch", clipped=True)
    fw.fit(trained.model, *small_data(), callbacks=[logger, weights])
    events = read_events(fw, tmp_path / "b")
    assert_step_level(events, weights, trained.paths, range(5))


@pytest.mark.skipif(
    Version(tf.__version__) >= Version("1.10"),
    reason="from TensorFlow 1.10 on they are logged: test_styles",
)
def test_the_state_of_a_loop_is_refused(fw, tmp_path):
    """The step may read what it has just written, another time in the gradient."""
    layers = fw.layers
    inner = layers.Input(batch_shape=(8, 2, 2))
    recurrent = layers.LSTM(2, stateful=True, name="rnn")
    nested = fw.keras.models.Model(inner, recurrent(inner))
    inputs = layers.Input(batch_shape=(8, 2, 2))
    model = fw.keras.models.Model(inputs, layers.Dense(1)(nested(inputs)))
    model.compile(fw.optimizer(), "mse")
    x, y = small_data()
    with pytest.raises(UnsupportedError) as caught:
        logger = GradientLogger(str(tmp_path))
        fw.fit(model, x.reshape(40, 2, 2), y, callbacks=[logger])
    assert "Received: rnn. Build it with `unroll=True`" in str(caught.value)


@pytest.mark.skipif(
    Version(tf.__version__) < Version("1.7"),
    reason="eager execution came with TensorFlow 1.7",
)
def test_eager_execution_is_refused(tmp_path):
    """In a process of its own: it cannot be switched off again."""
    script = """
        import numpy as np
        import tensorflow as tf
        tf.enable_eager_execution()
        from legacy_gradlog import GradientLogger, UnsupportedError
        layers = tf.keras.layers
        model = tf.keras.Sequential([layers.Dense(1, input_shape=(4,))])
        model.compile(tf.train.GradientDescentOptimizer(0.1), "mse")
        before = model.get_weights()
        try:
            x = np.ones((8, 4), "float32")
            model.fit(x, x[:, :1], epochs=1, callbacks=[GradientLogger("logs")])
        except UnsupportedError as error:
            assert np.array_equal(model.get_weights()[0], before[0])
            print(error)
    """
    output = run_script(script, tmp_path)
    assert "eager execution of TensorFlow 1: leave it off" in output


@pytest.mark.skipif(
    Version(tf.__version__) < Version("1.5"),
    reason="`multi_gpu_model` of `tf.keras` came with TensorFlow 1.5",
)
def test_multi_gpu_model(fw, tmp_path):
    """Two towers, soft-placed on CPUs: the gradient of the whole batch, once."""
    script = """
        import sys
        import numpy as np
        import tensorflow as tf
        from legacy_gradlog import GradientLogger, errors

        errors.strict = True
        keras = tf.keras
        if sys.argv[2] == "keras":
            import keras
        towers = keras.utils.multi_gpu_model
        names = ["/device:CPU:0", "/device:GPU:0", "/device:GPU:1"]
        sys.modules[towers.__module__]._get_available_devices = lambda: names
        config = tf.ConfigProto(device_count={"CPU": 2}, allow_soft_placement=True)
        keras.backend.set_session(tf.Session(config=config))

        inputs = keras.layers.Input((2,))
        dense = keras.layers.Dense(1, use_bias=False, name="d")
        single = keras.models.Model(inputs, dense(inputs), name="single")
        model = towers(single, gpus=2)
        model.compile(keras.optimizers.SGD(lr=0.25), "mse")

        logger = GradientLogger("logs", freq="batch")
        x = np.random.RandomState(0).randn(32, 2).astype("float32")
        for update in range(4):
            before = dense.get_weights()[0]
            model.fit(
                x, x[:, :1] * x[:, 1:], batch_size=32, verbose=0, callbacks=[logger],
                epochs=1,
            )
            gradient = (before - dense.get_weights()[0]) / 0.25
            record = logger.latest["single/d/kernel"]
            assert (record.step, record.count) == (update, 2)
            np.testing.assert_allclose(
                [record.min, record.max],
                [gradient.min(), gradient.max()],
                atol=2e-6,
            )
        print("updates", update + 1)
    """
    assert run_script(script, tmp_path, fw.name).endswith("updates 4\n")
