"""A long run fills nothing up: neither memory, nor graphs, files or threads."""

import json

import pytest

from .frameworks import run_script

MEGABYTE = 2**20
STEPS, FITS = 2000, 20
SCRIPT = """
import sys
from compat_tests import soak
del sys.argv[1]
soak.main()
"""

_usages = {}


@pytest.fixture
def usages(fw, tmp_path):
    """Returns (how it trained, with which callback) -> usage, of one run a Keras."""
    if fw.name not in _usages:
        options = ["--keras", fw.name, "--steps", str(STEPS), "--fits", str(FITS)]
        lines = run_script(SCRIPT, tmp_path, *options).split("\n")
        found = [json.loads(x[len("USAGE") :]) for x in lines if x.startswith("USAGE")]
        _usages[fw.name] = {(one["train"], one["make"]): one for one in found}
    return _usages[fw.name]


@pytest.mark.parametrize("make", ["logger", "board"])
def test_many_steps(usages, make):
    found = usages["train_long", "make_" + make]
    assert found["steps"] == list(range(0, STEPS, 10))
    assert growth(found) == dict.fromkeys(growth(found), 0)


@pytest.mark.parametrize("make", ["logger", "board"])
def test_many_fits(usages, make):
    """Every fit of TF 2.0 leaves three graphs behind, and no more of them with us."""
    found, plain = (usages["train_often", "make_" + x] for x in (make, "nothing"))
    assert found["steps"] == list(range(5 * FITS))
    allowed = growth(plain)
    assert all(growth(found)[what] <= max(allowed[what], 0) for what in allowed), found


def growth(found):
    """Returns what grew after warm-up; of memory only that it grew too much."""
    before, after = found["before"], found["after"]
    grown = {what: after[what] - before[what] for what in before}
    memory = grown.pop("memory")
    assert memory < 20 * MEGABYTE
    return grown
