"""The demo as a user runs it: real processes, and what they left in the event files.

The event files are read with TensorFlow's own iterator; the names and sizes of the
weights are written out here, so that nothing is compared with the package itself.
"""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

import legacy_gradlog
from legacy_gradlog import demo, terminal
from legacy_gradlog.errors import GradlogError, LogDirectoryError

WEIGHTS = {
    "conv1/kernel": 3 * 3 * 1 * 16,
    "norm1/gamma": 16,
    "norm1/beta": 16,
    "conv2/kernel": 3 * 3 * 16 * 32,
    "conv2/bias": 32,
    "hidden/kernel": 2 * 2 * 32 * 64,
    "hidden/bias": 64,
    "output/kernel": 64 * 10,
    "output/bias": 10,
}
UPDATES_PER_EPOCH = 45  # 1,437 images in batches of 32
PACKAGE = os.path.dirname(os.path.abspath(legacy_gradlog.__file__))


def run_demo(cwd, *arguments, **environment):
    """Runs the program in a process of its own; returns exit code, stdout, stderr."""
    path = os.pathsep.join([os.path.dirname(PACKAGE), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "legacy_gradlog"] + list(arguments),
        cwd=str(cwd),
        env=dict(os.environ, PYTHONPATH=path, **environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = process.communicate()
    return process.returncode, out.decode("utf-8"), err.decode("utf-8")


def files_below(directory):
    """Returns {path: content} of every file below."""
    found = {}
    for parent, _, names in os.walk(str(directory)):
        for name in names:
            path = os.path.join(parent, name)
            with open(path, "rb") as file:
                found[path] = file.read()
    return found


def read_events(directory):
    """Returns {tag: [(step, value), ...]} of every summary value below."""
    tf = pytest.importorskip("tensorflow")
    train = getattr(tf.compat, "v1", tf).train
    found = {}
    for path in files_below(directory):
        if "tfevents" in path:
            for event in train.summary_iterator(path):
                for value in event.summary.value:
                    found.setdefault(value.tag, []).append((event.step, value))
    return found


def steps_of(events):
    """Returns {tag: [step, ...]}."""
    return {tag: [step for step, _ in found] for tag, found in events.items()}


def scalars_of(events, tag):
    """Returns the values of a scalar, in the order written."""
    return np.array([value.simple_value for _, value in events[tag]])


def table_of(out):
    """Returns {weight: (mean |g|, norm, sparkline)} of the printed table."""
    rows = [line.split() for line in out.splitlines()]
    return {row[0]: tuple(row[1:]) for row in rows if len(row) == 4 and "/" in row[0]}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def first(home):
    """The result of the first run, and the files it left."""
    arguments = ["--epochs", "2", "--seed", "5", "--logdir", "my logs"]
    result = run_demo(home, "demo", *arguments, PYTHONIOENCODING="utf-8")
    return result, files_below(home)


@pytest.fixture(scope="module")
def second(home, first):
    """The result of a run with the same seed, to the same place."""
    arguments = ["--epochs", "1", "--seed", "5", "--logdir", "my logs"]
    return run_demo(home, "demo", *arguments, PYTHONIOENCODING="ascii")


@pytest.fixture(scope="module")
def steps(home, first):
    """The step-level events of the first run."""
    return read_events(home / "my logs" / "run-1" / "steps")


def test_runs_quietly_and_says_where(home, first):
    code, out, err = first[0]
    assert code == 0, err
    assert "Traceback" not in err and "Warning" not in err
    run_dir = os.path.join("my logs", "run-1")
    assert out.splitlines()[-2:] == [
        "log directory: {}".format(run_dir),
        "look at it with: tensorboard --logdir '{}'".format(run_dir),
    ]
    assert sorted(os.listdir(str(home / run_dir))) == ["epochs", "steps"]


def test_says_what_is_installed_and_each_epoch(first):
    tf = pytest.importorskip("tensorflow")
    out = first[0][1].splitlines()
    assert " on TensorFlow {}, ".format(tf.__version__) in out[0]
    assert out[1].startswith(("engine: graph (", "engine: function ("))
    assert [line.split("  ")[0] for line in out[2:4]] == ["epoch 1/2", "epoch 2/2"]


def test_learns(first):
    lines = first[0][1].splitlines()
    losses = [float(line.split()[3]) for line in lines if line.startswith("epoch ")]
    assert len(losses) == 2 and losses[1] < 0.8 * losses[0]
    [accuracy] = [line for line in lines if line.startswith("validation accuracy: ")]
    # Ten digits: guessing gives 10.
    assert 25 < float(accuracy.split(": ")[1].rstrip("%")) <= 100


def test_epoch_run_has_one_histogram_per_weight_and_epoch(home, first):
    events = read_events(home / "my logs" / "run-1" / "epochs")
    gradients = {tag: events[tag] for tag in events if tag.endswith("_grad")}
    assert steps_of(gradients) == {weight + "_0_grad": [0, 1] for weight in WEIGHTS}
    for weight, size in WEIGHTS.items():
        counts = [value.histo.num for _, value in events[weight + "_0_grad"]]
        assert counts == [size, size]


def test_step_run_has_one_record_per_weight_and_due_step(steps):
    due = list(range(0, 2 * UPDATES_PER_EPOCH, 10))
    tags = ["grad_global_norm"]
    for weight in WEIGHTS:
        tags += [weight + "_0_grad", "grad_mean_abs/" + weight, "grad_norm/" + weight]
    assert steps_of(steps) == {tag: due for tag in tags}
    for weight, size in WEIGHTS.items():
        histograms = [value.histo for _, value in steps[weight + "_0_grad"]]
        assert [histogram.num for histogram in histograms] == [size] * len(due)
        assert all(histogram.min < 0 < histogram.max for histogram in histograms)


def test_table_is_what_was_logged(first, steps):
    out = first[0][1]
    assert "gradients of update 80; norms of every 10th update" in out.splitlines()
    table = table_of(out)
    assert list(table) == list(WEIGHTS)
    for weight, (mean_abs, norm, line) in table.items():
        norms = scalars_of(steps, "grad_norm/" + weight)
        means = scalars_of(steps, "grad_mean_abs/" + weight)
        assert float(mean_abs) == pytest.approx(means[-1], rel=1e-3)
        assert float(norm) == pytest.approx(norms[-1], rel=1e-3)
        eighths = np.searchsorted(np.arange(1, 8) / 8.0, norms / norms.max())
        assert line == "".join("▁▂▃▄▅▆▇█"[eighth] for eighth in eighths)


def test_ascii_terminal_gets_ascii(second):
    code, out, err = second
    assert code == 0, err
    table = table_of(out)
    assert list(table) == list(WEIGHTS)
    for _, _, line in table.values():
        assert len(line) == 5 and set(line) <= set("_.:-=+*#")
        assert "#" in line


def test_second_run_is_apart(home, first, second):
    directory = home / "my logs"
    assert sorted(os.listdir(str(directory))) == ["run-1", "run-2"]
    assert files_below(directory / "run-1") == first[1]
    events = read_events(directory / "run-2" / "steps")
    assert [step for step, _ in events["grad_global_norm"]] == [0, 10, 20, 30, 40]


@pytest.mark.skipif(
    Version(tf.__version__) < Version("1.15"),
    reason="training with reference variables does not repeat by itself",
)
def test_seed_makes_a_run_repeatable(home, first, steps, second):
    # The first update only: TensorFlow 1 itself does not repeat those that follow.
    again = read_events(home / "my logs" / "run-2" / "steps")
    for weight in ["hidden/bias", "output/kernel", "output/bias"]:
        tag = "grad_norm/" + weight
        value = scalars_of(steps, tag)[0]
        assert scalars_of(again, tag)[0] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(
    "arguments, told",
    [
        ([], "command"),
        (["demo", "--epochs", "0"], "must be an integer >= 1. Received: 0."),
        (["demo", "--epochs", "many"], "must be an integer >= 1. Received: many."),
        (["demo", "--seed=-1"], "must be an integer from 0 to 4294967295"),
        (["demo", "--seed", "4294967296"], "Received: 4294967296."),
        (["demo", "--logdir", "a file"], "Received: 'a file'"),
        (["demo", "--logdir", os.path.join("a file", "below")], "Not a directory"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(tmp_path, arguments, told):
    (tmp_path / "a file").write_text("kept")
    code, out, err = run_demo(tmp_path, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("python -m legacy_gradlog") and ": error: " in err
    assert told in err and err.count("\n") == 1
    assert files_below(tmp_path) == {str(tmp_path / "a file"): b"kept"}


@pytest.mark.parametrize("missing", ["tensorflow", "tensorboard"])
def test_missing_framework_is_one_line(tmp_path, missing):
    # Found first, and failing as one that is not installed does.
    module = tmp_path / (missing + ".py")
    module.write_text("raise ImportError('No module named {}')".format(missing))
    code, out, err = run_demo(tmp_path, "demo", "--logdir", "logs")
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    [line] = [line for line in err.splitlines() if "error:" in line]
    assert "Received: No module named {}.".format(missing) in line
    assert os.listdir(str(tmp_path / "logs")) == []


def test_help_names_every_option(tmp_path):
    code, out, _ = run_demo(tmp_path, "demo", "--help", COLUMNS="200")
    assert code == 0
    words = " ".join(out.split())
    assert "(default: {})".format(os.path.join(".", "logs", "gradlog-demo")) in words
    for text in ["--logdir DIR", "--epochs N", "(default: 10)", "--seed N"]:
        assert text in words


def test_runs_at_the_same_time_get_different_directories(tmp_path):
    made = []

    def make():
        for _ in range(10):
            made.append(demo._make_run_directory(str(tmp_path)))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [str(tmp_path / "run-{}".format(number)) for number in range(1, 41)]
    assert sorted(made) == sorted(expected)


def test_log_directory_must_be_local():
    with pytest.raises(LogDirectoryError, match="must be a local directory"):
        demo._make_run_directory("gs://bucket/logs")


def test_no_record_is_an_error():
    with pytest.raises(GradlogError, match="No gradient was logged"):
        demo._report({}, {})


@pytest.mark.parametrize(
    "values, width, line",
    [
        ([0.0], 9, "a"),
        ([0.0, 0.0], 9, "aa"),
        ([3.0], 9, "d"),
        ([1.0, 2.0, 3.0, 4.0], 9, "abcd"),
        ([0.0, 1.1, 2.1, 3.1, 4.0], 9, "abcdd"),
        # Averaged in runs of 2: 0.5, 2, 4.
        ([0.0, 1.0, 1.0, 3.0, 4.0, 4.0], 3, "abd"),
    ],
)
def test_sparkline(values, width, line):
    assert terminal.sparkline(values, "abcd", width) == line


def test_digits_are_the_published_ones():
    images, labels = demo.load_digits()
    assert (images.shape, images.dtype) == ((1797, 8, 8, 1), np.float32)
    assert (images.min(), images.max()) == (0, 1)
    assert (images * 16 == np.round(images * 16)).all()
    assert (labels.shape, labels.dtype) == ((1797,), np.int32)
    # The class counts that the data set's own description gives for its test set.
    counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.bincount(labels).tolist() == counts


def test_digits_are_small_and_licensed():
    files = files_below(os.path.join(PACKAGE, "data"))
    assert sum(map(len, files.values())) < 150000
    notice = files[os.path.join(PACKAGE, "data", "digits.txt")].decode("utf-8")
    for text in ["E. Alpaydin", "C. Kaynak", "1998", "10.24432/C50P49", "CC BY 4.0"]:
        assert text in notice
