"""`MultiWorkerMirroredStrategy`: two processes make each step, one of them writes.

The two processes of a line do all of this together, since TensorFlow takes seconds to
start: each case is a model of its own, and a test reads what its case left.
"""

import json

import pytest
import tensorflow as tf
from packaging.version import Version

from . import oracle
from .cluster import run_workers

if Version(tf.__version__) < Version("2.2"):
    pytest.skip(
        "before TF 2.2 strategies of several processes are refused; test_tf20",
        allow_module_level=True,
    )

WORKER = """
import json, os, sys, time, traceback
import numpy as np
import tensorflow as tf
from legacy_gradlog import GradientLogger, TensorBoard, errors

errors.strict = True
worker, name = int(sys.argv[1]), sys.argv[3]
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(4)
newest = getattr(tf.distribute, "MultiWorkerMirroredStrategy", None)
Strategy = newest or tf.distribute.experimental.MultiWorkerMirroredStrategy
strategy = Strategy()
assert strategy.num_replicas_in_sync == 2

from compat_tests import conftest, frameworks

(fw,) = conftest.available(name)

def batches():
    # Of 4 rows each worker takes 2, of data of its own: at w = 0 and x = 1 the mean of
    # (w x - y)^2 over both halves has the gradients -8, -16, -24, ...
    half = [[-0.5, -0.5], [7.5, 9.5]][worker]
    y = np.concatenate([np.array(half) * step for step in range(1, 7)])
    y = y.astype("float32")[:, None]
    data = tf.data.Dataset.from_tensor_slices((np.ones_like(y), y))
    options = tf.data.Options()
    distribute = options.experimental_distribute
    try:
        distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    except AttributeError:
        distribute.auto_shard = False
    return data.batch(4).repeat().with_options(options)

def make(optimizer=None):
    with strategy.scope():
        trained = fw.linear_model(optimizer or fw.optimizer(rate=0.0), inputs=1)
    trained.model.set_weights([np.zeros((1, 1))])
    return trained.model

def fit(model, *callbacks):
    kwargs = dict(epochs=2, steps_per_epoch=3, verbose=0)
    return model.fit(batches(), callbacks=list(callbacks), **kwargs)

def meet(where):
    # One that ends while the other still waits for a part of a step ends both.
    open("%s-%d" % (where, worker), "w").close()
    while not all(os.path.exists("%s-%d" % (where, number)) for number in (0, 1)):
        time.sleep(0.1)

def leave(status):
    # TensorFlow watches the other worker from a thread. Where that is in a call when
    # the interpreter ends, the process aborts.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

def fail(*error):
    traceback.print_exception(*error)
    leave(1)

sys.excepthook = fail

def loggers(log_dir):
    return [
        GradientLogger(log_dir + "/steps", freq=2),
        GradientLogger(log_dir + "/last"),
        GradientLogger(log_dir + "/pool", reduce="pool"),
    ]
"""

CASES = """
result = {}

# Every worker logs.
logger = GradientLogger("latest", freq=1)
board = TensorBoard("board/%d" % worker, write_grads=True, grads_freq="batch")
fit(make(), board, logger, *loggers("both/%d" % worker))
latest = logger.latest["d/kernel"]
result["latest"] = [float(latest.min), latest.step]

# Only one worker logs, then nobody, then the same one again.
for logging in (0, 1):
    model = make()
    ours = loggers("only_%d" % logging) if worker == logging else []
    fit(model, *ours)
    fit(model)
    fit(model, *ours)
    result["only %d" % logging] = int(model.optimizer.iterations.numpy())

# A step that is traced already may be refused, until it is compiled again.
model = make()
fit(model)
try:
    fit(model, GradientLogger("late", freq="batch"))
except errors.UnsupportedError as error:
    result["refused"] = str(error)
result["updates"] = int(model.optimizer.iterations.numpy())
with strategy.scope():
    model.compile(fw.optimizer(rate=0.0), "mse")
fit(model, GradientLogger("compiled_again", freq="batch"))

# The stock callback reads what all workers have a part of.
with strategy.scope():
    trained = fw.small_model()
x, y = frameworks.small_data(8, seed=worker)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).repeat()
board = TensorBoard("norm", histogram_freq=1, write_grads=True)
trained.model.fit(data, epochs=2, steps_per_epoch=2, verbose=0, callbacks=[board])

# The counter of a resumed run is made, and restored, within the first step.
model = make()
fit(model)
saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
path = saved.save("saved/%d/model" % worker)
model = make()
tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path)
fit(model, *([GradientLogger("resumed", freq=4)] if worker == 0 else []))

# Training is what it is without.
def weights_after(*callbacks):
    fw.clear()
    model = make(fw.optimizer("Adam", rate=0.1))
    history = fit(model, *callbacks)
    return [model.get_weights()[0].tolist(), history.history["loss"]]

result["plain"] = [weights_after(), weights_after()]
result["logged"] = weights_after(*loggers("same"))
print("RESULT", json.dumps(result))
meet("end")
leave(0)
"""

