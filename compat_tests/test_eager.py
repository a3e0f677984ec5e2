"""What only training in compiled functions has: TensorFlow 2.2 and later, eager."""

import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import (
    GradientLogger,
    GradlogWarning,
    InvalidArgumentError,
    TensorBoard,
)

from .conftest import messages_of
from .frameworks import Trained, small_data
from .oracle import (
    Gradient,
    assert_fit,
    assert_histogram,
    assert_step_level,
    expected_keys,
    keys,
    read_events,
    updates_of,
)

if not (hasattr(tf, "executing_eagerly") and tf.executing_eagerly()):
    pytest.skip("graph mode has no compiled train functions", allow_module_level=True)
if Version(tf.__version__) < Version("2.2"):
    pytest.skip("TF 2.0 and 2.1 have loops of their own", allow_module_level=True)

needs_execution_of_several_steps = pytest.mark.skipif(
    Version(tf.__version__) < Version("2.4"),
    reason="`steps_per_execution` came with TensorFlow 2.4",
)
needs_jit_compile = pytest.mark.skipif(
    Version(tf.__version__) < Version("2.8"),
    reason="`jit_compile` came with TensorFlow 2.8",
)


def test_dataset_of_unknown_length(fw, tmp_path):
    """Nothing announces the last batch: the first epoch is captured on every step."""
    trained = fw.small_model()
    x, y = small_data(rows=36)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    dataset = dataset.filter(lambda x, y: tf.constant(True))
    weights = fw.recorder(trained)
    logger = GradientLogger(str(tmp_path))
    trained.model.fit(dataset, epochs=3, verbose=0, callbacks=[logger, weights])

    events = read_events(fw, tmp_path)
    assert keys(events) == expected_keys(trained.paths, range(3))
    for path in trained.paths:
        gradients = updates_of(weights, path)
        for epoch in range(3):
            tag = path + "_0_grad"
            (histogram,) = [e.value for e in events if (e.tag, e.step) == (tag, epoch)]
            assert_histogram(histogram, gradients[5 * epoch + 4])


def stepwise(fw, log_dir, freq, epochs, reduce="last", **kwargs):
    """Trains from fixed weights without dropout and returns the events."""
    fw.clear()
    trained = fw.linear_model(**kwargs)
    logger = GradientLogger(str(log_dir), freq=freq, reduce=reduce)
    fw.fit(trained.model, *small_data(), epochs=epochs, callbacks=[logger])
    return read_events(fw, log_dir)


def comparable(events):
    return [
        (e.tag, e.step, getattr(e.value, "SerializeToString", lambda e=e: e.value)())
        for e in events
    ]


@needs_execution_of_several_steps
@pytest.mark.parametrize("freq", ["batch", 2, 3, 5, "epoch"])
@pytest.mark.parametrize("reduce", ["last", "pool"])
def test_several_steps_an_execution(fw, tmp_path, freq, reduce):
    """The very steps and values of one step an execution, with a shorter last one."""
    one = stepwise(fw, tmp_path / "1", freq, epochs=2, reduce=reduce)
    four = stepwise(
        fw, tmp_path / "4", freq, epochs=2, reduce=reduce, steps_per_execution=4
    )
    assert comparable(four) == comparable(one)
    steps = {"epoch": range(2), "batch": range(10)}.get(freq)
    steps = steps or range(0, 10, freq)
    assert keys(one) == expected_keys(["d/kernel"], steps)


