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

from legacy_gradlog import (
    GradientLogger,
    TensorBoard,
    audit,
    series,
    sketch,
    writers,
)
from legacy_gradlog.__main__ import main
from legacy_gradlog.errors import GradlogWarning

from .conftest import available
from .frameworks import small_data
from .test_beside import no_profile
from .test_events import V1, flipped, write_records

#: Of every kind of clean training.
SEEDS = 10


def train_clean(fw, folder):
    """Writes ``kind-seed``: 64 steps, or 8 epochs, each of another beginning."""
    x, y = small_data(128)
    linear = fw.linear_model(fw.optimizer(rate=0.05)).model
    deep = fw.small_model(fw.optimizer("Adam", rate=0.01)).model
    for seed in range(SEEDS):
        random = np.random.RandomState(seed)
        np.random.seed(seed)
        log_dir = str(folder / "{{}}-{}".format(seed))
        # Loops without `fit` take a fraction of its time.
        for kind, scale in (("steps", 1.0), ("exploding", 4.0)):
            begin(linear, random)
            with step_logger(log_dir.format(kind)).watch(linear):
                for step in range(64):
                    rows = random.choice(len(x), 8, replace=False)
                    # Four times the inputs are 16 times the rate.
                    part = x[rows] * (scale if 16 <= step < 32 else 1.0)
                    linear.train_on_batch(part, y[rows])
        begin(deep, random)
        logger = step_logger(log_dir.format("dropout"))
        deep.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=[logger])
        begin(linear, random)
        options = dict(no_profile(fw), write_graph=False, write_grads=True)
        logger = TensorBoard(log_dir.format("epochs"), **options)
        linear.fit(x, y, batch_size=64, epochs=8, verbose=0, callbacks=[logger])


def begin(model, random):
    """Gives a model other weights. Variances are among them, and never negative."""
    shapes = [weight.shape for weight in model.get_weights()]
    model.set_weights([np.abs(random.randn(*shape)) for shape in shapes])


def step_logger(path):
    return GradientLogger(path, freq=1, scalars=("norm",))


def train_strange(fw, folder):
    """Writes what is real, though it looks strange."""

    def log(name, x, y, epochs, make=None):
        model = fw.linear_model(fw.optimizer(rate=0.001)).model
        model.set_weights([np.zeros((4, 1))])
        callbacks = [step_logger(str(folder / name))]
        callbacks += [make(model)] if make else []
        fw.fit(model, x, y, epochs=epochs, callbacks=callbacks)

    class Break(fw.keras.callbacks.Callback):
        def __init__(self, trained):
            super().__init__()
            self.trained = trained

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                self.trained.set_weights([np.full((4, 1), np.nan)])

    # Of 33 samples 32 cancel out but for a rest, and the last is alone.
    signs = np.where(np.arange(33) % 2, 22.0, -18.0)[:, None] + noise(0, 0.3, (33, 1))
    log("short-last-batch", np.ones((33, 4)), signs, 4)
    with pytest.warns(GradlogWarning, match="not finite"):
        log("nonfinite", *small_data(64), epochs=3, make=Break)
    log("restart", *small_data(64), epochs=4)
    log("restart", *small_data(64), epochs=2)


