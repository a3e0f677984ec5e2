"""The README is what is true: its code runs, its table is the matrix of tox.ini."""

import configparser
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.rst").read_text(encoding="utf-8")


def code_blocks():
    blocks = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", README)
    return [re.sub(r"(?m)^    ", "", block) for block in blocks]


def run_block(number, folder):
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.check_call(
        [sys.executable, "-c", code_blocks()[number]], cwd=str(folder), env=environment
    )


@pytest.mark.parametrize("number", range(3))
def test_code_blocks_run(tmp_path, number):
    assert len(code_blocks()) == 5
    run_block(number, tmp_path)


def tags_below(folder):
    (path,) = [p for p in folder.rglob("*tfevents*") if "empty" not in p.name]
    events = tf.compat.v1.train.summary_iterator(str(path))
    return {value.tag for event in events for value in event.summary.value}


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_recommenders") is None,
    reason="TensorFlow Recommenders is not in this line",
)
def test_the_example_of_two_towers(tmp_path):
    run_block(3, tmp_path)
    names = ["ids/embeddings_0", "dense/kernel_0", "dense/bias_0"]
    expected = {t + "/" + name + "_grad" for t in ("user", "item") for name in names}
    found = tags_below(tmp_path / "logs" / "towers" / "train")
    assert {tag for tag in found if tag.endswith("_grad")} == expected


@pytest.mark.skipif(
    Version(tf.__version__) < Version("2.2"), reason="`train_step` came with TF 2.2"
)
def test_the_example_of_a_train_step(tmp_path):
    run_block(4, tmp_path)
    assert "out/kernel_0_grad" in tags_below(tmp_path / "logs" / "huber")


def test_there_are_two_commands():
    commands = re.findall(r"::\n\n    (.*)\n", README)
    assert commands == [
        "python -m pip install '.[tf]' && python -m legacy_gradlog demo",
        "python -m pip install tox && tox",
    ]


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
