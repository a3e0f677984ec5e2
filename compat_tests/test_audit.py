"""``audit``: no false alarm on what this package logs, no miss on what stock Keras did.

The logs are written by real trainings, of the stock callback of each Keras that had
``write_grads``, and by TensorFlow's own writer for what no Keras here would write.
"""

import json
import re
import sys
from subprocess import PIPE, Popen

import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import audit, series
from legacy_gradlog.__main__ import main

from .frameworks import run_script
from .test_events import V1, flipped, write_records

CLEAN_RUNS = """
import sys
import numpy as np
from compat_tests import conftest, frameworks
from legacy_gradlog import GradientLogger, TensorBoard

fw = conftest.available()[0]
fw.begin()
step_level = dict(freq=1, scalars=("norm",))
stock = dict(write_grads=True, grads_freq="epoch", grads_scalars=("norm",))
set_rate = fw.keras.callbacks.LearningRateScheduler(
    lambda epoch: 0.6 if 1 < epoch < 4 else 0.05
)
x, y = frameworks.small_data(64)

def fit(trained, log_dir, begin, callbacks, x=x, y=y, **kwargs):
    trained.model.set_weights(begin)
    kwargs.setdefault("shuffle", True)
    trained.model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks, **kwargs)

kinds = {
    "steps": fw.linear_model(fw.optimizer(rate=0.02)),
    "epochs": fw.small_model(fw.optimizer(rate=0.02)),
    "dropout": fw.small_model(fw.optimizer("Adam", rate=0.01)),
    "exploding": fw.linear_model(fw.optimizer(rate=0.02)),
}
for kind, trained in sorted(kinds.items()):
    shapes = [weight.shape for weight in trained.model.get_weights()]
    for seed in range(10):
        random = np.random.RandomState(seed)
        np.random.seed(seed)
        # Variances of BatchNormalization are weights too, and never negative.
        begin = [np.abs(random.randn(*shape)) for shape in shapes]
        log_dir = "clean/{}-{}".format(kind, seed)
        if kind == "epochs":
            callbacks = [TensorBoard(log_dir, 0, **stock)]
        else:
            callbacks = [GradientLogger(log_dir, **step_level)]
        if kind == "exploding":
            callbacks.append(set_rate)
        fit(trained, log_dir, begin, callbacks, epochs=8)

# What is real, though it looks strange.

def log(name, callbacks=(), **kwargs):
    trained = fw.linear_model(fw.optimizer(rate=0.01))
    logger = GradientLogger("strange/" + name, **step_level)
    callbacks = [logger] + [make(trained.model) for make in callbacks]
    fit(trained, None, [np.zeros((4, 1))], callbacks, **kwargs)

class Broken(fw.keras.callbacks.Callback):
    def __init__(self, trained):
        super().__init__()
        self.trained = trained

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            self.trained.set_weights([np.full((4, 1), np.nan)])

signs = np.where(np.arange(33) % 2, 20.0, -20.0)[:, None] + np.random.randn(33, 1)
log("short-last-batch", x=np.ones((33, 4)), y=signs, epochs=4, shuffle=False)
log("nonfinite", [Broken], epochs=3)
log("restart", epochs=4)
log("restart", epochs=2)
"""