@needs_jit_compile
@pytest.mark.parametrize("freq", ["batch", 2, "epoch"])
def test_compiled_by_xla(fw, tmp_path, freq):
    trained = fw.small_model(jit_compile=True)
    weights = fw.recorder(trained)
    logger = GradientLogger(str(tmp_path / "a"), freq=freq)
    pool = GradientLogger(str(tmp_path / "b"), reduce="pool")
    fw.fit(trained.model, *small_data(), callbacks=[logger, pool, weights])

    events = read_events(fw, tmp_path / "a")
    if freq == "epoch":
        last = updates_of(weights, "d1/kernel")[-1]
        (histogram,) = [e.value for e in events if e.tag == "d1/kernel_0_grad"]
        assert_histogram(histogram, last)
    else:
        steps = range(0, 5, 1 if freq == "batch" else freq)
        assert keys(events) == expected_keys(trained.paths, steps)
        assert_step_level(events, weights, trained.paths, steps)
    (pooled,) = [
        e.value for e in read_events(fw, tmp_path / "b") if e.tag == "d1/kernel_0_grad"
    ]
    assert_histogram(pooled, Gradient.pooled(updates_of(weights, "d1/kernel")))


def test_run_eagerly(fw, tmp_path):
    trained = fw.small_model(run_eagerly=True)
    logger = GradientLogger(str(tmp_path), freq=2)
    assert_fit(fw, trained, logger, [0, 2, 4], *small_data())


def subclassed(fw):
    """A model that has no weights before it has seen data."""
    keras = fw.keras

    class Network(keras.Model):
        def __init__(self):
            super().__init__()
            self.d1 = keras.layers.Dense(3, name="d1")
            self.blocks = [keras.layers.Dense(2, name="d2")]
            self.d3 = keras.layers.Dense(1, name="d3")

        def call(self, inputs):
            return self.d3(self.blocks[0](self.d1(inputs)))

    model = Network()
    model.compile(fw.optimizer(), "mse")
    probes = [
        (layer.name + "/" + name, layer, index)
        for layer in (model.d1, model.blocks[0], model.d3)
        for index, name in enumerate(["kernel", "bias"])
    ]
    return Trained(model, probes)


def test_model_that_is_not_built(fw, tmp_path):
    trained = subclassed(fw)
    loggers = [GradientLogger(str(tmp_path), freq="batch")]
    fw.fit(trained.model, *small_data(rows=8), callbacks=loggers)
    weights = fw.recorder(trained)
    fw.fit(trained.model, *small_data(), callbacks=loggers + [weights])
    events = read_events(fw, tmp_path)
    assert keys(events) == expected_keys(trained.paths, range(6))
    assert_step_level(events, weights, trained.paths, range(1, 6), first=1)


def test_unknown_pattern_on_a_model_that_is_not_built(fw, tmp_path):
    trained = subclassed(fw)
    logger = GradientLogger(str(tmp_path), layers=["dens"])
    with pytest.raises(InvalidArgumentError) as caught:
        fw.fit(trained.model, *small_data(), callbacks=[logger])
    assert "Received: 'dens', which matches none of: d1, d1/kernel" in str(caught.value)
    assert int(trained.model.optimizer.iterations) == 0


@pytest.mark.skipif(
    Version(tf.__version__) < Version("2.2"), reason="`train_step` came with TF 2.2"
)
def test_custom_train_step(fw, tmp_path):
    keras = fw.keras

    class Custom(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.abs(self(x, training=True) - y))
            variables = self.trainable_variables
            gradients = tape.gradient(loss, variables)
            self.optimizer.apply_gradients(zip(gradients, variables))
            return {"loss": loss}

    inputs = keras.layers.Input((4,))
    dense = keras.layers.Dense(1, name="d")
    model = Custom(inputs, dense(inputs))
    model.compile(fw.optimizer())
    trained = Trained(model, [("d/kernel", dense, 0), ("d/bias", dense, 1)])
    weights = fw.recorder(trained)
    logger = GradientLogger(str(tmp_path), freq="batch")
    fw.fit(model, *small_data(), callbacks=[logger, weights])
    events = read_events(fw, tmp_path)
    assert keys(events) == expected_keys(trained.paths, range(5))
    assert_step_level(events, weights, trained.paths, range(5))


