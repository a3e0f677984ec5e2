"""What a terminal can show: lines, colours, characters.

Knows streams only, neither commands nor what they tell. A pipe, a file and a terminal
that wants none (``NO_COLOR``) get no colours; what cannot be encoded is escaped.
"""

import os
import sys

__all__ = ["can_print", "encodable", "is_terminal", "paint", "say"]

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


def can_print(text):
    """Whether stdout can show every character of a text."""
    return encodable(text, sys.stdout) == text


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
