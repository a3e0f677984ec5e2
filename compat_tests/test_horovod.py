"""Horovod: two real processes, unequal data, and one gradient, the reduced one.

Each case starts two workers with `horovodrun` and kills them if they hang.
"""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

from .frameworks import files_below, run_script
from .oracle import read_events

if importlib.util.find_spec("horovod") is None:
    pytest.skip(
        "Horovod is installed in an environment of its own only",
        allow_module_level=True,
    )

SECONDS = 240

TWO_WORKERS = """
import importlib
import os
import sys
import numpy as np
import tensorflow as tf
from compat_tests import conftest, frameworks, oracle
from legacy_gradlog import GradientLogger, TensorBoard, errors

errors.strict = True
(fw,) = conftest.available(sys.argv[1])
hvd = importlib.import_module(
    "horovod.keras" if fw.name == "keras" else "horovod.tensorflow.keras"
)
hvd.init()
assert hvd.size() == 2
rank = hvd.rank()
logs = rank == 0 or sys.argv[2:3] != ["first"]
fw.clear()


def merge_nothing():
    # Where equal operations are merged, one more collective may wait for nobody.
    config = tf.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = -1
    fw.keras.backend.set_session(tf.Session(config=config))


def mean_model(wrapped=None, inputs=2, **kwargs):
    # The gradient is the mean of the inputs, whatever the weights are.
    return fw.linear_model(
        wrapped or hvd.DistributedOptimizer(fw.optimizer(**kwargs)),
        inputs=inputs,
        loss=lambda y_true, y_pred: y_pred,
    )


def mean_data(rows=8):
    # Means of the inputs: 3 and -4 on the first worker, 1 and 2 on the second.
    x = np.ones((rows, 2), "float32") * ([[3.0, -4.0]] if rank == 0 else [[1.0, 2.0]])
    return x, np.zeros((rows, 1), "float32")


def steps_of(log_dir, tag="d/kernel_0_grad"):
    events = oracle.read_events(fw, log_dir)
    found = [(e.step, e.value.min, e.value.max) for e in events if e.tag == tag]
    return sorted(found)
"""


def run_workers(script, fw, directory, *arguments):
    """Runs a script as two workers and returns what they printed."""
    status, output = start_workers(script, fw, directory, *arguments)
    assert status == 0, output
    assert output.count("all compared") == 2, output
    return output


def start_workers(script, fw, directory, *arguments):
    """Runs a script as two workers; returns the exit status and what they printed."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = str(directory / "worker.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(TWO_WORKERS + textwrap.dedent(script))
    launcher = os.path.join(os.path.dirname(sys.executable), "horovodrun")
    command = [launcher, "-np", "2", "--gloo", "-H", "localhost:2", sys.executable]
    python_path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    launched = subprocess.Popen(
        command + [path, fw.name] + list(arguments),
        cwd=str(directory),
        env=dict(os.environ, PYTHONPATH=python_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output = launched.communicate(timeout=SECONDS)[0].decode()
    except subprocess.TimeoutExpired:
        # It ends its workers when it is asked to, and they end when it is gone.
        launched.terminate()
        try:
            output = launched.communicate(timeout=30)[0].decode()
        except subprocess.TimeoutExpired:
            launched.kill()
            output = launched.communicate()[0].decode()
        pytest.fail("The workers hang.\n" + output)
    return launched.returncode, output


@pytest.fixture(params=["first", "all"])
def which(request):
    """Where the callback is: on the first worker only, or on all of them."""
    return request.param


def test_by_hand(fw, tmp_path, which):
    """Mean of ``x * w``: the gradient is the mean of both workers' inputs, (2, -1)."""
    script = """
    merge_nothing()
    trained = mean_model()
    x, y = mean_data()
    weights = fw.recorder(trained)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), weights]
    loggers = []
    if logs:
        loggers = [GradientLogger("steps", freq="batch"), GradientLogger("epochs")]
        loggers.append(TensorBoard("board", write_grads=True, grads_freq=2))
    fw.fit(trained.model, x, y, batch_size=2, epochs=2, callbacks=loggers + callbacks)
    for gradient in oracle.updates_of(weights, "d/kernel"):
        np.testing.assert_allclose(gradient.values, [2.0, -1.0], atol=1e-5)
    for logger in loggers:
        record = logger.latest["d/kernel"]
        assert (record.min, record.max, record.count) == (-1.0, 2.0, 2)
    if rank == 0:
        assert steps_of("steps") == [(step, -1.0, 2.0) for step in range(8)]
        assert steps_of("epochs") == [(0, -1.0, 2.0), (1, -1.0, 2.0)]
        assert steps_of("board") == [(step, -1.0, 2.0) for step in (0, 2, 4, 6)]

    # Workers find each other's operations by name, so no name may depend on a logger.
    native = importlib.import_module("horovod.tensorflow")
    total = native.allreduce(tf.cast(tf.constant(rank), tf.float32), op=native.Sum)
    assert fw.v1.keras.backend.get_session().run(total) == 1.0
    print("all compared")
    """
    run_workers(script, fw, tmp_path, which)


