"""What is printed, on whatever terminal there is.

Knows characters and nothing of what they are about. Text from files must have passed
`events.printable` before it gets here.
"""

import os
import sys
import warnings

import numpy as np

__all__ = ["bars", "quieten_frameworks", "say", "sparkline"]

BARS = "▁▂▃▄▅▆▇█"
#: For a terminal that cannot show them.
ASCII_BARS = "_.:-=+*#"
SPARKLINE_WIDTH = 45


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
    try:
        BARS.encode(_encoding())
    except UnicodeEncodeError:
        return ASCII_BARS
    return BARS


def say(text):
    """Prints a line at once, escaping what the terminal cannot show."""
    encoding = _encoding()
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _encoding():
    return getattr(sys.stdout, "encoding", None) or "ascii"


def quieten_frameworks():
    """Silences the chatter with which TensorFlow starts; call it before the import."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # The first TensorFlow releases use NumPy in ways that later ones warn about, and
    # 1.4 was compiled for another Python.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", "compiletime version", RuntimeWarning)
