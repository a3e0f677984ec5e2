"""TensorFlow 2.0 and 2.1: the loops that no later release has.

`tf.keras` takes its training step from a closure, runs it eagerly in `fit_generator`,
and falls back to a symbolic graph for data its new loop does not know; standalone Keras
2.3 trains from a symbolic graph always. The oracle is plain SGD: the difference of the
weights around an update, divided by the learning rate.
"""

import gc
import glob
import os

import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

if not Version("2.0") <= Version(tf.__version__) < Version("2.2"):
    pytest.skip(
        "These training loops exist in TensorFlow 2.0 and 2.1 only",
        allow_module_level=True,
    )
if not tf.executing_eagerly():
    pytest.skip(
        "with eager execution off training is as in TensorFlow 1",
        allow_module_level=True,
    )

import h5py
import keras as standalone
from tensorflow.python.keras.engine import training_v2_utils

from legacy_gradlog import GradientLogger, TensorBoard

from .frameworks import run_script

RATE = 0.25
BATCH = 8
X = np.random.RandomState(0).randn(43, 4).astype("float32")
Y = np.random.RandomState(1).randn(43, 1).astype("float32")
PATHS = ["d1/kernel", "d1/bias", "bn/gamma", "bn/beta", "d2/kernel", "d2/bias"]


def generate():
    while True:
        for start in range(0, 40, BATCH):
            yield X[start : start + BATCH], Y[start : start + BATCH]


def fit_arrays(model, tmp_path, **kwargs):
    return model.fit(X, Y, batch_size=BATCH, validation_data=(X, Y), **kwargs)


def fit_dataset(model, tmp_path, **kwargs):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    return model.fit(data, **kwargs)


def fit_with_generator(model, tmp_path, **kwargs):
    return model.fit(generate(), steps_per_epoch=5, **kwargs)


def fit_generator(model, tmp_path, **kwargs):
    return model.fit_generator(generate(), steps_per_epoch=5, **kwargs)


def fit_hdf5(model, tmp_path, **kwargs):
    path = str(tmp_path / "data.h5")
    if not os.path.exists(path):
        with h5py.File(path, "w") as file:
            file["x"], file["y"] = X, Y
    x, y = [tf.keras.utils.HDF5Matrix(path, name) for name in "xy"]
    return model.fit(x, y, batch_size=BATCH, shuffle=False, **kwargs)


class Way:
    """One way into a training loop."""

    def __init__(self, keras, fit, subclassed=False, **compiled):
        self.keras = keras
        self.fit = fit
        self.subclassed = subclassed
        self.compiled = compiled

    def model(self, optimizer=None):
        keras = self.keras
        keras.backend.clear_session()
        np.random.seed(7)
        tf.random.set_seed(7)
        layers = [
            keras.layers.Dense(8, activation="tanh", name="d1"),
            keras.layers.Dropout(0.5, name="dropout"),
            keras.layers.BatchNormalization(name="bn"),
            keras.layers.Dense(1, name="d2"),
        ]
        if self.subclassed:
            model = Subclassed(layers)
        else:
            inputs = keras.layers.Input((4,))
            outputs = inputs
            for layer in layers:
                outputs = layer(outputs)
            model = keras.models.Model(inputs, outputs)
        optimizer = optimizer or keras.optimizers.SGD(RATE)
        model.compile(optimizer, "mse", metrics=["mae"], **self.compiled)
        return model


class Subclassed(tf.keras.Model):
    def __init__(self, layers):
        super().__init__()
        self.parts = layers

    def call(self, inputs, training=None):
        first, dropout, norm, last = self.parts
        hidden = dropout(first(inputs), training=training)
        return last(norm(hidden, training=training))


WAYS = {
    "arrays": Way(tf.keras, fit_arrays),
    "eagerly": Way(tf.keras, fit_arrays, run_eagerly=True),
    "subclassed": Way(tf.keras, fit_arrays, subclassed=True),
    "dataset": Way(tf.keras, fit_dataset),
    "generator": Way(tf.keras, fit_with_generator),
    "fit_generator": Way(tf.keras, fit_generator),
    "old loop for its data": Way(tf.keras, fit_hdf5),
    "old loop, eagerly": Way(tf.keras, fit_hdf5, run_eagerly=True),
    "old loop": Way(tf.keras, fit_arrays, experimental_run_tf_function=False),
    "standalone": Way(standalone, fit_arrays),
    "standalone fit_generator": Way(standalone, fit_generator),
}
every_way = pytest.mark.parametrize("way", list(WAYS.values()), ids=list(WAYS))