@pytest.mark.skipif(
    not hasattr(tf.keras.optimizers, "legacy")
    or not hasattr(tf.keras.optimizers.legacy.SGD, "get_updates"),
    reason="legacy optimizers came with TensorFlow 2.9 and went with Keras 3",
)
@pytest.mark.parametrize("clipped", [False, True])
def test_legacy_optimizer(fw, tmp_path, clipped):
    optimizer = fw.keras.optimizers.legacy.SGD(0.25, clipvalue=0.01)
    trained = fw.small_model(optimizer)
    weights = fw.recorder(trained)
    logger = GradientLogger(str(tmp_path), freq="batch", clipped=clipped)
    fw.fit(trained.model, *small_data(), callbacks=[logger, weights])
    check_clipped_at(0.01, fw, tmp_path, trained, weights, clipped)


def check_clipped_at(value, fw, log_dir, trained, weights, clipped):
    events = read_events(fw, log_dir)
    assert keys(events) == expected_keys(trained.paths, range(5))
    if clipped:
        assert_step_level(events, weights, trained.paths, range(5))
    else:
        largest = max(e.value.max for e in events if e.tag.endswith("_grad"))
        assert largest > 10 * value


@pytest.mark.skipif(
    not hasattr(getattr(tf.keras.optimizers, "experimental", None), "SGD"),
    reason="the new optimizers were called experimental in TensorFlow 2.9 to 2.15",
)
@pytest.mark.parametrize("clipped", [False, True])
def test_experimental_optimizer(fw, tmp_path, clipped):
    optimizer = fw.keras.optimizers.experimental.SGD(0.25, clipvalue=0.01)
    trained = fw.small_model(optimizer)
    weights = fw.recorder(trained)
    logger = GradientLogger(str(tmp_path), freq="batch", clipped=clipped)
    fw.fit(trained.model, *small_data(), callbacks=[logger, weights])
    check_clipped_at(0.01, fw, tmp_path, trained, weights, clipped)


@pytest.mark.skipif(
    Version(tf.__version__) < Version("2.4"),
    reason="before TF 2.4 `stop_training` lets an epoch go on to its end",
)
def test_an_epoch_cut_short_is_not_approximated(fw, tmp_path):
    """Its last update was not known to be the last, so nothing is logged for it."""
    trained = fw.small_model()

    class Stopper(fw.keras.callbacks.Callback):
        def on_batch_end(self, batch, logs=None):
            if batch == 2:
                trained.model.stop_training = True

    logger = GradientLogger(str(tmp_path))
    with pytest.warns(GradlogWarning) as caught:
        fw.fit(trained.model, *small_data(), epochs=2, callbacks=[Stopper(), logger])
    (message,) = messages_of(caught)
    assert message.startswith(
        "No gradient is logged for epoch 0: it ended on another batch than was "
        "announced"
    )
    assert read_events(fw, tmp_path) == []


def test_a_weight_without_gradient_is_left_out(fw, tmp_path):
    layers = fw.layers
    inputs = layers.Input((4,))
    used, unused = layers.Dense(1, name="used"), layers.Dense(1, name="unused")
    model = fw.keras.models.Model(inputs, [used(inputs), unused(inputs)])
    model.compile(fw.optimizer(), ["mse", lambda y_true, y_pred: 0 * y_true])
    x, y = small_data()
    logger = GradientLogger(str(tmp_path), freq="batch")
    expected = "No gradient reaches these trainable weights, so none is logged for "
    with pytest.warns(GradlogWarning) as caught:
        fw.fit(model, x, [y, y], callbacks=[logger])
    messages = messages_of(caught)
    assert messages == [expected + "them: unused/kernel, unused/bias."]
    events = read_events(fw, tmp_path)
    assert keys(events) == expected_keys(["used/kernel", "used/bias"], range(5))


