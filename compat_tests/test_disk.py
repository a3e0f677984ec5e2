"""The disk fails while training runs: training goes on, and what is on disk stays.

The faults are real: a limit to the size of files, which makes the kernel refuse to
write as on a full disk, a directory that is deleted, a process that is killed. They
happen in a process of their own, one for all that a line's tests look at.
"""

import json
import signal

import pytest

from .frameworks import run_script, start_script
from .oracle import read_events

HEAD = """
import itertools, json, os, resource, shutil, signal, sys, time, warnings

# A limit to the size of files must not hold for what is told.
os.dup2(1, 2)
import tensorflow as tf

if sys.argv[3] == "graph" and hasattr(tf.compat, "v1"):
    tf.compat.v1.disable_eager_execution()

from compat_tests import conftest, frameworks, oracle
from legacy_gradlog import GradientLogger, TensorBoard

(fw,) = conftest.available(sys.argv[2])
"""

FAULTS = """
SIZE, INFINITY = resource.RLIMIT_FSIZE, resource.RLIM_INFINITY


def sizes(log_dir):
    return [os.path.getsize(p) for ps in frameworks.files_below(log_dir).values()
            for p in ps]


class Fault(fw.keras.callbacks.Callback):
    "Happens between the second and the third of four epochs."

    def __init__(self, kind, log_dir):
        super(Fault, self).__init__()
        self.kind, self.log_dir = kind, log_dir

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and self.kind == "full":
            resource.setrlimit(SIZE, (max(sizes(self.log_dir)), INFINITY))
        elif epoch == 2 and self.kind == "deleted":
            shutil.rmtree(self.log_dir)

    def on_batch_end(self, batch, logs=None):
        # What would go to a writer that somebody left behind as the default one.
        if fw.eager and fw.tf.summary.experimental.write_raw_pb(b"", step=0):
            raise AssertionError("a writer was left behind")


def train(*callbacks):
    fw.clear()
    trained = fw.linear_model()
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fw.fit(trained.model, *frameworks.small_data(), epochs=4,
                   callbacks=list(callbacks))
        except Exception as exception:
            error = type(exception).__name__
    told = conftest.messages_of(caught)
    weights = trained.weights()["d/kernel"].tolist()
    return dict(error=error, told=told, weights=weights)


def logged(log_dir):
    "Returns the steps in each file, the older first, as far as it can be read."
    found = []
    for paths in frameworks.files_below(log_dir).values():
        for path in sorted(paths, key=os.path.getmtime):
            found.append([])
            try:
                for event in fw.v1.train.summary_iterator(path):
                    found[-1] += [event.step for value in event.summary.value
                                  if value.tag == "d/kernel_0_grad"]
            except fw.tf.errors.DataLossError:
                pass
    return found


MAKE = {
    "logger batch": lambda log_dir: GradientLogger(log_dir, freq="batch"),
    "logger epoch": GradientLogger,
    "board batch": lambda log_dir: TensorBoard(
        log_dir, write_grads=True, grads_freq="batch"
    ),
    "stock": frameworks.stock_class(fw),
}


def keep(name, case):
    with open(name + ".json", "w") as file:
        json.dump(case, file)


def run(kind, name):
    log_dir = os.path.join(sys.argv[1], kind, name)
    os.makedirs(log_dir)
    case = train(MAKE[name](log_dir), Fault(kind, log_dir))
    resource.setrlimit(SIZE, (INFINITY, INFINITY))
    case["logged"] = logged(log_dir)
    if name != "stock":
        case["again"] = train(MAKE[name](log_dir))
        case["logged again"] = logged(log_dir)
    keep("{} {}".format(kind, name), case)


# A process for each, since the stock callback leaves a writer behind when it fails.
for case in itertools.product(("full", "deleted"), sorted(MAKE)):
    os.waitpid(frameworks.fork(run, *case), 0)
keep("plain", train())
"""

_results = {}


@pytest.fixture
def results(fw, tmp_path_factory):
    """Returns what became of every case, from one process a framework."""
    if fw.name not in _results:
        log_dir = tmp_path_factory.mktemp("faults")
        run_script(HEAD + FAULTS, log_dir, *arguments_of(fw))
        kept = {path.stem: path.read_text() for path in log_dir.glob("*.json")}
        _results[fw.name] = {name: json.loads(text) for name, text in kept.items()}
    return _results[fw.name]


def arguments_of(fw):
    return fw.name, "eager" if fw.eager else "graph"


@pytest.mark.parametrize("freq", ["batch", "epoch"])
@pytest.mark.parametrize("kind", ["full", "deleted"])
def test_a_logger_gives_up_and_training_goes_on(results, kind, freq):
    case = results["{} logger {}".format(kind, freq)]
    assert (case["error"], case["weights"]) == (None, results["plain"]["weights"])
    assert_told_and_kept(case, kind, freq)


@pytest.mark.parametrize("kind", ["full", "deleted"])
def test_the_stock_callback_fails_as_it_does_alone(results, kind):
    """On TF 2 a full disk stops it, on TF 2.0 a deleted one, at the same update."""
    case, alone = results[kind + " board batch"], results[kind + " stock"]
    assert case["error"] == alone["error"]
    assert case["weights"] == alone["weights"]
    assert_told_and_kept(case, kind, "batch")


def assert_told_and_kept(case, kind, freq):
    """Compares one case with what there must be after two whole epochs of four."""
    (told,) = case["told"]
    assert told.startswith("Gradient logging is switched off for this run, and ")
    before = range(10) if freq == "batch" else range(2)
    flushed = [list(before)] if kind == "full" else []
    assert case["logged"] == flushed
    # There is room again: another fit in this directory writes another file.
    assert case["again"]["told"] == []
    whole = range(20) if freq == "batch" else range(4)
    assert case["logged again"] == flushed + [list(whole)]


KILLED = """
class Kill(fw.keras.callbacks.Callback):
    "Comes in the middle of a long epoch, when all that was logged is on disk."

    def on_batch_end(self, batch, logs=None):
        if batch == 30:
            deadline = time.time() + 20
            while steps("logger") + steps("board") != [0, 20] * 2:
                if time.time() > deadline:
                    sys.exit("on disk: {} {}".format(steps("logger"), steps("board")))
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


def steps(log_dir):
    events = oracle.read_events(fw, log_dir)
    return [event.step for event in events if event.tag == "d/kernel_0_grad"]


trained = fw.linear_model()
board = TensorBoard("board", write_grads=True, grads_freq=20)
logger = GradientLogger("logger", freq=20)
x, y = frameworks.small_data(rows=8 * 40)
fw.fit(trained.model, x, y, callbacks=[board, logger, Kill()])
"""


def test_what_was_logged_survives_a_kill(fw, tmp_path):
    """No later record, no epoch end and no half a minute is needed."""
    child = start_script(HEAD + KILLED, tmp_path, *arguments_of(fw))
    printed = child.communicate()[0].decode()
    assert child.returncode == -signal.SIGKILL, printed
    for name in ("board", "logger"):
        events = read_events(fw, tmp_path / name)
        steps = [event.step for event in events if event.tag == "d/kernel_0_grad"]
        assert steps == [0, 20]
