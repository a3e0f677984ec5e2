"""What `doctor` tells of real and of broken environments, and how commands end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from legacy_gradlog import checkup, support
from legacy_gradlog.events import Histogram, Value

from .conftest import available

ROOT = Path(__file__).resolve().parent.parent


def start(cwd, *arguments):
    path = os.pathsep.join([str(cwd), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, "-m", "legacy_gradlog"] + list(arguments),
        cwd=str(cwd),
        env=dict(os.environ, PYTHONPATH=path, NO_COLOR="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def doctor(cwd, *arguments):
    """Returns exit code, stdout and stderr."""
    process = start(cwd, "doctor", *arguments)
    out, err = process.communicate()
    return process.returncode, out.decode("utf-8"), err.decode("utf-8")


def test_every_keras_of_this_line_is_right(tmp_path):
    code, out, err = doctor(tmp_path, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["exit_code"] == 0
    assert found["packages"]["tensorflow"] == {
        "version": tf.__version__,
        "problem": None,
    }
    assert found["packages"]["numpy"]["version"] == np.__version__
    trained = found["kerases"]
    right = {name for name, facts in trained.items() if facts.get("state") == "right"}
    same = {facts["same_as"] for facts in trained.values() if "same_as" in facts}
    assert len(right) == len(available()) and same <= right
    for name in right:
        assert trained[name]["engine"] in ("graph", "function")
        assert trained[name]["problem"] is None
    assert found["line_is_exact"]
    [line] = [line for line in support.LINES if line.name == found["line"]]
    assert tf.__version__.startswith(line.tensorflow + ".")
    plain = [text.replace("``", "") for text in line.stock]
    assert found["stock_defects"] == plain


BROKEN = {
    "missing": ("raise ModuleNotFoundError('no', name='tensorflow')", "not installed"),
    "failing": ("1 / 0", "cannot be used: ZeroDivisionError: division by zero"),
    "a folder": ("", "cannot be used: "),
    "leaving": (
        "import sys; print('a word'); sys.exit(3)",
        "importing tensorflow ended the process by exit code 3: a word",
    ),
    "crashing": (
        "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
        "importing tensorflow ended the process by signal 4: no words",
    ),
}


@pytest.mark.parametrize("source, told", list(BROKEN.values()), ids=list(BROKEN))
def test_broken_tensorflow_is_told(tmp_path, source, told):
    (tmp_path / "tensorflow.py").write_text(source)
    (tmp_path / "keras.py").write_text("import tensorflow.nothing")
    (tmp_path / "tf_keras.py").write_text("import tensorflow.nothing")
    code, out, err = doctor(tmp_path)
    assert (code, err) == (2, "")
    [line] = [line for line in out.splitlines() if line.startswith("tensorflow ")]
    assert told in line
    assert out.splitlines()[-1].startswith("No Keras can be trained and logged here.")


def test_failing_training_is_told(tmp_path):
    """A Keras of nothing but names: the engine cannot be known."""
    names = "__version__ = '2.1.2'\nclass models:\n    Model = object\n"
    names += "class layers:\n    Dense = None\n    Input = None\n"
    (tmp_path / "keras.py").write_text(names)
    (tmp_path / "tensorflow.py").write_text("__version__ = '1.5.0'\n")
    (tmp_path / "tf_keras.py").write_text("1 / 0")
    code, out, _ = doctor(tmp_path)
    assert code == 1
    assert "failed: TypeError: 'NoneType' object is not callable" in out
    assert "known of py36-tf1.4-keras2.1.2, the nearest tested line" in out


def records(change=None):
    """Returns weights of ten updates of one number, and what should be logged of them.

    ``change`` gets the list of what is logged.
    """
    random = np.random.RandomState(3)
    weights = [[random.randn(3).astype(np.float32) for _ in checkup.WEIGHTS]]
    values = []
    for step in range(checkup.STEPS):
        gradients = [random.randn(3).astype(np.float32) for _ in checkup.WEIGHTS]
        weights.append([w - 0.01 * g for w, g in zip(weights[-1], gradients)])
        for path, g in zip(checkup.WEIGHTS, gradients):
            edges = np.zeros(1)
            lowest, highest, total = float(g.min()), float(g.max()), float(g.sum())
            data = Histogram(edges, edges, edges, lowest, highest, 3.0, total, 1.0)
            values.append(Value(".", path + "_0_grad", step, 0.0, data))
    values.append(Value(".", "grad_global_norm", 0, 0.0, 1.0))
    if change is not None:
        change(values)
    return weights, values


def altered(**facts):
    def change(values):
        data = values[5].data
        facts_now = {
            name: value(getattr(data, name)) if callable(value) else value
            for name, value in facts.items()
        }
        values[5] = values[5]._replace(data=data._replace(**facts_now))

    return change


def test_what_is_logged_rightly_is_right():
    assert checkup.compare(*records()) is None


@pytest.mark.parametrize(
    "change, told",
    [
        (altered(min=lambda number: number * 1.001), "hidden/bias at step 1: minimum"),
        (altered(max=lambda number: -number), "hidden/bias at step 1: maximum"),
        (altered(sum=float("nan")), "hidden/bias at step 1: sum nan"),
        (altered(count=2.0), "hidden/bias at step 1: 2 values in place of 3"),
        (lambda values: values.pop(5), "0 records of hidden/bias at step 1"),
        (lambda values: values.append(values[5]), "2 records of hidden/bias at step 1"),
        (
            lambda values: values.append(values[5]._replace(step=10)),
            "10 updates, and 1 records too many",
        ),
    ],
    ids=["minimum", "maximum", "nan", "count", "none", "twice", "too many"],
)
def test_what_is_logged_wrongly_is_told(change, told):
    assert checkup.compare(*records(change)).startswith(told)


def test_too_few_updates_are_told():
    weights, values = records()
    values = [value for value in values if value.step < 9]
    assert checkup.compare(weights[:-1], values).startswith("9 updates")


def rows():
    """Returns the cells of the README's table of lines, each in one line of text."""
    text = (ROOT / "README.rst").read_text(encoding="utf-8")
    text = text.split("Supported versions\n----")[1].split("\n\n\n")[0]
    found = re.findall(
        r"   \* - (py\S+)\n     - ((?:.*\n)+?)     - ((?:.*\n)+?)     - ((?:.+\n)+?)"
        r"(?=   \* -|\n)",
        text,
    )
    return [[" ".join(cell.split()) for cell in row] for row in found]