def test_the_step_is_traced_once(fw, tmp_path):
    """Not again in later fits, not with a new callback, and only then by `compile`."""
    traces = []

    def loss(y_true, y_pred):
        traces.append(1)
        return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)

    trained = fw.linear_model(loss=loss)
    x, y = small_data()

    def fit(number, freq="batch"):
        del traces[:]
        callback = TensorBoard(
            str(tmp_path / str(number)), write_grads=True, grads_freq=freq
        )
        fw.fit(trained.model, x, y, callbacks=[callback])
        return len(traces)

    first = fit(0)
    assert first >= 1
    assert [fit(number) for number in range(1, 4)] == [0, 0, 0]
    trained.model.compile(fw.optimizer(), loss)
    assert fit(5) == first
    events = read_events(fw, tmp_path / "3")
    steps = [event.step for event in events if event.tag == "d/kernel_0_grad"]
    assert steps == list(range(15, 20))


@pytest.mark.skipif(
    Version(tf.__version__) < Version("2.16"), reason="Keras 3.15 has this defect"
)
def test_beside_epoch_scalars_that_keras_drops(fw, tmp_path):
    """Keras 3.15 drops them where `update_freq` does not divide the batches."""
    trained = fw.linear_model()
    callback = TensorBoard(str(tmp_path), write_grads=True, update_freq=4)
    fw.fit(trained.model, *small_data(), epochs=2, callbacks=[callback])
    steps = [
        event.step
        for event in read_events(fw, tmp_path)
        if event.tag == "d/kernel_0_grad"
    ]
    assert steps == [0, 1]


def test_unlogged_steps_read_nothing(fw, tmp_path, monkeypatch):
    """Every read of the host goes through the gate: two due steps, two reads."""
    from legacy_gradlog.engines.gate import Gate

    reads = []
    take = Gate.take

    def counted(gate, *arguments):
        reads.append(gate.name)
        return take(gate, *arguments)

    monkeypatch.setattr(Gate, "take", counted)
    trained = fw.linear_model()
    logger = GradientLogger(str(tmp_path), freq=20)
    fw.fit(trained.model, *small_data(), epochs=8, callbacks=[logger])
    assert reads == ["optimizer"] * 2
    assert np.unique([event.step for event in read_events(fw, tmp_path)]).tolist() == [
        0,
        20,
    ]


def count_calls(model):
    """Returns a list that gets, for each train function of a model, its calls."""
    counts = []

    class Counting(type(model)):
        def make_train_function(self, *arguments, **kwargs):
            number, made = len(counts), self.train_function
            super(Counting, self).make_train_function(*arguments, **kwargs)
            if made is None:
                function = self.train_function
                counts.append(0)

                def count(iterator):
                    counts[number] += 1
                    return function(iterator)

                self.train_function = count
            return self.train_function

    model.__class__ = Counting
    return counts


@pytest.mark.parametrize("name", ["linear", "dropout"])
def test_steps_that_are_not_logged_are_the_models_own(fw, tmp_path, name):
    """Unless each trace has random numbers of its own: then one makes all steps."""
    builders = {"linear": fw.linear_model, "dropout": fw.small_model}
    trained = builders[name]()
    counts = count_calls(trained.model)
    logger = GradientLogger(str(tmp_path), freq=20)
    fw.fit(trained.model, *small_data(), epochs=8, callbacks=[logger])
    alike = name == "linear" or not fw.keeps_random_state_in_functions
    # Of 40 steps those of number 0 and 20 are logged.
    assert counts == ([38, 2] if alike else [0, 40])


def test_a_resumed_run_goes_on(fw, tmp_path):
    """Early optimizers make their counter, and have it restored, when it is asked."""
    first, second = fw.linear_model(), fw.linear_model()
    fw.fit(first.model, *small_data())

    def checkpoint(model):
        return fw.tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    path = checkpoint(first.model).save(str(tmp_path / "saved"))
    checkpoint(second.model).restore(path)
    logger = GradientLogger(str(tmp_path / "logs"), freq=2)
    fw.fit(second.model, *small_data(), callbacks=[logger])
    events = read_events(fw, tmp_path / "logs")
    assert {event.step for event in events} == {6, 8}
