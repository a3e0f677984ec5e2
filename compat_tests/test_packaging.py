"""What is published: an sdist and a wheel, and what a new environment gets from them.

On the newest line only, which has `build` and `twine`.
"""

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import legacy_gradlog

ROOT = Path(__file__).resolve().parent.parent


def run(*command, **options):
    """Returns what a command prints; its stderr, too, where it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0, out + err
    return out


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The directory of an sdist, and of the wheel that was made of it."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(
        str(ROOT / "legacy_gradlog"), str(source / "legacy_gradlog"), ignore=ignore
    )
    shutil.copytree(str(ROOT / "docs"), str(source / "docs"), ignore=ignore)
    for name in ("setup.py", "MANIFEST.in", "README.rst", "CHANGELOG.rst", "LICENSE"):
        shutil.copy(str(ROOT / name), str(source))
    # Without isolation nothing is downloaded; the line has setuptools.
    run(sys.executable, "-m", "build", "--no-isolation", cwd=str(source))
    return source / "dist"


def wheel_in(built):
    [wheel] = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """The programs' directory of an environment with nothing but the wheel."""
    home = tmp_path_factory.mktemp("environment") / "venv"
    run(sys.executable, "-m", "venv", home)
    python = home / "bin" / "python"
    # What it depends on is next to us, behind what the environment has itself.
    options = ["--no-index", "--no-deps", "--disable-pip-version-check"]
    run(python, "-m", "pip", "install", *options, wheel_in(built))
    [packages] = home.glob("lib/python*/site-packages")
    paths = [path for path in sys.path if path.endswith("site-packages")]
    assert sysconfig.get_paths()["purelib"] in paths
    (packages / "beside.pth").write_text("\n".join(paths))
    return home / "bin"


def test_is_built_and_would_be_accepted(built):
    names = sorted(path.name for path in built.iterdir())
    stem = "legacy_gradlog-" + legacy_gradlog.__version__
    assert names == [stem + "-py3-none-any.whl", stem + ".tar.gz"]
    files = [str(built / name) for name in names]
    out = run(sys.executable, "-m", "twine", "check", "--strict", *files)
    assert out.count("PASSED") == 2


def facts_of(wheel):
    """Returns the metadata of an open wheel; its long description is the payload."""
    [name] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_what_is_published_has_its_pictures_or_names_them(built):
    pictures = {path.name for path in (ROOT / "docs").glob("*.png")}
    assert len(pictures) == 4
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(str(sdist)) as archive:
        names = archive.getnames()
    held = {Path(name).name for name in names if Path(name).parent.name == "docs"}
    assert held == pictures | {"pictures.py"}
    with zipfile.ZipFile(str(wheel_in(built))) as wheel:
        text = facts_of(wheel).get_payload(decode=True).decode("utf-8")
    assert "image::" not in text and ":alt:" not in text
    assert all("``docs/{}``".format(name) in text for name in pictures)


def test_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(str(wheel_in(built))) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        facts = facts_of(wheel)
    package = ROOT / "legacy_gradlog"
    expected = [path for path in package.rglob("*") if path.suffix != ".pyc"]
    expected = [path for path in expected if path.is_file()]
    assert sorted(names) == sorted(str(path.relative_to(ROOT)) for path in expected)
    required = [text for text in facts.get_all("Requires-Dist") if "extra" not in text]
    assert required == ["numpy", "packaging"]
    assert facts["Requires-Python"] == ">=3.6"


def test_console_script_runs_the_demo(environment, tmp_path):
    """From an environment that has the wheel only, with its own copy of the data."""
    clean = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    options = {"cwd": str(tmp_path), "env": dict(clean, COLUMNS="80")}
    code = "import legacy_gradlog; print(legacy_gradlog.__file__)"
    place = run(environment / "python", "-c", code, **options)
    assert Path(place.strip()).is_relative_to(environment.parent)
    program = environment / "legacy-gradlog"
    assert run(program, "run", "--help", **options).startswith(
        "usage: legacy-gradlog run [options] SCRIPT [ARGS...]\n"
    )
    out = run(program, "demo", "--epochs", "1", "--logdir", "logs", **options)
    assert "validation accuracy: " in out
    assert list((tmp_path / "logs" / "run-1").rglob("*tfevents*"))
