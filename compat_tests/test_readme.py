"""The README is what is true: its code runs, its table is the matrix of tox.ini."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
SUMMARIES = getattr(getattr(tf, "compat", None), "v1", tf).train.summary_iterator
README = (ROOT / "README.rst").read_text(encoding="utf-8")


def code_blocks():
    blocks = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", README)
    return [re.sub(r"(?m)^    ", "", block) for block in blocks]


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


@pytest.mark.parametrize("block", code_blocks(), ids=lambda block: block[:30].strip())
def test_code_blocks_run(tmp_path, block):
    if "tensorflow_recommenders" in block:
        pytest.importorskip("tensorflow_recommenders")
    if "GradientTape" in block and Version(tf.__version__) < Version("2.2"):
        pytest.skip("gradient tapes, and a `train_step`, are of TensorFlow 2")
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.check_call(
        [sys.executable, "-c", block], cwd=str(tmp_path), env=environment
    )
    for part, tags in LOGS.items():
        if part in block:
            assert gradient_tags_below(tmp_path) == tags


COMMANDS = re.findall(r"::\n\n    (.*)\n", README)


def test_the_commands():
    # What the second one does is looked at in `test_doctor`.
    assert COMMANDS == [
        "python -m pip install '.[tf]' && python -m legacy_gradlog demo",
        "python -m legacy_gradlog doctor",
        "python -m legacy_gradlog run --grads-freq 100 train.py --epochs 3",
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
