"""What a terminal shows: a real pseudo-terminal, and a pipe beside it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parent.parent)

#: A real one has these set by whoever started the tests.
_NEUTRAL = {"NO_COLOR": "", "TERM": "xterm", "PYTHONPATH": ROOT}


def on_terminal(code, stdout=False, **environment):
    """Runs a program whose stderr, or stdout, is a terminal.

    Returns:
        Exit code, what the terminal got, what the other stream, a pipe, got.
    """
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    streams["stdout" if stdout else "stderr"] = theirs
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=dict(os.environ, **dict(_NEUTRAL, **environment)),
        **streams,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:
            # The other end is closed.
            break
        if not part:
            break
        seen += part
    os.close(ours)
    piped = (process.stderr if stdout else process.stdout).read()
    return process.wait(), seen.decode("utf-8"), piped.decode("utf-8")


_PROGRESS = """
import sys
from legacy_gradlog.progress import Progress

with Progress("reading", delay=0) as shown:
    shown._timer.join()
    for text in {texts!r}:
        shown._due = 0
        shown.update(text)
print("done")
"""


def screen(seen):
    """Returns every state of the line: what stands between carriage returns."""
    return [state for state in re.split("\r+\n?", seen) if state]


def test_progress_is_one_line_that_goes_away():
    code, seen, out = on_terminal(_PROGRESS.format(texts=["3 files of 70", "4"]))
    assert (code, out) == (0, "done\n")
    assert "\n" not in seen
    states = screen(seen)
    assert states[:2] == ["reading ...", "reading 3 files of 70 ..."]
    # What was longer is overwritten, and at the end all of it is.
    assert states[2] == "reading 4 ...".ljust(len(states[1]))
    assert set(states[-1]) == {" "} and len(states[-1]) >= len(states[2].rstrip())
    assert seen.endswith("\r")


def test_progress_keeps_to_the_width_and_shows_text_only():
    texts = ["x" * 500, "\033[31m\nred"]
    code, seen, _ = on_terminal(_PROGRESS.format(texts=texts))
    assert code == 0
    assert "\033" not in seen and "\n" not in seen
    states = screen(seen)
    assert max(map(len, states)) == 79
    assert "reading \\x1b[31m\\nred ..." in [state.rstrip() for state in states]


def test_progress_is_silent_before_its_time():
    code, seen, _ = on_terminal(
        "from legacy_gradlog.progress import Progress\n"
        "with Progress('reading', delay=60) as shown: shown.update('all')"
    )
    assert (code, seen) == (0, "")


def test_progress_is_silent_in_a_pipe():
    code = _PROGRESS.format(texts=["all"]).replace("    shown._timer.join()\n", "")
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=dict(os.environ, **_NEUTRAL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.communicate() == (b"done\n", b"")
    assert process.returncode == 0


_PAINT = "from legacy_gradlog.terminal import paint; print(paint('bad', 'red'))"


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, "\033[31mbad\033[0m"),
        ({"NO_COLOR": "1"}, "bad"),
        ({"TERM": "dumb"}, "bad"),
    ],
    ids=["colour", "NO_COLOR", "dumb"],
)
def test_colour_only_on_a_terminal_that_wants_it(environment, expected):
    code, seen, _ = on_terminal(_PAINT, stdout=True, **environment)
    assert (code, seen.strip()) == (0, expected)
    output = subprocess.check_output(
        [sys.executable, "-c", _PAINT], env=dict(os.environ, **_NEUTRAL)
    )
    assert output.decode().strip() == "bad"


def test_what_cannot_be_shown_is_escaped():
    code, seen, _ = on_terminal(
        "from legacy_gradlog.terminal import bars, say\n"
        "say('a\\u2588b'); print(bars())",
        stdout=True,
        PYTHONIOENCODING="ascii",
    )
    assert code == 0
    assert seen.split() == ["a\\u2588b", "_.:-=+*#"]
