"""Nothing is left on a model, however its training ended, nor in what is saved."""

import re
import zipfile

import h5py
import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

from legacy_gradlog import GradientLogger, TensorBoard

from .frameworks import BATCH, Trained, small_data
from .oracle import (
    assert_fit,
    assert_step_level,
    expected_keys,
    keys,
    read_events,
)
from .test_callbacks import Stop, state_of

TENSORFLOW = Version(tf.__version__)
V1 = getattr(getattr(tf, "compat", None), "v1", tf)
EAGER = hasattr(tf, "executing_eagerly") and tf.executing_eagerly()


def batches(third):
    """Yields batches of `small_data` for ever; ``third`` makes the third one."""
    x, y = small_data()
    for number in range(1000):
        here = slice(number % 5 * BATCH, (number % 5 + 1) * BATCH)
        yield third(x[here]) if number == 2 else x[here], y[here]


def raising(x):
    raise Stop


def checked_loss(y_true, y_pred):
    return V1.reduce_mean(V1.square(V1.check_numerics(y_pred, "checked") - y_true), -1)


def outcome(fw, model, third, callbacks):
    """Trains for an epoch; returns the class of what `fit` raised, or None."""
    try:
        fw.fit_stream(model, batches(third), steps_per_epoch=5, callbacks=callbacks)
    except Exception as error:
        # Whoever holds the traceback holds the frame of `fit`.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return type(error)


@pytest.mark.skipif(
    Version("2.0") <= TENSORFLOW < Version("2.2"),
    reason="these loops have their train function elsewhere: test_tf20",
)
def test_however_it_ends(fw, tmp_path):
    """The user's exception is the one without us, and the next fit is logged."""
    compiled = dict(jit_compile=False) if fw.is_keras_3 else {}
    trained = fw.linear_model(loss=checked_loss, **compiled)
    model = trained.model

    updates = []
    counter = fw.keras.callbacks.LambdaCallback(
        on_batch_end=lambda batch, logs: updates.append(batch)
    )

    class Stopper(fw.keras.callbacks.Callback):
        def on_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    def nan(x):
        return x * np.nan

    ends = {
        "as usual": (lambda x: x, []),
        "the data raises": (raising, []),
        "the step raises": (nan, []),
        "stop_training": (lambda x: x, [Stopper()]),
    }
    plain = {name: outcome(fw, model, *end) for name, end in ends.items()}
    assert [name for name in ends if plain[name]] == list(ends)[1:3]
    before = state_of(model)
    for name, (third, others) in ends.items():
        del updates[:]
        log_dir = str(tmp_path / name)
        logged = TensorBoard(log_dir, write_grads=True, grads_freq="batch")
        assert outcome(fw, model, third, [logged, counter] + others) is plain[name]
        assert state_of(model) == before, name
        tags = [event.tag for event in read_events(fw, log_dir)]
        assert tags.count("d/kernel_0_grad") == len(updates), name
    assert updates
    weights = fw.recorder(trained)
    logger = GradientLogger(str(tmp_path / "after"), freq="batch")
    fw.fit(model, *small_data(), callbacks=[logger, weights])
    events = read_events(fw, tmp_path / "after")
    first = min(event.step for event in events)
    steps = range(first, first + 5)
    assert keys(events) == expected_keys(trained.paths, steps)
    assert_step_level(events, weights, trained.paths, steps, first=first)


@pytest.mark.skipif(
    not EAGER or TENSORFLOW < Version("2.2"),
    reason="a `train_step` is called in eager mode of TensorFlow 2.2 and later",
)
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["traced", "eagerly"])
def test_a_train_step_that_raises(fw, tmp_path, run_eagerly):
    """While it is traced, or in its third step; the optimizer's hook is taken off."""
    calls = []

    class Custom(fw.keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            calls.append(1)
            if len(calls) == fails_at:
                raise Stop
            return {"loss": loss}

    inputs = fw.layers.Input((4,))
    dense = fw.layers.Dense(1, use_bias=False, name="d")
    model = Custom(inputs, dense(inputs))
    trained = Trained(model, [("d/kernel", dense, 0)])

    def state():
        return {name: sorted(vars(part)) for name, part in parts.items()}

    def fit(callbacks):
        model.compile(fw.optimizer(), run_eagerly=run_eagerly)
        del calls[:]
        parts.update(model=model, optimizer=model.optimizer)
        return outcome(fw, model, lambda x: x, callbacks)

    parts, fails_at = {}, 3 if run_eagerly else 1
    expected, before = fit([]), state()
    assert expected is not None
    assert fit([GradientLogger(str(tmp_path / "a"), freq="batch")]) is expected
    assert state() == before
    assert model.train_function is None or not hasattr(model.train_function, "engines")
    fails_at = None
    logger = GradientLogger(str(tmp_path / "b"), freq="batch")
    model.compile(fw.optimizer(), run_eagerly=run_eagerly)
    assert_fit(fw, trained, logger, range(5), *small_data())


def saved_keys(fw, model, folder):
    """Returns what is in everything that this Keras can save of a model."""
    folder.mkdir(parents=True)
    found = {}
    model.save(str(folder / fw.file_name))
    if fw.is_keras_3:
        with zipfile.ZipFile(str(folder / fw.file_name)) as archive:
            archive.extractall(str(folder / "zip"))
            found["zip"] = archive.namelist()
            # Some are numbered by where the objects lie in memory.
            config = archive.read("config.json").decode()
            found["config"] = re.sub(r'"shared_object_id": \d+', "", config)
    # The newer form, chosen by this name, cannot be saved with eager execution off.
    model.save_weights(str(folder / ("only.weights.h5" if fw.eager else "only.h5")))
    for path in sorted(folder.rglob("*.h5")):
        with h5py.File(str(path), "r") as file:
            names = found[path.name] = []
            file.visit(names.append)
            found[path.name, "config"] = file.attrs.get("model_config")
    if fw.saves_objects:
        saved = folder / "saved"
        if fw.is_keras_3:
            model.export(str(saved), verbose=False)
        else:
            model.save(str(saved), save_format="tf")
        graph = SavedModel.FromString((saved / "saved_model.pb").read_bytes())
        nodes = graph.meta_graphs[0].object_graph_def.nodes
        found["objects"] = [[c.local_name for c in node.children] for node in nodes]
        variables = tf.train.list_variables(str(saved / "variables" / "variables"))
        found["variables"] = [name for name, _ in variables]
        saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        found["checkpoint"] = tf.train.list_variables(saver.save(str(folder / "c")))
    return found


def test_the_same_is_saved(fw, tmp_path):
    """During the training, with our callbacks in, and after it."""

    def saved(folder, callbacks):
        fw.clear()
        model = fw.linear_model(fw.optimizer("Adam", rate=0.01)).model
        found = []
        saver = fw.keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: found.append(
                saved_keys(fw, model, folder / str(epoch))
            )
        )
        fw.fit(model, *small_data(), callbacks=callbacks + [saver])
        return found + [saved_keys(fw, model, folder / "after")]

    logger = TensorBoard(str(tmp_path / "logs"), write_grads=True, grads_freq="batch")
    plain, ours = saved(tmp_path / "plain", []), saved(tmp_path / "ours", [logger])
    assert len(plain) == len(ours) == 2
    for number in range(2):
        assert len(plain[number]) > 1
        for key, names in plain[number].items():
            assert ours[number][key] == names, key
