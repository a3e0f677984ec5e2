"""The README is what is true: its code and its commands run, its tables are right.

Commands that read logs are run in this process, on what the demo has logged in one of
its own.
"""

import ast
import configparser
import json
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import TensorBoard
from legacy_gradlog.__main__ import main

from .conftest import messages_of
from .frameworks import small_data

ROOT = Path(__file__).resolve().parent.parent
SUMMARIES = getattr(getattr(tf, "compat", None), "v1", tf).train.summary_iterator
README = (ROOT / "README.rst").read_text(encoding="utf-8")
INDENTED = r"((?:    .*\n|\n)+)"
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PATH": "", "TF_CPP_MIN_LOG_LEVEL": "3"}


def without_indent(block):
    return re.sub(r"(?m)^    ", "", block)


def code_blocks():
    blocks = re.findall(r"\.\. code-block:: python\n\n" + INDENTED, README)
    return [without_indent(block) for block in blocks]


STOCK = [block for block in code_blocks() if "keras.callbacks.TensorBoard(" in block]


def run_python(folder, code):
    command = [sys.executable, "-c", code]
    subprocess.check_call(command, cwd=str(folder), env=ENVIRONMENT)


def gradient_tags_below(folder):
    tags = set()
    for path in folder.rglob("*tfevents*"):
        if "profile-empty" not in path.name:
            for event in SUMMARIES(str(path)):
                tags.update(value.tag for value in event.summary.value)
    return {tag for tag in tags if tag.endswith("_grad")}


TOWER = ["ids/embeddings_0_grad", "dense/kernel_0_grad", "dense/bias_0_grad"]
#: What a block logs, by a part of its text.
LOGS = {
    "TwoTowers": {name + "/" + tag for name in ("user", "item") for tag in TOWER},
    "Huber": {"out/kernel_0_grad", "out/bias_0_grad"},
    "watch(model)": {"d/kernel_0_grad", "d/bias_0_grad"},
}


@pytest.mark.parametrize(
    "block",
    [block for block in code_blocks() if block not in STOCK],
    ids=lambda block: block[:30].strip(),
)
def test_code_blocks_run(tmp_path, block):
    if "tensorflow_recommenders" in block:
        pytest.importorskip("tensorflow_recommenders")
    if "GradientTape" in block and Version(tf.__version__) < Version("2.2"):
        pytest.skip("gradient tapes, and a `train_step`, are of TensorFlow 2")
    run_python(tmp_path, block)
    for part, tags in LOGS.items():
        if part in block:
            assert gradient_tags_below(tmp_path) == tags


COMMANDS = re.findall(r"::\n\n    (.*)\n", README)
ON_THE_DEMO = [command for command in COMMANDS if "logs/gradlog-demo" in command]
DRAWING = [command for command in ON_THE_DEMO if "--png" in command]
#: What follows a command, as what it prints.
PRINTED = dict(
    re.findall(
        r"::\n\n    (.*)\n\n\.\. code-block:: text\n\n" + INDENTED,
        README,
    )
)


def test_the_commands():
    # What `doctor` does is looked at in `test_doctor`.
    assert COMMANDS == [
        "python -m pip install '.[tf]' && python -m legacy_gradlog demo",
        "python -m legacy_gradlog run --grads-freq 100 train.py --epochs 3",
        "python -m legacy_gradlog show logs/gradlog-demo/run-1 --run steps",
        "python -m legacy_gradlog show logs/gradlog-demo/run-1/steps --tag "
        "'*[2nt]/kernel' --png healthy.png",
        "python -m legacy_gradlog audit logs/gradlog-demo/run-1",
        "python -m legacy_gradlog audit logs/stock",
        "python -m legacy_gradlog doctor",
        "python -m compat_tests.benchmarks",
        "python -m pip install tox && tox",
    ]


