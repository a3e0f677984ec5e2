"""Beside other callbacks of one `fit`, and in a run that a new process goes on with."""

from legacy_gradlog import GradientLogger, TensorBoard

from .frameworks import no_profile, run_script, small_data, stock_class
from .oracle import (
    assert_step_level,
    expected_keys,
    gradient_events,
    keys,
    read_events,
)


def backups(fw, folder):
    """Returns a `BackupAndRestore`, which eager mode of some lines has."""
    callbacks = fw.keras.callbacks
    homes = [callbacks, getattr(callbacks, "experimental", None)]
    classes = [getattr(home, "BackupAndRestore", None) for home in homes]
    return [cls(folder) for cls in classes if cls and fw.eager][:1]


def test_beside_the_callbacks_of_keras(fw, tmp_path):
    """Two of ours among a stock `TensorBoard` and those that save, stop and tell."""
    trained = fw.linear_model()
    model, callbacks = trained.model, fw.keras.callbacks
    weights = fw.recorder(trained)
    saved, told = tmp_path / fw.file_name, []
    fw.fit(
        model,
        *small_data(),
        epochs=4,
        validation_data=small_data(rows=8, seed=1),
        callbacks=[
            GradientLogger(str(tmp_path / "steps"), freq=2),
            # Nothing after the first epoch is an improvement: the second is the last.
            callbacks.EarlyStopping("val_loss", min_delta=1e9, patience=0),
            callbacks.ModelCheckpoint(str(saved), save_weights_only=False),
            stock_class(fw)(str(tmp_path / "stock"), **no_profile(fw)),
            callbacks.LambdaCallback(on_epoch_end=lambda e, logs: told.append(e)),
            TensorBoard(
                str(tmp_path / "ours"), write_grads=True, grads_freq=3, **no_profile(fw)
            ),
            weights,
        ]
        + backups(fw, str(tmp_path / "backup")),
    )
    assert told == [0, 1] and saved.exists()
    events = read_events(fw, tmp_path / "steps")
    assert keys(events) == expected_keys(trained.paths, range(0, 10, 2))
    assert_step_level(events, weights, trained.paths, range(0, 10, 2))

    ours = read_events(fw, tmp_path / "ours")
    gradients = gradient_events(ours)
    run = "train" if fw.eager else "."
    assert keys(gradients) == expected_keys(trained.paths, range(0, 10, 3), run)
    assert_step_level(gradients, weights, trained.paths, range(0, 10, 3))
    rest = [event for event in ours if event not in gradients]
    assert keys(rest) == keys(read_events(fw, tmp_path / "stock"))


def train(fw, model, log_dir, **kwargs):
    """Trains from the weights and the optimizer's state that a model has."""
    callbacks = [
        GradientLogger(log_dir + "/steps", freq=2),
        GradientLogger(log_dir + "/epochs", reduce="pool"),
    ]
    callbacks += kwargs.pop("callbacks", [])
    fw.fit(model, *small_data(), callbacks=callbacks, **kwargs)


def histograms(fw, log_dir):
    """Returns (run, step) -> what the file has of the kernel's gradient."""
    return {
        (event.run, event.step): event.value.SerializeToString()
        for event in read_events(fw, log_dir)
        if event.tag == "d/kernel_0_grad"
    }


def test_a_run_that_a_new_process_goes_on_with(fw, tmp_path):
    """The steps and the histograms of the run that was not broken off."""
    script = """
import sys
import tensorflow as tf
name, eager, model = sys.argv[2:]
if eager == "False" and tf.__version__[0] == "2":
    tf.compat.v1.disable_eager_execution()
from compat_tests import conftest, test_beside
from legacy_gradlog import errors

errors.strict = True
(fw,) = conftest.available(name)
fw.begin()
model = fw.keras.models.load_model(model)
test_beside.train(fw, model, "resumed", initial_epoch=1, epochs=3)
"""
    # `tf.keras` of TF 1.13 loses Adam's moments in a loaded model, with or without us.
    model = fw.linear_model().model
    saved = str(tmp_path / fw.file_name)

    def save(epoch, logs):
        if epoch == 0:
            model.save(saved)

    saver = fw.keras.callbacks.LambdaCallback(on_epoch_end=save)
    train(fw, model, str(tmp_path / "unbroken"), epochs=3, callbacks=[saver])
    run_script(script, tmp_path, fw.name, str(fw.eager), saved)

    unbroken = histograms(fw, tmp_path / "unbroken")
    resumed = histograms(fw, tmp_path / "resumed")
    steps = [("steps", step) for step in range(0, 15, 2)]
    assert sorted(unbroken) == [("epochs", epoch) for epoch in range(3)] + steps
    assert sorted(resumed) == [("epochs", 1), ("epochs", 2)] + steps[3:]
    for key, histogram in resumed.items():
        assert histogram == unbroken[key], key