def test_everything_in_one_model(fw, tmp_path, which):
    """Dropout, BatchNormalization, shared and nested layers, an embedding."""
    script = """
    trained = fw.rich_model(hvd.DistributedOptimizer(fw.optimizer()))
    data = [frameworks.rich_data(seed=seed) for seed in range(2)]
    x, y, sample_weight = data[rank]
    weights = fw.recorder(trained)
    loggers = []
    if logs:
        loggers = [
            GradientLogger("steps", freq=2),
            GradientLogger("pool", reduce="pool"),
            TensorBoard("board", write_grads=True),
        ]
    fw.fit(trained.model, x, y, sample_weight=sample_weight, epochs=2,
           callbacks=loggers + [weights])
    batches = range(0, 40, frameworks.BATCH)
    ids = [
        np.concatenate([d[0][0][i : i + frameworks.BATCH] for d in data])
        for i in batches
    ] * 2
    rows = {"embedding/embeddings": [np.unique(batch) for batch in ids]}
    if rank == 0:
        events = oracle.read_events(fw, "steps")
        expected = oracle.expected_keys(trained.paths, range(0, 10, 2))
        assert oracle.keys(events) == expected
        oracle.assert_step_level(events, weights, trained.paths, range(0, 10, 2), rows)
        for run, first in ("pool", 0), ("board", 4):
            events = oracle.gradient_events(oracle.read_events(fw, run))
            assert oracle.keys(events) == oracle.expected_keys(trained.paths, range(2))
            for path in trained.paths:
                updates = oracle.updates_of(weights, path, rows.get(path))
                for epoch in range(2):
                    wanted = updates[5 * epoch + first : 5 * epoch + 5]
                    (histogram,) = [
                        e.value for e in events
                        if (e.tag, e.step) == (path + "_0_grad", epoch)
                    ]
                    oracle.assert_histogram(histogram, oracle.Gradient.pooled(wanted))
    print("all compared")
    """
    run_workers(script, fw, tmp_path, which)


def test_the_other_worker_writes_nothing(fw, tmp_path):
    """No directory, no file, neither ours nor the stock callback's."""
    script = """
    trained = mean_model()
    x, y = mean_data()
    name = "worker-{}".format(rank)
    loggers = [
        GradientLogger(name + "/gradients", freq="batch"),
        TensorBoard(name + "/board", histogram_freq=1, write_grads=True),
    ]
    fw.fit(trained.model, x, y, epochs=2, validation_data=(x, y), callbacks=loggers)
    for logger in loggers:
        assert logger.latest["d/kernel"].max == 2.0
    print("all compared")
    """
    run_workers(script, fw, tmp_path)
    found = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert [name for name in found if name.startswith("worker-")] == ["worker-0"]
    runs = sorted(path.name for path in (tmp_path / "worker-0").iterdir())
    assert runs == ["board", "gradients"]


