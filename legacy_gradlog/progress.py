"""One line on a terminal that tells what a long command is doing.

Shown on stderr, only if that is a terminal, only after two seconds, and removed at the
end, so that neither a pipe nor a short command sees anything of it::

    with progress.Progress("reading events") as shown:
        for number, path in enumerate(paths):
            shown.update("{}/{} {}".format(number, len(paths), path))

Knows nothing of what it tells about. Nothing else should be printed within the block.
"""

import os
import sys
import threading
import time

from .events import printable
from .terminal import encodable, is_terminal

__all__ = ["Progress"]

#: Seconds before the line is shown.
DELAY = 2.0
#: Seconds between two states of it.
INTERVAL = 0.1
#: Columns, where the terminal does not tell.
WIDTH = 80


class Progress:
    """Shows what is being done within a `with` block.

    Args:
        title: What is being done: ``"reading events"``.
        delay: Seconds before anything is shown.
    """

    def __init__(self, title, delay=DELAY):
        self._title = title
        self._text = ""
        self._delay = delay
        self._due = None
        self._shown = 0
        self._lock = threading.Lock()
        self._stream = None
        self._timer = None

    def __enter__(self):
        if is_terminal(sys.stderr):
            self._stream = sys.stderr
            self._due = time.monotonic() + self._delay
            # What takes long may call `update` late or never.
            self._timer = threading.Timer(self._delay, self._show)
            self._timer.daemon = True
            self._timer.start()
        return self

    def update(self, text):
        """Tells where the work is, such as ``"12/40 files"``: any text."""
        self._text = text
        if self._due is not None and time.monotonic() >= self._due:
            self._show()

    def __exit__(self, *exception):
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            stream, self._stream, self._due = self._stream, None, None
            if self._shown:
                _write(stream, "\r{}\r".format(" " * self._shown))
                self._shown = 0

    def _show(self):
        with self._lock:
            if self._stream is None:
                return
            line = "{} {}".format(self._title, self._text).rstrip() + " ..."
            width = _width(self._stream) - 1
            line = encodable(printable(line, width), self._stream)[:width]
            _write(self._stream, "\r" + line.ljust(self._shown))
            self._shown = len(line)
            self._due = time.monotonic() + INTERVAL


def _write(stream, text):
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        # The terminal is gone. The work goes on.
        pass


def _width(stream):
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except (OSError, ValueError):
        return WIDTH