def train_stock(fw, log_dir, samples, batch_size=10):
    """Trains with the stock callback, whose own ``batch_size`` is 10."""
    fw.clear()
    layers = fw.layers
    stack = [layers.Dense(3, activation="tanh", input_shape=(4,)), layers.Dense(1)]
    model = fw.keras.models.Sequential(stack)
    model.compile(fw.keras.optimizers.SGD(lr=1e-4), "mse")
    x = noise(0, size=(samples, 4))
    # A mean over few samples is far from zero.
    y = np.where(np.arange(samples) % 2, 20.0, -20.0)[:, None]
    logger = fw.keras.callbacks.TensorBoard(
        str(log_dir), histogram_freq=1, batch_size=10, write_grads=True
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Logs of this package: ``clean/kind-seed``, and ``strange`` ones."""
    folder = tmp_path_factory.mktemp("ours")
    fw = available()[0]
    fw.clear()
    train_clean(fw, folder / "clean")
    train_strange(fw, folder / "strange")
    return folder


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Logs of the stock callbacks of both Kerases."""
    folder = tmp_path_factory.mktemp("stock")
    for fw in available():
        for samples in (41, 40, 8):
            train_stock(fw, folder / fw.name / str(samples), samples)
        train_stock(fw, folder / "other batch_size" / fw.name, 40, batch_size=8)
    return folder


def examine(folder):
    """Returns {run: findings}."""
    return audit.examine(series.read(str(folder)))


def kinds_of(findings):
    return sorted({finding.kind for finding in findings})


def test_no_false_alarm(trained, capsys):
    found = examine(trained / "clean")
    assert len(found) == 4 * SEEDS
    assert {run: f for run, f in found.items() if f} == {}
    assert main(["audit", str(trained / "clean")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 * SEEDS and all(line.endswith(": clean") for line in lines)


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
    def test_no_miss(self, stock, fw, samples, sizes, told):
        log = series.read(str(stock / fw.name / str(samples)))
        slices = audit.find_slices(log.runs["."])
        assert (slices.number, slices.sizes) == (len(sizes), sizes)
        found = {f.kind: f for f in audit.examine(log)["."]}
        finding = found["validation-slices"]
        assert not finding.real and told in finding.explanation
        assert sorted(finding.tags) == sorted(log.runs["."].gradients())
        assert len(finding.tags) == 4

    def test_the_spike_of_the_last_slice(self, stock, fw):
        found = examine(stock / fw.name / "41")["."]
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
        assert sizes["tf.keras"] == ([8] * 5 if tenth else [10] * 4)
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


def own(step, values):
    """Returns an event of this package: tag -> values, as a record of each."""
    summary = V1.Summary()
    for tag, numbers in values.items():
        counts, moments = sketch.from_values(np.array(numbers, "float32"))
        [record] = sketch.decode(step, counts[None], moments[None])
        writers.add_histograms(summary, [tag], [record], counts[None])
        if record.nonfinite:
            tag = "grad_nonfinite/" + tag[: -len("_0_grad")]
            summary.value.add(tag=tag, simple_value=record.nonfinite)
    return V1.Event(step=step, wall_time=1000.0 + step, summary=summary)


def slices(sizes, epochs, counted):
    """Returns events as stock ``write_grads`` makes them: a convolution, then a Dense.

    Args:
        sizes: Samples of each slice. The gradient of the last one is a spike.
        epochs: How often they are walked.
        counted: Whether the step counts the slices and not the epochs.
    """
    made = []
    for epoch in range(epochs):
        for place, samples in enumerate(sizes):
            at = epoch * len(sizes) + place
            high = 9.0 if place == len(sizes) - 1 else 1.0
            event = V1.Event(step=at if counted else epoch, wall_time=1000 + at / 8.0)
            # Two filters at each of five places, and three units.
            for layer, units, places in (("conv", 2, 5), ("dense", 3, 1)):
                bias = layer + "/bias_0"
                values = {
                    bias: noise(0, size=units),
                    bias + "_grad": noise(at, high, units),
                    layer + "_out": noise(at, size=samples * units * places),
                }
                for tag, numbers in values.items():
                    event.summary.MergeFrom(histogram(tag, 0, numbers).summary)
            made.append(event)
        loss = V1.Summary.Value(tag="val_loss", simple_value=1.0)
        made.append(V1.Event(step=epoch, summary=V1.Summary(value=[loss])))
    return made


def findings_of(tmp_path, made):
    write_records(tmp_path, [event.SerializeToString() for event in made])
    return examine(tmp_path)["."]


def noise(seed, scale=1.0, size=100):
    return scale * np.random.RandomState(seed).standard_normal(size)


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


@pytest.mark.parametrize("counted", [False, True], ids=["the epoch", "a count"])
def test_slices_with_a_convolution(tmp_path, counted):
    """Of all layers those with one output a unit tell how many samples there were."""
    made = slices([8, 8, 3], epochs=6, counted=counted)
    found = findings_of(tmp_path, made)
    told = {finding.kind: finding for finding in found}
    kinds = ["periodic-spike", "several-records", "validation-slices"]
    assert sorted(told) == kinds[::2] if counted else kinds
    assert not any(finding.real for finding in found)
    tags = ("conv/bias_0_grad", "dense/bias_0_grad")
    assert told["validation-slices"].tags == told["periodic-spike"].tags == tags
    text = "3 records an epoch = ceil(19 validation samples / batch_size 8), and the "
    text += "last slice has 19 % 8 = 3 samples"
    assert text in told["validation-slices"].explanation
    spike = told["periodic-spike"].explanation
    assert "Every 3rd record is a spike, 6 times from record 2 " in spike
    assert text in spike


def test_a_spike_of_our_own_file_is_real(tmp_path, capsys):
    made = [
        own(step, {"d/kernel_0_grad": noise(step, 6.0 if step % 5 == 4 else 1.0)})
        for step in range(40)
    ]
    [finding] = findings_of(tmp_path, made)
    assert (finding.kind, finding.real) == ("periodic-spike", True)
    assert "of an epoch of that many steps" in finding.explanation
    assert main(["audit", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(".: clean\n  note (periodic-spike)")


def test_what_we_counted_as_not_finite(tmp_path):
    """Our own histograms leave such values out and count them beside."""
    made = [
        own(step, {"d/kernel_0_grad": [1.0, np.nan if step in (4, 6) else 2.0]})
        for step in range(9)
    ]
    [finding] = findings_of(tmp_path, made)
    assert (finding.kind, finding.tags) == ("nonfinite", ("d/kernel_0_grad",))
    assert "at 2 steps, first at step 4, last at step 6" in finding.explanation


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


@pytest.mark.parametrize("scatter", [0.1, 0.5, 1.0, 1.3])
@pytest.mark.parametrize("period", [3, 8, 16])
def test_spikes_do_not_hide_in_the_noise_that_they_make(scatter, period):
    """They are a good part of the records from which the noise is estimated."""
    for seed in range(10):
        sizes = np.exp(noise(seed, scatter, 64))
        sizes[period - 1 :: period] = 1000 * sizes.max()
        spikes = audit.find_spikes(sizes)
        assert spikes[:3] == (period, period - 1, 64 // period)


@pytest.mark.parametrize(
    "records, height, found",
    [(9, 2, False), (9, 6, True), (30, 2, True)],
    ids=["three low ones", "three high ones", "ten low ones"],
)
def test_what_may_be_chance_is_no_period(records, height, found):
    """One of 84 throws of three spikes into nine records makes such a one."""
    sizes = np.exp(noise(1, 0.02, records))
    sizes[::3] *= height
    assert (audit.find_spikes(sizes) is not None) == found


EVERY_8TH = list(range(7, 128, 8))


@pytest.mark.parametrize(
    "places, height, width, found",
    [
        (EVERY_8TH, 1.3, 0.01, False),
        (EVERY_8TH, 1.7, 0.01, True),
        (EVERY_8TH, 3.0, 0.5, False),
        (EVERY_8TH, 20.0, 0.5, True),
        ([7, 15, 23, 39, 47, 63, 79, 103, 119], 9.0, 0.1, False),
        (EVERY_8TH[::3] + EVERY_8TH[1::6] + [111], 9.0, 0.1, False),
        (EVERY_8TH + [1, 4, 18, 21, 44, 49, 67, 90], 9.0, 0.1, False),
        (EVERY_8TH + [18], 9.0, 0.1, True),
    ],
    ids=[
        "lower than half as much again",
        "a little higher than that",
        "within the noise",
        "above the noise",
        "at half of its places",
        "at some of its places",
        "as often elsewhere",
        "once elsewhere",
    ],
)
def test_what_makes_a_period(places, height, width, found):
    sizes = np.exp(np.random.RandomState(0).uniform(-width, width, 128))
    sizes[places] *= height
    spikes = audit.find_spikes(sizes)
    assert (spikes is not None and spikes.period == 8) == found
    assert found or spikes is None


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