OPTIMIZERS = """
named = [("SGD", dict(momentum=0.5, nesterov=True)), ("Adam", {}), ("RMSprop", {}),
         ("Adagrad", {}), ("Adadelta", {}), ("Adamax", {}), ("Nadam", {}),
         ("SGD", dict(decay=0.1))]
wrappers = [
    lambda name=name, kwargs=kwargs: hvd.DistributedOptimizer(
        fw.optimizer(name, **kwargs)
    )
    for name, kwargs in named
]
wrappers += [
    lambda kwargs=kwargs: hvd.DistributedOptimizer(fw.optimizer(), **kwargs)
    for kwargs in (
        dict(compression=hvd.Compression.fp16), dict(name="Other"),
        dict(gradient_predivide_factor=2.0), dict(sparse_as_dense=True),
    )
]
native = importlib.import_module("horovod.tensorflow")
wrappers.append(
    lambda: native.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.25))
)
"""


def test_every_optimizer_and_option(fw, tmp_path):
    """The gradient is 2 and -1 in every step, whatever the update makes of it."""
    script = (
        OPTIMIZERS
        + """
x, y = mean_data()
for number, wrap in enumerate(wrappers):
    fw.clear()
    trained = mean_model(wrap())
    logger = GradientLogger("run-{}".format(number), freq="batch")
    callbacks = [logger] if rank == 0 else []
    fw.fit(trained.model, x, y, batch_size=4, epochs=1, callbacks=callbacks)
    if rank == 0:
        expected = [(0, -1.0, 2.0), (1, -1.0, 2.0)]
        assert steps_of("run-{}".format(number)) == expected, number

fw.clear()
trained = mean_model(hvd.DistributedOptimizer(fw.optimizer(), op=hvd.Sum))
logger = GradientLogger("sum", freq="batch")
fw.fit(trained.model, x, y, callbacks=[logger] if rank == 0 else [])
if rank == 0:
    assert steps_of("sum") == [(0, -2.0, 4.0)]

# Reduced in groups, which Horovod itself gets wrong where one gradient is a group.
fw.clear()
model = fw.keras.models.Sequential([fw.layers.Dense(1, input_shape=(2,), name="d")])
model.compile(
    hvd.DistributedOptimizer(fw.optimizer(), groups=1), lambda y_true, y_pred: y_pred
)
logger = GradientLogger("groups", freq="batch")
fw.fit(model, x, y, callbacks=[logger] if rank == 0 else [])
if rank == 0:
    assert steps_of("groups") == [(0, -1.0, 2.0)]
    assert steps_of("groups", "d/bias_0_grad") == [(0, 1.0, 1.0)]
print("all compared")
"""
    )
    run_workers(script, fw, tmp_path)


def test_sparse_gradients(fw, tmp_path):
    """Rows of both workers, equal ones summed, whatever the optimizer makes of them.

    The first worker looks up rows 0, 0, 1 and the second 1, 2, 2; the loss is the mean
    of what they hold. A third of an eighth of a row's gradient is 1/6.
    """
    script = """
    def train(name="SGD", **kwargs):
        fw.clear()
        layers = fw.layers
        wrapped = hvd.DistributedOptimizer(fw.optimizer(name), **kwargs)
        model = fw.keras.models.Sequential([
            layers.Embedding(5, 1, name="e", input_length=3),
            layers.Flatten(),
        ])
        model.compile(wrapped, lambda y_true, y_pred: y_pred)
        ids = np.array([[0, 0, 1] if rank == 0 else [1, 2, 2]] * 8)
        logger = GradientLogger("sparse")
        fw.fit(model, ids, np.zeros((8, 3)), callbacks=[logger] if rank == 0 else [])
        return logger.latest.get("e/embeddings")

    third = 1 / 3
    for name in ("SGD", "Adam", "RMSprop", "Adagrad"):
        record = train(name)
        if rank == 0:
            assert record.count == 3, (name, record)
            np.testing.assert_allclose([record.min, record.max], third, rtol=1e-6)
    record = train(sparse_as_dense=True)
    if rank == 0:
        assert (record.count, record.min) == (5, 0.0), record
        np.testing.assert_allclose(record.sum, 1.0, rtol=1e-6)
    print("all compared")
    """
    run_workers(script, fw, tmp_path)


