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
README = (ROOT / "README.rst").read_text(encoding="utf-8")


def code_blocks():
    blocks = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", README)
    return [re.sub(r"(?m)^    ", "", block) for block in blocks]


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
