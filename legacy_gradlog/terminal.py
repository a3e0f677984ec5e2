"""What a terminal can show: lines, colours, characters.

Knows streams only, neither commands nor what they tell. A pipe, a file and a terminal
that wants none (``NO_COLOR``) get no colours; what cannot be encoded is escaped. Text
from files must have passed `events.printable` before it gets here.
"""

import os
import sys
import warnings

import numpy as np

__all__ = [
    "bars",
    "encodable",
    "is_terminal",
    "paint",
    "quieten_frameworks",
    "say",
    "sparkline",
]

BARS = "▁▂▃▄▅▆▇█"
#: For a terminal that cannot show them.
ASCII_BARS = "_.:-=+*#"
SPARKLINE_WIDTH = 45

_COLOURS = {"red": 31, "green": 32, "yellow": 33, "bold": 1}


def say(text):
    """Prints a line on stdout at once, escaping what the terminal cannot show."""
    print(encodable(text, sys.stdout), flush=True)


def paint(text, colour, stream=None):
    """Returns a text in a colour, where the stream is a terminal that wants colours.

    Args:
        text: What is shown.
        colour: ``"red"``, ``"green"``, ``"yellow"`` or ``"bold"``.
        stream: Where it will be written, None for stdout.
    """
    code = _COLOURS[colour]
    if not _wants_colours(sys.stdout if stream is None else stream):
        return text
    return "\033[{}m{}\033[0m".format(code, text)


def sparkline(values, characters, width=SPARKLINE_WIDTH):
    """Returns a line of bars, from 0 to the largest of ``values``.

    Args:
        values: Non-negative numbers. More than ``width`` of them are averaged in runs.
        characters: The bars to use, lowest first.
        width: Largest length of the line.
    """
    parts = np.array_split(np.asarray(values), min(width, len(values)))
    heights = np.array([part.mean() for part in parts])
    levels = np.ceil(heights / (heights.max() or 1) * len(characters)).astype(int)
    return "".join(characters[max(level, 1) - 1] for level in levels)


def bars():
    """Returns the bars that stdout can show, lowest first."""
    return BARS if encodable(BARS, sys.stdout) == BARS else ASCII_BARS


def encodable(text, stream):
    """Returns a text with Python escapes for what a stream cannot encode."""
    encoding = getattr(stream, "encoding", None) or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _wants_colours(stream):
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    # Consoles of Windows take such codes only where somebody has switched that on.
    return os.name != "nt" and is_terminal(stream)


def is_terminal(stream):
    """Whether somebody looks at what is written to a stream."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        # No stream at all, or a closed one.
        return False


def quieten_frameworks():
    """Silences the chatter with which TensorFlow starts; call it before the import."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # The first TensorFlow releases use NumPy in ways that later ones warn about, and
    # 1.4 was compiled for another Python.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", "compiletime version", RuntimeWarning)