ALONE = """
# One worker comes with a logger when the step is traced already; the other trains.
model = make()
fit(model)
print("TRAINED", flush=True)
# Of one that has left already, TF 2.2 waits for the return, unless it is told not to.
os.environ["GRPC_FAIL_FAST"] = "true"
fit(model, *([GradientLogger("late", freq="batch")] if worker == 0 else []))
print("LATE", flush=True)
meet("end")
leave(0)
"""

KERAS_3 = """
# Keras fails before it comes to the callbacks; other releases may come farther.
model = make()
logger = GradientLogger("logs")
for train in (
    lambda: fit(model), lambda: fit(model, logger), lambda: logger.set_model(model)
):
    try:
        train()
    except Exception as error:
        print("FAILED", type(error).__name__, str(error).split("\\n")[0], flush=True)
"""

early = pytest.mark.skipif(
    Version(tf.__version__) >= Version("2.5"),
    reason="since TF 2.5 a worker may trace its step when it likes",
)
late = pytest.mark.skipif(
    Version(tf.__version__) < Version("2.5"),
    reason="before TF 2.5 all workers must trace a step at the same times",
)

_runs = {}


def run(fw, tmp_path_factory):
    """Returns the log directory and the result of each worker, from one run a line."""
    if not fw.eager:
        pytest.skip("strategies are logged in eager mode only")
    if fw.is_keras_3:
        pytest.skip("Keras 3 cannot train under this strategy; refused")
    if fw.name not in _runs:
        log_dir = tmp_path_factory.mktemp("workers")
        _runs[fw.name] = log_dir, run_workers(WORKER + CASES, log_dir, fw.name)
    log_dir, children = _runs[fw.name]
    results = []
    for status, text in children:
        assert status == 0, text
        (line,) = [x for x in text.split("\n") if x.startswith("RESULT ")]
        results.append(json.loads(line[len("RESULT ") :]))
    return log_dir, results


def histograms(fw, log_dir):
    """Returns (step, count, min, max) of every histogram of the one weight."""
    events = oracle.read_events(fw, log_dir)
    found = [e for e in events if e.tag == "d/kernel_0_grad"]
    return [(e.step, e.value.num, e.value.min, e.value.max) for e in found]


def test_the_number_is_the_global_one(fw, tmp_path_factory):
    log_dir, _ = run(fw, tmp_path_factory)
    steps = histograms(fw, log_dir / "both" / "0" / "steps")
    assert steps == [(step, 1, -8 * (step + 1), -8 * (step + 1)) for step in (0, 2, 4)]
    last = histograms(fw, log_dir / "both" / "0" / "last")
    assert last == [(0, 1, -24, -24), (1, 1, -48, -48)]
    pool = histograms(fw, log_dir / "both" / "0" / "pool")
    assert pool == [(0, 3, -24, -8), (1, 3, -48, -32)]


def test_only_the_chief_writes(fw, tmp_path_factory):
    log_dir, results = run(fw, tmp_path_factory)
    for name in ("both", "board"):
        assert (log_dir / name / "0").is_dir()
        assert not (log_dir / name / "1").exists()
    # The other one has the numbers all the same.
    assert [result["latest"] for result in results] == [[-48.0, 5]] * 2


def test_the_stock_callback_shares_its_file(fw, tmp_path_factory):
    log_dir, _ = run(fw, tmp_path_factory)
    steps = histograms(fw, log_dir / "board" / "0")
    assert [(step, smallest) for step, _, smallest, _ in steps] == [
        (step, -8 * (step + 1)) for step in range(6)
    ]
    runs = {e.run for e in oracle.read_events(fw, log_dir / "board" / "0")}
    assert runs == {"train"}


