"""What importing does, and which module may know which."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import legacy_gradlog

PACKAGE = Path(legacy_gradlog.__file__).parent
FRAMEWORKS = {"tensorflow", "keras", "tf_keras", "tensorboard", "jax", "torch"}
ENGINE_PARTS = {"base", "gate", "hook", "reductions", "replicas", "sketch_ops"}
ENGINE_PARTS |= {"errors", "patching", "runtime", "schedule", "sketch"}


def imports(path):
    """Returns the names of the modules that a file imports, ours by last name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module:
                found.add(
                    node.module.split(".")[-1]
                    if node.level
                    else node.module.split(".")[0]
                )
            if node.level and (not node.module or node.module == "engines"):
                found.update(alias.name for alias in node.names)
    return found


MODULES = sorted(PACKAGE.rglob("*.py"))
ENGINES = sorted(path.stem for path in (PACKAGE / "engines").glob("[a-z]*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_frameworks_are_never_imported_on_top(path):
    assert not imports(path) & FRAMEWORKS


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_only_runtime_reads_versions(path):
    text = path.read_text(encoding="utf-8")
    # A wrapper's own version is no framework's.
    text = text.replace('__version__ = "', "")
    if path.stem != "runtime":
        assert "__version__" not in text
        assert "packaging" not in imports(path)


@pytest.mark.parametrize("name", ENGINES)
def test_engines_know_no_files_and_no_arguments(name):
    ours = imports(PACKAGE / "engines" / (name + ".py")) & {p.stem for p in MODULES}
    assert ours <= ENGINE_PARTS


@pytest.mark.parametrize("name", ["sketch", "schedule", "patching", "errors"])
def test_the_plain_modules_know_nothing(name):
    ours = imports(PACKAGE / (name + ".py")) & {path.stem for path in MODULES}
    assert ours <= {"errors"}


def test_writers_know_no_training():
    ours = imports(PACKAGE / "writers.py") & {path.stem for path in MODULES}
    assert ours <= {"errors", "runtime", "sketch"}


def test_the_reader_of_event_files_knows_no_training():
    ours = imports(PACKAGE / "events.py") & {path.stem for path in MODULES}
    assert ours == {"runtime"}


@pytest.mark.parametrize("name", ["audit", "show"])
def test_what_looks_at_logs_knows_no_training(name):
    ours = imports(PACKAGE / (name + ".py")) & {path.stem for path in MODULES}
    assert ours <= {"errors", "events", "series", "terminal"}


def test_importing_imports_no_framework():
    code = (
        "import sys, legacy_gradlog; from legacy_gradlog import TensorBoard; "
        "TensorBoard(write_grads=True); "
        "print(sorted({name.split('.')[0] for name in sys.modules} & %r))" % FRAMEWORKS
    )
    output = subprocess.check_output([sys.executable, "-c", code])
    assert output.decode().strip() == "[]"


def test_public_names():
    assert sorted(legacy_gradlog.__all__) == [
        "GradientLogger",
        "GradlogError",
        "GradlogWarning",
        "InvalidArgumentError",
        "LogDirectoryError",
        "TensorBoard",
        "UnknownArgumentError",
        "UnsupportedError",
        "detect",
    ]
    assert all(hasattr(legacy_gradlog, name) for name in legacy_gradlog.__all__)