def test_the_command_for_a_script_runs_it(tmp_path):
    (tmp_path / "train.py").write_text("import sys; print(sys.argv)")
    [command] = [command for command in COMMANDS if " run " in command]
    output = subprocess.check_output(
        [sys.executable] + command.split()[1:],
        cwd=str(tmp_path),
        env={"PYTHONPATH": str(ROOT)},
    )
    assert output.decode().strip() == "['train.py', '--epochs', '3']"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A directory with what two epochs of the demo log, and the faults of the pictures.

    The faults are in ``faults``, a run each.
    """
    folder = tmp_path_factory.mktemp("logs")
    code = (
        "import sys; sys.path.insert(0, {!r})\n"
        "import pictures\n"
        "from legacy_gradlog.__main__ import main\n"
        "assert main(['demo', '--epochs', '2']) == 0\n"
        "pictures.train('faults')"
    )
    run_python(folder, code.format(str(ROOT / "docs")))
    return folder


def printed(command, capsys):
    """Returns the exit code and what a command of ours prints."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "legacy_gradlog"]
    code = main(words[3:])
    return code, capsys.readouterr().out


def words_of(text):
    """Returns a text without its numbers, bars and blanks.

    Without the ``train``, too, which the stock callbacks of TensorFlow 1 do not make.
    """
    text = text.replace("epochs/train:", "epochs:")
    text = re.sub(r"(?m)(?<=\d)  [▁-█_.:=+*#-]+$", "", text)
    return re.sub(r"\d[\d.]*(e[+-]\d+)?%?", "0", text).split()


@pytest.mark.parametrize(
    "command", [command for command in ON_THE_DEMO if command not in DRAWING]
)
def test_commands_print_what_is_shown(logs, monkeypatch, capsys, command):
    monkeypatch.chdir(str(logs))
    code, out = printed(command, capsys)
    assert code == 0
    assert words_of(out) == words_of(PRINTED[command])


