"""``show``: every number is that of the file, and what it does not tell is ``-``.

The records are written by the package's own histogram, and by TensorFlow's messages.
"""

import json
import os
import struct
import sys
from subprocess import PIPE, Popen

import numpy as np
import pytest

from legacy_gradlog import series
from legacy_gradlog.__main__ import main

from .test_audit import histogram, own, tensor
from .test_events import write_records


def write(folder, made):
    write_records(folder, [event.SerializeToString() for event in made])


@pytest.fixture
def logs(tmp_path):
    """Three steps of two weights, and other tools' logs in other runs."""
    kernels = [[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [np.nan, np.inf, 0.0, -2.0]]
    made = [
        own(10 * step, {"a/kernel_0_grad": kernel, "a/bias_0_grad": [1.0]})
        for step, kernel in enumerate(kernels)
    ]
    write(tmp_path / "ours", made)
    write(tmp_path / "stock", [histogram("d/kernel_0_grad", 1, [3.0, 4.0])])
    write(tmp_path / "tensors", [tensor("grads/d", 1, [3.0, 4.0])])
    return tmp_path


def shown(capsys, *arguments):
    """Returns the rows of the JSON, by run and tag."""
    assert main(["show", "--json"] + [str(argument) for argument in arguments]) == 0
    rows = json.loads(capsys.readouterr().out)
    return {(row["run"], row["tag"]): row for row in rows}


def test_numbers_of_our_own_files(logs, capsys):
    row = shown(capsys, logs)["ours", "a/kernel_0_grad"]
    assert row == {
        "run": "ours",
        "tag": "a/kernel_0_grad",
        "records": 3,
        "first_step": 0,
        "last_step": 20,
        "last_norm": 2.0,
        "median_norm": 2.0,
        "max_norm": 5.0,
        # 2, 3 and 1 of 4, 4 and the 2 that are finite.
        "zeros": 0.6,
        "nonfinite": 2,
        "norms": [5.0, 1.0, 2.0],
    }


def test_what_other_files_do_not_tell(logs, capsys):
    rows = shown(capsys, logs)
    stock = rows["stock", "d/kernel_0_grad"]
    assert (stock["last_norm"], stock["zeros"], stock["nonfinite"]) == (5.0, None, None)
    tensors = rows["tensors", "grads/d"]
    assert tensors["records"] == 1 and tensors["norms"] == [None]
    names = "last_norm", "median_norm", "max_norm", "zeros", "nonfinite"
    assert [tensors[name] for name in names] == [None] * 5


def test_the_table(logs, capsys):
    assert main(["show", str(logs)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {line[0]: line[1:] for line in lines if line[0] not in ("run", "weight")}
    expected = ["3", "2.000e+00", "2.000e+00", "5.000e+00", "60.0%", "2"]
    assert table["a/kernel"][:-1] == expected
    assert table["a/kernel"][-1] in ("█▂▄", "#.:")
    assert table["grads/d"] == ["1", "-", "-", "-", "-", "-", "-"]
    assert [line[1] for line in lines if line[0] == "run"] == [
        "ours",
        "stock",
        "tensors",
    ]


@pytest.mark.parametrize(
    "options, expected",
    [
        (["--run", "st*"], {("stock", "d/kernel_0_grad"): [1, 1]}),
        (["--tag", "a/bias"], {("ours", "a/bias_0_grad"): [0, 20]}),
        (["--tag", "a/bias_0_grad"], {("ours", "a/bias_0_grad"): [0, 20]}),
        (
            ["--tag", "*kernel", "--steps", "5:15"],
            {("ours", "a/kernel_0_grad"): [10] * 2},
        ),
        (
            ["--tag", "a/kernel", "--steps", "10:"],
            {("ours", "a/kernel_0_grad"): [10, 20]},
        ),
        (
            ["--tag", "a/kernel", "--steps", ":10"],
            {("ours", "a/kernel_0_grad"): [0, 10]},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_filters(logs, capsys, options, expected):
    rows = shown(capsys, logs, *options)
    steps = {key: [row["first_step"], row["last_step"]] for key, row in rows.items()}
    assert steps == expected


@pytest.mark.parametrize(
    "options, told",
    [
        (
            ["--run", "no*"],
            "Received: --run no*, none of it in run ours (a/kernel_0_grad",
        ),
        (["--steps", "90:"], "Received: --steps 90:, none of it"),
        (["--steps", "9"], "must be two steps, the first not above the last"),
        (["--steps", "9:3"], "Received: 9:3."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_choices_are_one_line(logs, capsys, options, told):
    try:
        code = main(["show", str(logs)] + options)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


def percentiles(folder, values):
    write(folder, [own(1, {"w_0_grad": values})])
    log = series.read(str(folder), percentiles=True)
    records = log.runs["."].histograms["w_0_grad"]
    return [records[percent][0] for percent in series.PERCENTS]


def test_percentiles_are_those_of_the_values(tmp_path):
    values = np.random.RandomState(0).randn(5000)
    values[:2000] = 0
    found = percentiles(tmp_path, values)
    # Buckets are an eighth of their value wide.
    expected = np.percentile(values.astype("float32"), series.PERCENTS)
    assert found == pytest.approx(expected, rel=0.13)
    exact = [series.PERCENTS.index(percent) for percent in (0, 50, 100)]
    assert [found[i] for i in exact] == [expected[i] for i in exact]
    assert expected[exact[1]] == 0


def test_percentiles_reach_beyond_the_buckets(tmp_path):
    assert percentiles(tmp_path, [-3e6, 0, 0, 0, 0, 0, 0, 0, 0, 2e7]) == [
        -3e6,
        # Half of the lowest bucket, which ends at -15/16 of 2**20.
        pytest.approx((-3e6 - 2**20 / 16 * 15) / 2),
        0,
        0,
        0,
        pytest.approx((2e7 + 2**20 / 16 * 15) / 2),
        2e7,
    ]


def test_memory_is_that_of_the_numbers_kept(tmp_path, monkeypatch):
    write(tmp_path, [own(step, {"w_0_grad": [1.0]}) for step in range(9)])
    log = series.read(str(tmp_path))
    assert log.runs["."].histograms["w_0_grad"].table().shape == (9, 11)
    assert log.skipped == []
    monkeypatch.setattr(series, "MOST_RECORDS", 4)
    log = series.read(str(tmp_path))
    assert len(log.runs["."].histograms["w_0_grad"]) == 4
    assert log.skipped == [(".", series.TOO_MANY_RECORDS, 5)]


def test_a_picture(logs, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "bands.png"
    assert main(["show", str(logs), "--png", str(path)]) == 0
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 700 and height > 300
    assert "a/kernel" in capsys.readouterr().out
    assert main(["show", str(logs), "--png", str(tmp_path / "no" / "x.png")]) == 2
    assert "`--png` must be a file that can be written" in capsys.readouterr().err


def test_the_picture_holds_the_percentiles(logs):
    """What is drawn, as matplotlib has it, before it is pixels."""
    figure = pytest.importorskip("matplotlib.figure")
    from legacy_gradlog import show

    log = series.read(str(logs), percentiles=True)
    axes = figure.Figure().add_subplot(1, 1, 1)
    gradient = log.runs["ours"].histograms["a/bias_0_grad"]
    show._draw_panel(axes, gradient)
    assert len(axes.collections) == 3
    [median] = axes.lines
    assert median.get_xdata().tolist() == [0, 10, 20]
    assert median.get_ydata().tolist() == [1, 1, 1]


def test_a_closed_pipe_ends_it_quietly(logs):
    """As ``show LOGDIR | head`` does, whoever is faster."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "legacy_gradlog", "show", str(logs)]
    child = Popen(command, stdout=writing, stderr=PIPE)
    os.close(writing)
    err = child.communicate()[1]
    assert (child.returncode, err) == (141, b"")


def test_missing_matplotlib_is_one_line(logs):
    """A process of its own, in which it fails as one that is not installed does."""
    text = "raise ImportError('No module named matplotlib')"
    (logs / "elsewhere").mkdir()
    (logs / "elsewhere" / "matplotlib.py").write_text(text)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join([str(logs / "elsewhere"), root])
    command = [sys.executable, "-m", "legacy_gradlog", "show", str(logs), "--png", "a"]
    child = Popen(
        command, stdout=PIPE, stderr=PIPE, env=dict(os.environ, PYTHONPATH=path)
    )
    out, err = child.communicate()
    assert (child.returncode, out) == (2, b"")
    assert err.decode().count("\n") == 1
    assert (
        "Install it with: python -m pip install 'legacy_gradlog[plot]'" in err.decode()
    )