def test_a_worker_without_the_callback_is_harmless(fw, tmp_path_factory):
    log_dir, results = run(fw, tmp_path_factory)
    assert [result["only 0"] for result in results] == [18, 18]
    assert [result["only 1"] for result in results] == [18, 18]
    steps = histograms(fw, log_dir / "only_0" / "steps")
    # The data starts over with every fit, and the second one logs nothing.
    expected = [0, 2, 4, 12, 14, 16]
    assert [(step, smallest) for step, _, smallest, _ in steps] == [
        (step, -8 * (step % 6 + 1)) for step in expected
    ]
    last = histograms(fw, log_dir / "only_0" / "last")
    assert last == [(epoch, 1, v, v) for epoch, v in enumerate([-24, -48] * 2)]
    # Logging on a worker that does not write leaves nothing.
    assert not (log_dir / "only_1").exists()


@early
def test_a_step_that_is_traced_already_is_refused(fw, tmp_path_factory):
    log_dir, results = run(fw, tmp_path_factory)
    for result in results:
        assert "first `fit` after `compile`" in result["refused"]
        assert result["updates"] == 6
    assert not (log_dir / "late").exists()


@late
def test_a_step_that_is_traced_already_is_traced_again(fw, tmp_path_factory):
    log_dir, results = run(fw, tmp_path_factory)
    assert [result["updates"] for result in results] == [12, 12]
    assert_late(fw, log_dir)


def assert_late(fw, log_dir):
    steps = histograms(fw, log_dir / "late")
    assert [(step, smallest) for step, _, smallest, _ in steps] == [
        (step, -8 * (step % 6 + 1)) for step in range(6, 12)
    ]


def test_a_model_that_is_compiled_again(fw, tmp_path_factory):
    log_dir, _ = run(fw, tmp_path_factory)
    again = histograms(fw, log_dir / "compiled_again")
    assert [(step, smallest) for step, _, smallest, _ in again] == [
        (step, -8 * (step + 1)) for step in range(6)
    ]


def test_statistics_that_all_workers_have_a_part_of(fw, tmp_path_factory):
    """The stock callback reads BatchNormalization's, which all workers must do."""
    log_dir, _ = run(fw, tmp_path_factory)
    events = oracle.read_events(fw, log_dir / "norm")
    assert {e.step for e in events if e.tag == "bn/gamma_0_grad"} == {0, 1}
    assert [e for e in events if "moving_mean" in e.tag]
    assert sorted(path.name for path in (log_dir / "norm").iterdir()) == ["train"]


def test_a_resumed_run_goes_on(fw, tmp_path_factory):
    log_dir, _ = run(fw, tmp_path_factory)
    steps = histograms(fw, log_dir / "resumed")
    assert steps == [(8, 1, -24, -24)]


def test_training_is_bit_identical(fw, tmp_path_factory):
    _, results = run(fw, tmp_path_factory)
    for result in results:
        assert result["plain"][0] == result["plain"][1]
        assert result["logged"] == result["plain"][0]


@early
def test_one_worker_that_is_refused_leaves_none_waiting(fw, tmp_path):
    if not fw.eager or fw.is_keras_3:
        pytest.skip("refused, or not logged at all")
    children = run_workers(WORKER + ALONE, tmp_path, fw.name)
    for status, text in children:
        assert "TRAINED" in text and status > 0, text
    assert "UnsupportedError" in children[0][1]


@late
def test_one_worker_that_traces_again_leaves_none_waiting(fw, tmp_path):
    if not fw.eager or fw.is_keras_3:
        pytest.skip("refused, or not logged at all")
    for status, text in run_workers(WORKER + ALONE, tmp_path, fw.name):
        assert "LATE" in text and status == 0, text
    assert_late(fw, tmp_path)


def test_keras_3_cannot_train_with_workers(fw, tmp_path):
    if not fw.is_keras_3:
        pytest.skip("only Keras 3 fails")
    for status, text in run_workers(WORKER + KERAS_3, tmp_path, fw.name):
        plain, logged, ours = [x for x in text.split("\n") if x.startswith("FAILED ")]
        assert plain.startswith("FAILED ValueError") and "PerReplica" in plain
        assert logged == plain
        assert ours.startswith("FAILED UnsupportedError The strategy must be one that")
    assert not (tmp_path / "logs").exists()