def test_the_table_of_the_readme_says_the_same():
    above, found = [], []
    for name, works, refused, stock in rows():
        items = stock.split("; ")
        if items[0] == "as above":
            # All but what is true of one Keras only.
            common = [item for item in above if not item.startswith("``")]
            items = common + items[1:]
        found.append((name, works, tuple(refused.split("; ")), tuple(items)))
        above = items
    expected = [
        (line.name, line.works, line.refused, line.stock) for line in support.LINES
    ]
    assert found == expected


@pytest.mark.parametrize(
    "command, waiting",
    [
        ("doctor", "time.sleep(60)"),
        ("demo", "time.sleep(60)"),
        # As TensorFlow does.
        ("demo", "\ntry: time.sleep(60)\nexcept KeyboardInterrupt: raise TypeError"),
    ],
    ids=["doctor", "demo", "demo, taken for an error"],
)
def test_ctrl_c_ends_a_command_cleanly(tmp_path, command, waiting):
    reached = tmp_path / "reached"
    source = "import time; open({!r}, 'w').close(); {}".format(str(reached), waiting)
    for name in ("tensorflow", "tensorboard"):
        (tmp_path / (name + ".py")).write_text(source)
    process = start(tmp_path, command)
    while not reached.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, b"")
    told = "\npython -m legacy_gradlog {}: interrupted\n".format(command)
    assert err.decode("utf-8") == told


def test_help_tells_the_exit_codes(tmp_path):
    for arguments in (["--help"], ["doctor", "--help"]):
        process = start(tmp_path, *arguments)
        out = process.communicate()[0].decode("utf-8")
        assert process.returncode == 0
        assert "exit codes" in out and "  130  interrupted by Ctrl-C" in out
