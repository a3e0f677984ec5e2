"""What is installed, what is known of it, and whether gradients are right here.

Starts `checkup` in a process of its own, which no broken package survives to tell, and
reports what that told. Imports no framework itself.
"""

import json
import platform
import shutil
import subprocess
import sys
import tempfile
import textwrap

from . import support
from .events import printable
from .progress import Progress
from .terminal import paint, say

__all__ = ["EXIT_CODES", "diagnose", "run"]

RIGHT, WRONG, NOTHING = 0, 1, 2

EXIT_CODES = """\
exit codes:
  0    every Keras that trains here has its gradients logged rightly
  1    one of them has not, or its training failed
  2    nothing can be trained here
  130  interrupted by Ctrl-C

--json prints {"python", "packages": {name: {"version", "problem"}},
"kerases": {name: {"state", "problem", "mode", "engine", "reason", "same_as"}},
"line", "line_is_exact", "works", "refused", "stock_defects", "exit_code"}.
A state is "right", "wrong", "failed" or "refused".
"""

_VERDICTS = {
    RIGHT: ("Gradients are logged rightly here.", "green"),
    WRONG: ("Gradients are not logged rightly here: see above.", "red"),
    NOTHING: (
        "No Keras can be trained and logged here. TensorFlow is installed with: "
        "python -m pip install tensorflow tensorboard",
        "red",
    ),
}
_COLOURS = {"right": "green", "wrong": "red", "failed": "red", "refused": "yellow"}
_TOLD = {
    "right": "right: ten steps agree with (weights before - after) / learning rate",
    "wrong": "WRONG: {}",
    "failed": "failed: {}",
    "refused": "not logged: {}",
}


def run(as_json):
    """Examines this environment and prints what was found.

    Args:
        as_json: Whether one JSON object is printed, not lines to read.

    Returns:
        The exit code: see `EXIT_CODES`.
    """
    with Progress("doctor:") as shown:
        found = diagnose(shown.update)
    if as_json:
        say(json.dumps(found, indent=2))
    else:
        for line in _lines(found):
            say(line)
    return found["exit_code"]


def diagnose(update=lambda text: None):
    """Examines this environment.

    Args:
        update: Called with what is being done.

    Returns:
        A dict, as `EXIT_CODES` describes it. Nothing is raised for a package that is
        missing or broken.
    """
    packages, kerases, line = {}, {}, (None, False)
    for facts in _checkup(update):
        if "package" in facts:
            packages[facts.pop("package")] = facts
        elif "keras" in facts:
            kerases.setdefault(facts.pop("keras"), {}).update(facts)
        else:
            line = facts["line"]
    name, is_tested = line
    [known] = [line for line in support.LINES if line.name == name] or [None]
    return {
        "python": platform.python_version(),
        "packages": packages,
        "kerases": kerases,
        "line": name,
        "line_is_exact": is_tested,
        "works": _plain(known.works) if known else None,
        "refused": [_plain(text) for text in known.refused] if known else [],
        "stock_defects": [_plain(text) for text in known.stock] if known else [],
        "exit_code": _exit_code(kerases),
    }


def _plain(text):
    return text.replace("``", "")


def _exit_code(kerases):
    states = {facts.get("state") for facts in kerases.values()}
    if states & {"wrong", "failed"}:
        return WRONG
    return RIGHT if "right" in states else NOTHING


def _checkup(update):
    """Yields what `checkup` tells, and what it was about where it breaks off."""
    # The same modules as here, wherever they were found.
    command = (
        "import sys; sys.path[:] = {!r}; "
        "from legacy_gradlog import checkup; checkup.main()".format(sys.path)
    )
    with tempfile.TemporaryFile() as noise:
        process = subprocess.Popen(
            [sys.executable, "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=noise,
        )
        doing = ""
        try:
            for line in process.stdout:
                facts = json.loads(line.decode("utf-8"))
                if "doing" in facts:
                    doing = facts["doing"]
                    update(doing)
                else:
                    yield facts
            process.wait()
        finally:
            process.stdout.close()
            process.kill()
            process.wait()
        if process.returncode:
            noise.seek(0)
            yield _broken_off(doing, process.returncode, noise.read())


def _broken_off(doing, code, noise):
    """Returns what is told of the package, or the Keras, that ended the process."""
    words = noise.decode("utf-8", "replace").strip().rpartition("\n")[2]
    how = "signal {}".format(-code) if code < 0 else "exit code {}".format(code)
    problem = "{} ended the process by {}: {}".format(doing, how, words or "no words")
    what, _, name = doing.partition(" ")
    if what == "training":
        return dict(keras=name, state="failed", problem=problem)
    return dict(package=name, version=None, problem=problem)


def _lines(found):
    yield "{:<12} {}".format("python", found["python"])
    for name, facts in found["packages"].items():
        version, problem = facts["version"], facts["problem"]
        told = printable(version) if version else paint(printable(problem), "yellow")
        yield "{:<12} {}".format(name, told)
    for name, facts in found["kerases"].items():
        yield ""
        if "same_as" in facts:
            yield "{} is {}".format(paint(name, "bold"), facts["same_as"])
            continue
        yield paint(name, "bold")
        if facts.get("engine"):
            yield "  engine: {} ({})".format(facts["engine"], facts["reason"])
        told = _TOLD[facts["state"]].format(printable(str(facts["problem"]), 600))
        yield "  " + paint(told, _COLOURS[facts["state"]])
    if found["line"]:
        yield ""
        yield "known of {}{}".format(
            found["line"], "" if found["line_is_exact"] else ", the nearest tested line"
        )
        for line in _wrapped("works", [found["works"]]):
            yield line
        for line in _wrapped("refused", found["refused"]):
            yield line
        for line in _wrapped("stock TensorBoard callback", found["stock_defects"]):
            yield line
    yield ""
    yield paint(*_VERDICTS[found["exit_code"]])


def _wrapped(title, items):
    text = "{}: {}".format(title, "; ".join(items))
    width = max(shutil.get_terminal_size().columns - 1, 40)
    return textwrap.wrap(
        text,
        width,
        initial_indent="  ",
        subsequent_indent="    ",
        break_on_hyphens=False,
    )