STOCK_RUNS = """
import importlib
import sys
import numpy as np
import tensorflow as tf

def train(keras, log_dir, samples, batch_size=10):
    keras.backend.clear_session()
    np.random.seed(1)
    tf.set_random_seed(1)
    layers = keras.layers
    stack = [layers.Dense(3, activation="tanh", input_shape=(4,)), layers.Dense(1)]
    model = keras.models.Sequential(stack)
    model.compile(keras.optimizers.SGD(lr=1e-4), "mse")
    random = np.random.RandomState(0)
    x = random.randn(samples, 4)
    # A mean over few samples is far from zero.
    y = np.where(np.arange(samples) % 2, 20.0, -20.0)[:, None]
    logger = keras.callbacks.TensorBoard(
        log_dir, histogram_freq=1, batch_size=10, write_grads=True
    )
    model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=6,
        verbose=0,
        validation_data=(x, y),
        callbacks=[logger],
    )

for name in ("keras", "tensorflow.keras"):
    keras = tf.keras if name == "tensorflow.keras" else importlib.import_module(name)
    for samples in (41, 40, 8):
        train(keras, "{}/{}".format(name.replace("sorflow", "sor"), samples), samples)
    train(keras, "other batch_size/" + name, 40, batch_size=8)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Logs of this package: ``clean/kind-seed``, and ``strange`` ones."""
    folder = tmp_path_factory.mktemp("ours")
    run_script(CLEAN_RUNS, folder)
    return folder


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Logs of the stock callbacks of both Kerases."""
    folder = tmp_path_factory.mktemp("stock")
    run_script(STOCK_RUNS, folder)
    return folder


def examine(folder):
    """Returns {run: findings}."""
    return audit.examine(series.read(str(folder)))


def kinds_of(findings):
    return sorted({finding.kind for finding in findings})


def test_no_false_alarm(trained, capsys):
    found = examine(trained / "clean")
    assert len(found) == 40
    assert {run: f for run, f in found.items() if f} == {}
    assert main(["audit", str(trained / "clean")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 40 and all(line.endswith(": clean") for line in lines)


def test_clean_runs_are_long_enough_to_tell(trained):
    """A spike put into any of them is found, so their silence means something."""
    for name, run in series.read(str(trained / "clean")).runs.items():
        if not name.startswith("epochs"):
            for gradient in run.gradients().values():
                norms = series.norms(gradient)
                assert len(norms) == 64
                norms[7::8] = 1000 * norms.max()
                spikes = audit.find_spikes(norms)
                assert (spikes.period, spikes.first % 8, spikes.number) == (8, 7, 8)


def test_a_short_last_batch_is_real(trained, capsys):
    [finding] = examine(trained / "strange")["short-last-batch"]
    assert (finding.kind, finding.real) == ("periodic-spike", True)
    assert finding.tags == ("d/kernel_0_grad",)
    assert "Every 5th record is a spike, 4 times from record 4 (step 4) on" in (
        finding.explanation
    )
    assert "an epoch of that many steps" in finding.explanation
    assert main(["audit", str(trained / "strange" / "short-last-batch")]) == 0
    assert "note (periodic-spike)" in capsys.readouterr().out


def test_a_restart_is_told(trained):
    [finding] = examine(trained / "strange")["restart"]
    assert (finding.kind, finding.real) == ("steps-back", False)
    assert "The steps go back 1 time, first from 31 to 0." in finding.explanation
    assert "A training was started again" in finding.explanation


def test_a_diverged_training_is_told(trained, capsys):
    found = examine(trained / "strange")["nonfinite"]
    assert kinds_of(found) == ["empty", "nonfinite"]
    [finding] = [f for f in found if f.kind == "nonfinite"]
    # 8 steps an epoch; the weights are NaN from the third epoch on.
    text = "NaN or infinite, at 8 steps, first at step 16, last at step 23."
    assert text in finding.explanation
    assert main(["audit", "--json", str(trained / "strange")]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["exit"] == 1 and told["skipped"] == []
    assert {run["run"]: run["verdict"] for run in told["runs"]} == {
        "nonfinite": "findings",
        "restart": "findings",
        "short-last-batch": "clean",
    }
    [run] = [run for run in told["runs"] if run["run"] == "restart"]
    assert [finding["kind"] for finding in run["findings"]] == ["steps-back"]


@pytest.mark.skipif(
    Version(tf.__version__) >= Version("2.0"), reason="its Keras writes no gradients"
)
class TestStock:
    """Slices of validation data, of both Kerases of the line."""

    @pytest.mark.parametrize("name", ["keras", "tensor.keras"])
    @pytest.mark.parametrize(
        "samples, sizes, told",
        [
            (
                41,
                [10, 10, 10, 10, 1],
                "5 records an epoch = ceil(41 validation samples",
            ),
            (40, [10, 10, 10, 10], "batch_size 10), all slices full"),
            (8, [8], "the one slice has all 8 validation samples"),
        ],
    )
    def test_no_miss(self, stock, name, samples, sizes, told):
        log = series.read(str(stock / name / str(samples)))
        slices = audit.find_slices(log.runs["."])
        assert (slices.number, slices.sizes) == (len(sizes), sizes)
        found = {f.kind: f for f in audit.examine(log)["."]}
        finding = found["validation-slices"]
        assert not finding.real and told in finding.explanation
        assert sorted(finding.tags) == sorted(log.runs["."].gradients())
        assert len(finding.tags) == 4

    @pytest.mark.parametrize("name", ["keras", "tensor.keras"])
    def test_the_spike_of_the_last_slice(self, stock, name):
        found = examine(stock / name / "41")["."]
        spikes = [f for f in found if f.kind == "periodic-spike"]
        [finding] = [f for f in spikes if any("bias" in tag for tag in f.tags)]
        assert not finding.real
        # Shuffled validation data may leave one of the six out.
        pattern = r"Every 5th record is a spike, [56] times from record [49] "
        assert re.match(pattern, finding.explanation)
        assert "the last slice has 41 % 10 = 1 samples" in finding.explanation

    def test_several_records_at_a_step(self, stock):
        [finding] = [
            f for f in examine(stock / "keras/41")["."] if f.kind == "several-records"
        ]
        assert "at 6 steps: 5 a step" in finding.explanation
        assert "slices of the validation data" in finding.explanation

    def test_another_batch_size(self, stock, capsys):
        """That of the callback is 10, that of ``fit`` 8."""
        log = series.read(str(stock / "other batch_size"))
        sizes = {name: audit.find_slices(run).sizes for name, run in log.runs.items()}
        assert sizes["keras"] == [10] * 4
        tenth = Version(tf.__version__) >= Version("1.10")
        assert sizes["tensorflow.keras"] == ([8] * 5 if tenth else [10] * 4)
        assert main(["audit", str(stock)]) == 1
        assert ": clean" not in capsys.readouterr().out


# Logs that no Keras here writes, made by hand.


def histogram(tag, step, values, wall_time=None, edges=None):
    """Returns an event with a histogram of values, in ten buckets."""
    counts, edges = np.histogram(values, edges or 10)
    histo = V1.HistogramProto(
        min=np.min(values),
        max=np.max(values),
        num=len(values),
        sum=np.sum(values),
        sum_squares=np.sum(np.square(values)),
    )
    histo.bucket_limit.extend(edges[1:])
    histo.bucket.extend(counts)
    value = V1.Summary.Value(tag=tag, histo=histo)
    return V1.Event(
        step=step,
        wall_time=1000.0 + step if wall_time is None else wall_time,
        summary=V1.Summary(value=[value]),
    )


def tensor(tag, step, values):
    """Returns an event with the form of TensorFlow 2."""
    counts, edges = np.histogram(values, 10)
    table = np.stack([edges[:-1], edges[1:], counts], axis=1)
    value = V1.Summary.Value(tag=tag, tensor=tf.make_tensor_proto(table))
    summary = V1.Summary(value=[value])
    return V1.Event(step=step, wall_time=1000.0 + step, summary=summary)


def findings_of(tmp_path, made):
    write_records(tmp_path, [event.SerializeToString() for event in made])
    return examine(tmp_path)["."]


def noise(seed, scale=1.0, size=100):
    return scale * np.random.RandomState(seed).randn(size)


def test_a_clean_log_of_another_tool(tmp_path):
    made = [histogram("grads/w", step, noise(step)) for step in range(40)]
    made += [tensor("grads/v", step, noise(step)) for step in range(40)]
    assert findings_of(tmp_path, made) == []


@pytest.mark.parametrize("form", [histogram, tensor])
def test_a_spike_of_another_tool(tmp_path, form):
    made = [
        form("grads/w", step, noise(step, 4.0 if step % 6 == 2 else 1.0))
        for step in range(36)
    ]
    [finding] = findings_of(tmp_path, made)
    assert (finding.kind, finding.real) == ("periodic-spike", False)
    text = "Every 6th record is a spike, 6 times from record 2 (step 2) on"
    assert text in finding.explanation and "does not tell" in finding.explanation


def test_slices_without_what_stock_writes_beside(tmp_path):
    """Copied without weights and outputs, the gradients still show what they are."""
    made = [
        histogram("d/kernel_0_grad", step, noise(3 * step + i), 1000 + step + i / 8.0)
        for step in range(8)
        for i in range(3)
    ]
    [finding] = findings_of(tmp_path, made)
    assert finding.kind == "several-records"
    assert "at 8 steps: 3 a step" in finding.explanation
    assert "ceil(validation samples / batch_size) = 3" in finding.explanation


def test_two_weights_of_one_tag(tmp_path):
    made = [
        histogram("grad", step, noise(step, size=100 + i), 1000 + step + i / 8.0)
        for step in range(8)
        for i in range(2)
    ]
    one_event = [histogram("grad_1", step, noise(step)) for step in range(8)]
    for event in one_event:
        event.summary.value.extend(list(event.summary.value))
    found = findings_of(tmp_path, made + one_event)
    shared = {f.tags: f.explanation for f in found if f.kind == "shared-tag"}
    assert "records of 100 and of 101 values" in shared[("grad",)]
    assert "one event has 2 records of it" in shared[("grad_1",)]
    [several] = [f for f in found if f.kind == "several-records"]
    assert several.tags == ("grad",)


def test_empty_and_not_finite(tmp_path):
    empty = histogram("a_grad", 3, [1.0])
    empty.summary.value[0].histo.num = 0
    infinite = histogram("b_grad", 5, [1.0])
    infinite.summary.value[0].histo.max = np.inf
    found = findings_of(tmp_path, [empty, infinite])
    told = {f.kind: (f.tags, f.explanation) for f in found}
    assert sorted(told) == ["empty", "nonfinite"]
    assert told["empty"][0] == ("a_grad",) and "first at step 3" in told["empty"][1]
    assert told["nonfinite"][0] == ("b_grad",)
    assert "at 1 step, first at step 5" in told["nonfinite"][1]


def test_two_writers_at_one_time(tmp_path):
    made = [
        histogram("grad", step, noise(step + 9 * writer), 1000 + step + writer / 2.0)
        for writer in range(2)
        for step in range(9)
    ]
    [finding] = findings_of(tmp_path, made)
    assert finding.kind == "steps-back"
    assert "two writers were at work" in finding.explanation


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("records", [9, 30, 300])
def test_noise_has_no_period(seed, records):
    """Nor has a rate that explodes and decays, nor noise with single spikes."""
    random = np.random.RandomState(seed)
    sizes = np.exp(0.3 * random.randn(records))
    assert audit.find_spikes(sizes) is None
    ramp = np.exp(8 - np.abs(np.linspace(-8, 8, records)))
    assert audit.find_spikes(sizes * ramp) is None
    sizes[random.choice(records, 3, replace=False)] *= 2.5
    assert audit.find_spikes(sizes) is None


@pytest.mark.parametrize("period, repeats", [(3, 9), (5, 6), (10, 4), (40, 4), (7, 3)])
def test_a_period_is_found_in_noise(period, repeats):
    random = np.random.RandomState(period)
    sizes = np.exp(0.1 * random.randn(period * repeats))
    sizes[period // 2 :: period] *= 6
    spikes = audit.find_spikes(sizes)
    assert spikes[:3] == (period, period // 2, repeats)
    assert spikes.height == pytest.approx(6, rel=0.2)
    # Two do not repeat.
    assert audit.find_spikes(sizes[: 2 * period]) is None


def test_what_is_damaged_is_told(tmp_path, capsys):
    made = [histogram("grad", step, noise(step)) for step in range(3)]
    path = write_records(tmp_path, [event.SerializeToString() for event in made])
    with open(path, "rb") as file:
        data = file.read()
    with open(path, "wb") as file:
        # Cut off, as by a writer that is still at it: no finding.
        file.write(data[:-1])
    assert main(["audit", str(tmp_path)]) == 0
    assert "ends within a record" in capsys.readouterr().out
    with open(path, "wb") as file:
        file.write(flipped(data, 20))
    assert main(["audit", str(tmp_path)]) == 1
    assert "the data of a record is damaged (1)" in capsys.readouterr().out


def test_what_cannot_be_read_is_2(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "tfevents").write_text("<html>")
    for name in ("nowhere", "empty", "."):
        assert main(["audit", str(tmp_path / name)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert "`LOGDIR` must be a directory with event files" in err
    write_records(tmp_path / "loss", [histogram("d", 1, [1.0]).SerializeToString()])
    assert main(["audit", str(tmp_path / "loss")]) == 2
    assert "with 1 other tags" in capsys.readouterr().err


def test_nothing_but_text_reaches_the_terminal(tmp_path, capsys):
    tag = "\x1b[2Jgrad\u202e"
    made = [histogram(tag, step, noise(step)) for step in (2, 1)]
    write_records(tmp_path / "a\x1b[2J", [event.SerializeToString() for event in made])
    for option in ([], ["--json"]):
        assert main(["audit", str(tmp_path)] + option) == 1
        out = capsys.readouterr().out
        assert out.replace("\n", "").isprintable() and "\u202e" not in out


def test_a_process_of_its_own(tmp_path):
    made = [histogram("grad", step, noise(step)) for step in (2, 1)]
    write_records(tmp_path, [event.SerializeToString() for event in made])
    command = [sys.executable, "-m", "legacy_gradlog", "audit", str(tmp_path)]
    child = Popen(command, stdout=PIPE, stderr=PIPE)
    out, err = child.communicate()
    assert (child.returncode, err) == (1, b"")
    assert out.decode().startswith(".: findings\n  finding (steps-back)\n    The steps")