def weights_of(model):
    if hasattr(model, "parts"):
        layers = model.parts
    else:
        layers = model.layers
    weights = [w for layer in layers for w in layer.trainable_weights]
    return [weight.numpy() for weight in weights]


def watcher(keras, logger):
    """Returns a callback that keeps weights and records of every update."""

    class Watcher(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.weights, self.records = [], []

        def on_train_batch_begin(self, batch, logs=None):
            self.before = weights_of(self.model) if self.model.built else None

        def on_train_batch_end(self, batch, logs=None):
            self.weights.append((self.before, weights_of(self.model)))
            self.records.append(dict(logger.latest))

    return Watcher()


def check(record, gradient):
    assert record.count == gradient.size
    np.testing.assert_allclose(record.min, gradient.min(), rtol=1e-4, atol=3e-6)
    np.testing.assert_allclose(record.max, gradient.max(), rtol=1e-4, atol=3e-6)
    norm = np.linalg.norm(gradient)
    np.testing.assert_allclose(record.norm, norm, rtol=1e-4, atol=3e-6)
    assert record.counts.sum() == gradient.size


def check_updates(watch):
    for records, (before, after) in zip(watch.records, watch.weights):
        if before is not None:
            for path, w0, w1 in zip(PATHS, before, after):
                check(records[path], (w0 - w1) / RATE)


@every_way
def test_every_update_is_logged_with_its_own_gradient(way, tmp_path):
    model = way.model()
    logger = GradientLogger(str(tmp_path / "log"), freq="batch")
    for _ in range(2):
        watch = watcher(way.keras, logger)
        way.fit(model, tmp_path, epochs=2, verbose=0, callbacks=[logger, watch])
        steps = [records["d1/kernel"].step for records in watch.records]
        assert sorted(records["d1/kernel"].step for records in watch.records) == steps
        check_updates(watch)
    assert len(steps) >= 10
    assert steps == list(range(len(steps), 2 * len(steps)))


@every_way
def test_the_last_update_of_an_epoch_is_logged(way, tmp_path):
    model = way.model()
    logger = GradientLogger(str(tmp_path / "log"))
    watch = watcher(way.keras, logger)
    way.fit(model, tmp_path, epochs=2, verbose=0, callbacks=[logger, watch])
    assert watch.records[0] == {}
    before, after = watch.weights[-1]
    for path, w0, w1 in zip(PATHS, before, after):
        assert logger.latest[path].step == 1
        check(logger.latest[path], (w0 - w1) / RATE)


def train(way, tmp_path, callbacks):
    """Returns weights, optimizer state and history of three fits in a row."""
    model = way.model(way.keras.optimizers.Adam(0.01))
    histories = []
    for seed in range(3):
        np.random.seed(seed)
        history = way.fit(
            model, tmp_path, epochs=2, verbose=0, callbacks=list(callbacks)
        ).history
        histories.append({name: np.array(history[name]) for name in history})
    return model.get_weights(), model.optimizer.get_weights(), histories


def check_same(run, other):
    for part, same in zip(run[:2], other[:2]):
        assert len(part) == len(same)
        for array, expected in zip(part, same):
            np.testing.assert_array_equal(array, expected)
    np.testing.assert_equal(run[2], other[2])


@every_way
def test_training_is_bit_identical(way, tmp_path):
    train(way, tmp_path, [])  # The first graph of a process gets other op seeds.
    plain = train(way, tmp_path, [])
    check_same(plain, train(way, tmp_path, []))
    path = str(tmp_path / "log")
    check_same(plain, train(way, tmp_path, [GradientLogger(path)]))
    check_same(plain, train(way, tmp_path, [GradientLogger(path, freq="batch")]))
    both = [
        GradientLogger(path, reduce="pool", clipped=True),
        TensorBoard(path + "/tb", 1, write_grads=True, grads_freq=3, profile_batch=0),
    ]
    check_same(plain, train(way, tmp_path, both))


@every_way
def test_everything_is_put_back_after_an_exception(way, tmp_path):
    model = way.model()
    kwargs = dict(epochs=1, verbose=0)
    way.fit(model, tmp_path, **kwargs)

    def state():
        # Keras calls no hook after an exception: its callback list must be gone.
        gc.collect()
        function = getattr(model, "train_function", None)
        functions = [function, type(function)]
        if way.keras is tf.keras:
            function = training_v2_utils._get_or_make_execution_function(
                model, training_v2_utils.ModeKeys.TRAIN
            )
            functions += [cell.cell_contents for cell in function.__closure__]
        return functions, set(vars(model)), set(vars(model.optimizer))

    before = state()

    class Stop(way.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyError("stop")

    logger = GradientLogger(str(tmp_path / "log"), freq="batch")
    with pytest.raises(KeyError):
        way.fit(model, tmp_path, callbacks=[logger, Stop()], **kwargs)
    assert logger.latest
    assert state() == before
    watch = watcher(way.keras, logger)
    way.fit(model, tmp_path, callbacks=[logger, watch], **kwargs)
    assert state() == before
    check_updates(watch)


def test_the_step_is_traced_once_for_all_fits(tmp_path):
    traces = []

    class Counted(tf.keras.layers.Layer):
        def call(self, inputs, training=None):
            # Building the model calls the layer too, and not for training.
            if training is True:
                traces.append(training)
            return inputs

    model = tf.keras.Sequential([Counted(input_shape=(4,)), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(RATE), "mse")
    logger = GradientLogger(str(tmp_path), freq="batch")
    for _ in range(3):
        model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[logger])
    # Without the callback too: a `tf.function` that makes variables is traced twice,
    # and keeps the second trace.
    assert len(traces) == 2


def events(directory):
    (path,) = [
        path
        for path in glob.glob(os.path.join(str(directory), "*tfevents*"))
        if not path.endswith("profile-empty")
    ]
    return [
        (value.tag, event.step)
        for event in tf.compat.v1.train.summary_iterator(path)
        for value in event.summary.value
    ]


@pytest.mark.parametrize("name", ["arrays", "fit_generator", "standalone"])
def test_gradients_go_through_the_stock_writer(name, tmp_path):
    way = WAYS[name]
    model = way.model()
    callback = TensorBoard(
        str(tmp_path / "tb"),
        histogram_freq=1,
        write_grads=True,
        grads_freq=2,
        update_freq="batch",
        profile_batch=0,
    )
    # A closed gate of the user's drops what the stock callback does not force either.
    with tf.summary.record_if(False):
        way.fit(model, tmp_path, epochs=2, verbose=0, callbacks=[callback])
    found = events(tmp_path / "tb" / "train")
    updates = int(model.optimizer.iterations.numpy())
    steps = [step for tag, step in found if tag == "d1/kernel_0_grad"]
    assert steps == list(range(0, updates, 2))
    assert [step for tag, step in found if tag == "d1/kernel_0"] == [0, 1]
    losses = [step for tag, step in found if tag == "batch_loss"]
    assert losses == list(range(updates))
    assert not (tmp_path / "tb" / "gradients").exists()


def test_fit_of_tf_keras_does_not_clip(tmp_path):
    way = WAYS["arrays"]
    model = way.model(tf.keras.optimizers.SGD(RATE, clipnorm=1e-3))
    for clipped in (False, True):
        logger = GradientLogger(str(tmp_path), freq="batch", clipped=clipped)
        watch = watcher(way.keras, logger)
        way.fit(model, tmp_path, epochs=1, verbose=0, callbacks=[logger, watch])
        assert watch.records[-1]["d1/kernel"].norm > 2e-3
        check_updates(watch)


@pytest.mark.parametrize("name", ["old loop", "standalone"])
def test_clipping_of_a_symbolic_step(name, tmp_path):
    way = WAYS[name]
    model = way.model(way.keras.optimizers.SGD(RATE, clipvalue=1e-2))
    before = GradientLogger(str(tmp_path / "before"), freq="batch")
    after = GradientLogger(str(tmp_path / "after"), freq="batch", clipped=True)
    watch = watcher(way.keras, after)
    way.fit(model, tmp_path, epochs=1, verbose=0, callbacks=[before, after, watch])
    check_updates(watch)
    for path in PATHS:
        unclipped, clipped = before.latest[path], after.latest[path]
        assert clipped.min == pytest.approx(np.clip(unclipped.min, -1e-2, 1e-2))
        assert clipped.max == pytest.approx(np.clip(unclipped.max, -1e-2, 1e-2))
    assert max(record.norm for record in before.latest.values()) > 0.1


def test_mirrored_replicas_give_one_summed_gradient(tmp_path):
    run_script(
        """
        import sys
        import numpy as np
        import tensorflow as tf
        from legacy_gradlog import GradientLogger, errors
        errors.strict = True
        config = tf.config.experimental
        (cpu,) = config.list_physical_devices("CPU")
        config.set_virtual_device_configuration(
            cpu, [config.VirtualDeviceConfiguration()] * 2
        )
        layers = tf.keras.layers
        with tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]).scope():
            model = tf.keras.Sequential([
                layers.Embedding(10, 3, input_length=4, name="e"),
                layers.Flatten(),
                layers.Dense(1, name="d"),
            ])
            model.compile(tf.keras.optimizers.SGD(0.25), "mse")
        logger = GradientLogger(sys.argv[1], freq="batch")

        class Watch(tf.keras.callbacks.Callback):
            steps = []

            def on_train_batch_begin(self, batch, logs=None):
                self.before = model.get_weights()

            def on_train_batch_end(self, batch, logs=None):
                self.steps.append(logger.latest["e/embeddings"].step)
                paths = ["e/embeddings", "d/kernel", "d/bias"]
                for path, w0, w1 in zip(paths, self.before, model.get_weights()):
                    gradient, record = (w0 - w1) / 0.25, logger.latest[path]
                    touched = gradient[np.abs(gradient).reshape(len(w0), -1).any(1)]
                    assert record.count == touched.size, (record.count, touched.size)
                    for name, value in [
                        ("min", touched.min()),
                        ("max", touched.max()),
                        ("norm", np.linalg.norm(touched)),
                    ]:
                        np.testing.assert_allclose(
                            getattr(record, name), value, rtol=1e-4, atol=3e-6
                        )

        x = np.random.RandomState(0).randint(0, 8, (48, 4))
        y = np.random.randn(48, 1).astype("float32")
        model.fit(
            x, y, batch_size=8, epochs=2, verbose=0, callbacks=[logger, Watch()]
        )
        assert Watch.steps == list(range(12)), Watch.steps
        """,
        tmp_path,
    )


def test_standalone_keras_with_eager_off(tmp_path):
    run_script(
        """
        import os
        import sys
        import numpy as np
        import tensorflow as tf
        tf.compat.v1.disable_eager_execution()
        import keras
        from legacy_gradlog import GradientLogger, TensorBoard, UnsupportedError, errors
        errors.strict = True
        model = keras.models.Sequential([
            keras.layers.Dense(5, activation="tanh", input_shape=(4,), name="d1"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1, name="d2"),
        ])
        model.compile(keras.optimizers.SGD(0.25), "mse")
        x, y = np.random.randn(40, 4), np.random.randn(40, 1)
        logger = GradientLogger(sys.argv[1] + "/log", freq="batch")
        read = tf.compat.v1.keras.backend.batch_get_value

        class Watch(keras.callbacks.Callback):
            steps = []

            def on_train_batch_begin(self, batch, logs=None):
                self.before = read(model.weights)

            def on_train_batch_end(self, batch, logs=None):
                self.steps.append(logger.latest["d1/kernel"].step)
                paths = ["d1/kernel", "d1/bias", "d2/kernel", "d2/bias"]
                for path, w0, w1 in zip(paths, self.before, read(model.weights)):
                    gradient, record = (w0 - w1) / 0.25, logger.latest[path]
                    assert record.count == gradient.size
                    for name, value in [
                        ("min", gradient.min()),
                        ("max", gradient.max()),
                        ("norm", np.linalg.norm(gradient)),
                    ]:
                        np.testing.assert_allclose(
                            getattr(record, name), value, rtol=1e-4, atol=3e-6
                        )

        try:
            model.fit(x, y, callbacks=[TensorBoard(sys.argv[1], 1, write_grads=True)])
        except UnsupportedError as error:
            assert "`histogram_freq` must be 0" in str(error)
        else:
            raise AssertionError("not refused")
        board = TensorBoard(sys.argv[1] + "/tb", write_grads=True)
        callbacks = [logger, board, Watch()]
        for _ in range(2):
            model.fit(x, y, batch_size=8, epochs=1, verbose=0, callbacks=callbacks)
        assert Watch.steps == list(range(10)), Watch.steps
        # The stock writer works in eager mode only.
        assert os.listdir(sys.argv[1] + "/tb/gradients")
        """,
        tmp_path,
    )