def test_the_command_for_a_picture_draws_it(logs, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(str(logs))
    [command] = DRAWING
    code, out = printed(command, capsys)
    assert code == 0
    drawn = [line.split()[0] for line in out.splitlines()[2:]]
    assert drawn == ["conv2/kernel", "hidden/kernel", "output/kernel"]
    assert (logs / "healthy.png").read_bytes()[:4] == b"\x89PNG"


def test_the_pictures_are_there():
    shown = re.findall(r"\.\. image:: (.*)\n", README)
    assert len(shown) == 4
    there = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.png")]
    assert sorted(shown) == sorted(there)
    # The long description has the text alone.
    assert all("``{}``".format(path) in README for path in shown)


def rows_of(folder, capsys):
    """Returns what `show` knows of each weight, by run and path."""
    assert main(["show", "--json", str(folder)]) == 0
    rows = json.loads(capsys.readouterr().out)
    return {(row["run"], row["tag"].replace("_0_grad", "")): row for row in rows}


def test_the_faults_look_as_is_told(logs, capsys):
    rows = rows_of(logs / "faults", capsys)
    first = rows["vanishing", "hidden1/kernel"]["median_norm"]
    assert 0 < first < rows["vanishing", "output/kernel"]["median_norm"] / 1000
    growing = rows["exploding", "output/kernel"]["norms"]
    assert len(growing) == 34
    # At first the loss still falls where it is less curved.
    for step in (10, 20):
        assert growing[step + 10] > 3 * growing[step]
    for name in ("hidden2/kernel", "hidden2/bias", "output/kernel"):
        assert rows["dead", name]["zeros"] == 1
    assert rows["dead", "output/bias"]["zeros"] == 0


def test_the_healthy_layers_are_alike(logs, capsys):
    rows = rows_of(logs / "logs" / "gradlog-demo" / "run-1" / "steps", capsys)
    norms = [row["median_norm"] for _, row in rows.items() if "kernel" in row["tag"]]
    assert len(norms) == 4 and max(norms) < 10 * min(norms)


@pytest.mark.skipif(
    Version(tf.__version__) >= Version("2.0"),
    reason="stock `write_grads` is of TensorFlow 1",
)
def test_the_stock_spike_is_audited_as_is_shown(tmp_path, monkeypatch, capsys):
    [block] = STOCK
    run_python(tmp_path, block)
    monkeypatch.chdir(str(tmp_path))
    command = "python -m legacy_gradlog audit logs/stock"
    code, out = printed(command, capsys)
    assert code == 1
    # How high the spike is depends on the first weights.
    height = r"its norm is \d\.\d( to \d\.\d)? times"
    found, shown = (
        " ".join(re.sub(height, "", " ".join(text.split())).split())
        for text in (out, PRINTED[command])
    )
    assert re.search(height, " ".join(out.split())) and shown in found


def quoted():
    """Returns the texts of this package that troubleshooting is about."""
    section = README.split("\nTroubleshooting\n---")[1].split("What others say")[0]
    return re.findall(r"(?m)^``(.+)``$", section)


def test_quoted_texts_are_those_of_the_package():
    strings = set()
    for path in (ROOT / "legacy_gradlog").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            fields = [value for _, value in ast.iter_fields(node)]
            strings.update(value for value in fields if isinstance(value, str))
    assert len(quoted()) > 9
    unknown = []
    for text in quoted():
        pattern = ".*".join(map(re.escape, text.split("...")))
        if not any(re.search(pattern, string, re.DOTALL) for string in strings):
            unknown.append(text)
    assert unknown == []


def migration():
    """Returns argument -> cells of the table: three of Kerases, and what is told."""
    row = r"   \* - ``(\w+)``\n     - (.+)\n     - (.+)\n     - (.+)\n     -(.*)\n"
    section = README.split("\nComing from the stock callback\n---")[1]
    return {name: cells for name, *cells in re.findall(row, section)}


def is_meant(cell, version, tensorflow):
    """Whether a cell such as "from 1.11 to 1.15" means a version."""
    if cell in ("all", "none"):
        return cell == "all"
    form = r"(?:from ([\d.]+))?(?: ?to ([\d.]+))?(?: on TensorFlow (\d))?"
    first, last, base = re.fullmatch(form, cell).groups()
    return (
        (first is None or version >= Version(first))
        and (last is None or version.release[:2] <= Version(last).release)
        and (base is None or tensorflow.release[0] == int(base))
    )


def test_the_table_of_arguments(fw, tmp_path):
    """The stock callback of this Keras gets what it has, and the rest is warned of."""
    table = migration()
    values = dict.fromkeys(table)
    values.update(batch_size=32, update_freq="epoch", profile_batch=0)
    values.update(write_graph=False, write_images=False, write_steps_per_second=False)
    values.update(embeddings_freq=0)
    assert len(values) == 10
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback = TensorBoard(str(tmp_path), **values)
        fw.fit(fw.linear_model().model, *small_data(), callbacks=[callback])
    [message] = messages_of(caught)
    told = dict(re.findall(r"`(\w+)`: ([^;]+?)(?:;|\.$)", message))
    column = {"keras": 2 if fw.is_keras_3 else 0, "tf.keras": 1, "tf_keras": 2}[fw.name]
    version = fw.tf_version if fw.name == "tf.keras" else fw.version
    assert told == {
        name: cells[3].strip().replace("``", "`")
        for name, cells in table.items()
        if not is_meant(cells[column], version, fw.tf_version)
    }


def test_the_table_is_the_matrix():
    config = configparser.ConfigParser()
    config.read(str(ROOT / "tox.ini"))
    lines = config["tox"]["env_list"].split()
    assert re.findall(r"   \* - (py\S+)\n", README) == lines


def test_there_is_a_container_for_every_line():
    compose = (ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8")
    config = configparser.ConfigParser()
    config.read(str(ROOT / "tox.ini"))
    expected = []
    for line in config["tox"]["env_list"].split():
        number = re.match(r"py3(\d+)-", line).group(1)
        expected.append((line, "3." + number, line))
    pattern = r'  (py\S+):\n(?:.*\n)*?.*PYTHON: "(.*)"\n.*ENVIRONMENT: (.*)\n'
    assert re.findall(pattern, compose) == expected