def test_clipping(fw, tmp_path):
    """Each worker clips first: (2.5, -2.5) and (1, 2) make (1.75, -0.25).

    The reduced gradient before clipping exists nowhere.
    """
    script = """
    x, y = mean_data()
    trained = mean_model(clipvalue=2.5)
    weights = fw.recorder(trained)
    loggers = [GradientLogger("clipped", freq="batch", clipped=True)]
    callbacks = loggers + [weights] if rank == 0 else [weights]
    fw.fit(trained.model, x, y, epochs=2, callbacks=callbacks)
    for gradient in oracle.updates_of(weights, "d/kernel"):
        np.testing.assert_allclose(gradient.values, [1.75, -0.25], atol=1e-5)
    if rank == 0:
        assert steps_of("clipped") == [(0, -0.25, 1.75), (1, -0.25, 1.75)]

    before = trained.weights()["d/kernel"]
    try:
        fw.fit(trained.model, x, y, callbacks=[GradientLogger("refused")])
    except errors.UnsupportedError as error:
        assert "clips before that. Received: `clipped=False`" in str(error), error
    else:
        raise AssertionError("not refused")
    np.testing.assert_array_equal(trained.weights()["d/kernel"], before)
    assert not os.path.exists("refused")
    print("all compared")
    """
    run_workers(script, fw, tmp_path)


def test_unequal_validation_data(fw, tmp_path, which):
    """No worker waits for a validation batch that the other does not have."""
    script = """
    trained = mean_model()
    x, y = mean_data()
    validation = mean_data(24 if rank == 0 else 8)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    if logs:
        board = dict(histogram_freq=1, write_grads=True)
        callbacks.append(TensorBoard("board", **board))
    fw.fit(trained.model, x, y, epochs=3, validation_data=validation,
           callbacks=callbacks)
    if rank == 0:
        assert steps_of("board") == [(epoch, -1.0, 2.0) for epoch in range(3)]
        assert len(steps_of("board", "d/kernel_0")) >= 3
    print("all compared")
    """
    run_workers(script, fw, tmp_path, which)


def test_training_is_bit_identical(fw, tmp_path):
    """One worker logs; what is built later in the same graph trains as it would."""
    script = """
    def train(logger):
        fw.clear()
        np.random.seed(1)
        values = []
        for make in (fw.small_model, fw.rich_model):
            wrapped = hvd.DistributedOptimizer(fw.optimizer("Adam", rate=0.01))
            model = make(wrapped).model
            random = np.random.RandomState(5)
            model.set_weights(
                [random.uniform(0.1, 1.0, w.shape) for w in model.get_weights()]
            )
            data = [frameworks.small_data, frameworks.rich_data][len(values) > 0]
            x, y = data(seed=rank)[:2]
            history = fw.fit(model, x, y, epochs=2,
                             callbacks=[logger] if logger and rank == 0 else [])
            values += model.get_weights() + [np.array(history.history["loss"])]
        return values

    plain, again = train(None), train(None)
    ours = train(GradientLogger("logs", freq=2))
    # The numbers of operations are the seeds of a dropout that is built later.
    for first, second, third in zip(plain[:9], again, ours):
        np.testing.assert_array_equal(first, second, "two plain runs differ")
        np.testing.assert_array_equal(first, third)
    assert len(ours) > 20
    print("all compared")
    """
    run_workers(script, fw, tmp_path)


def test_a_new_train_function_has_new_reductions(fw, tmp_path):
    """To fetch those of the first one would be a collective of one worker alone."""
    script = """
    merge_nothing()
    trained = mean_model()
    x, y = mean_data()
    for fit in range(2):
        logger = GradientLogger("fit-{}".format(fit), freq="batch")
        fw.fit(trained.model, x, y, callbacks=[logger] if rank == 0 else [])
        trained.model.train_function = None
        if rank == 0:
            (values,) = steps_of("fit-{}".format(fit))
            assert values[1:] == (-1.0, 2.0)
    print("all compared")
    """
    run_workers(script, fw, tmp_path)


def test_what_is_refused(fw, tmp_path):
    """Where no reduction of the step is the gradient of a weight, before the first."""
    script = """
    def refuse(trained, received, **kwargs):
        logger = GradientLogger("refused", **kwargs)
        try:
            fw.fit(trained.model, *mean_data(), callbacks=[logger])
        except errors.UnsupportedError as error:
            assert "Under Horovod" in str(error), error
            assert "Received: " + received + " for d/kernel" in str(error), error
        else:
            raise AssertionError("not refused")
        fw.clear()

    def wrapped(reduce=None, **kwargs):
        optimizer = hvd.DistributedOptimizer(fw.optimizer(), **kwargs)
        if reduce is not None:
            original = optimizer._allreduce
            optimizer._allreduce = lambda *args: reduce(original, *args)
        return optimizer

    # A collective in the loss, whose gradient has one more, and a plain optimizer.
    native = importlib.import_module("horovod.tensorflow")
    loss = lambda y_true, y_pred: native.allreduce(y_pred)
    unreduced = "an update that no reduction leads to"
    refuse(fw.linear_model(inputs=2, loss=loss), unreduced)

    optimizer = wrapped()
    trained = mean_model(optimizer)
    for variable in trained.model.trainable_weights:
        optimizer.register_local_var(variable)
    refuse(trained, unreduced)

    def now_and_then(reduce, gradients, variables):
        always = tf.constant(True)
        reduced = tf.cond(
            always, lambda: reduce(gradients, variables)[0], lambda: gradients[0]
        )
        return [reduced]

    refuse(mean_model(wrapped(now_and_then)), "a reduction that not every step runs")

    def mixed(reduce, gradients, variables):
        (gradient,) = reduce(gradients, variables)
        (other,) = reduce(gradients, variables)
        return [gradient + other]

    received = "an update that 2 tensors of reductions lead to"
    refuse(mean_model(wrapped(mixed)), received)

    if fw.name == "keras":
        # Horovod takes one number of a group of one gradient.
        received = "a reduction of shape (1,) for a weight of shape (2, 1)"
        refuse(mean_model(wrapped(groups=1)), received)
    else:
        received = "no update outside of a condition"
        refuse(mean_model(wrapped(backward_passes_per_step=2)), received)
    assert not os.path.exists("refused")
    print("all compared")
    """
    run_workers(script, fw, tmp_path)


def test_a_worker_dies(fw, tmp_path):
    """The other one ends as it does without us; what it has logged is there."""
    script = """
    import signal
    import time

    class Death(fw.keras.callbacks.Callback):
        batches = 0

        def on_batch_end(self, batch, logs=None):
            Death.batches += 1
            if Death.batches == 5:
                print("five batches")
                sys.stdout.flush()
                if rank == 1:
                    time.sleep(2)
                    os.kill(os.getpid(), signal.SIGKILL)

    logger = GradientLogger("logs", freq="batch")
    callbacks = [logger, Death()]
    fw.fit(mean_model().model, *mean_data(24), epochs=9, callbacks=callbacks)
    print("all compared")
    """
    status, output = start_workers(script, fw, tmp_path)
    assert status != 0 and "all compared" not in output, output
    assert output.count("five batches") == 2, output
    events = read_events(fw, tmp_path / "logs")
    kernels = [e for e in events if e.tag == "d/kernel_0_grad"]
    found = [(e.step, e.value.min, e.value.max) for e in kernels]
    assert found == [(step, -1.0, 2.0) for step in range(5)]


def test_one_process_alone(fw, tmp_path):
    """Horovod imported and not initialized: it writes, as if there were none."""
    script = """
    import sys
    import horovod.tensorflow
    import numpy as np
    from compat_tests import conftest
    from legacy_gradlog import GradientLogger, errors

    errors.strict = True
    (fw,) = conftest.available(sys.argv[2])
    trained = fw.linear_model(inputs=2)
    logger = GradientLogger("logs")
    fw.fit(trained.model, np.ones((8, 2)), np.zeros((8, 1)), callbacks=[logger])
    assert logger.latest["d/kernel"].min == 4.0
    print("alone")
    """
    assert run_script(script, tmp_path, fw.name).endswith("alone\n")
    assert list(files_below(tmp_path)) == ["logs"]
