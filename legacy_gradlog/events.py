"""Event files, whoever wrote them: what is in them, and what is not to be read.

A file is a row of records: a length, its checksum, the data, its checksum. Nothing of
it is trusted. What is damaged is left out and counted; time is bounded by the size of
what is read, memory by that of one record, of which one value at a time is parsed.
Knows neither training nor how anything is shown, but for `printable`, which every tag
and run must pass on its way to a terminal.
"""

import collections
import os
import stat
import struct
from typing import Any, NamedTuple, Optional

import numpy as np

from . import runtime

__all__ = ["Histogram", "Reader", "Value", "checksum", "printable"]

#: Bytes. All weights of one step are one record; a thousand of them take some 5 MB.
LONGEST_RECORD = 1 << 25
#: A parsed value can take a hundred times its size, if somebody means it to.
LONGEST_VALUE = 1 << 20
#: Links are followed, and one may lead to the whole machine.
MOST_DIRECTORIES = 10000

# Causes for which something is left out. The rest of a file, or a whole one:
CUT_OFF = "the file ends within a record, as one does that is being written"
BAD_LENGTH = "the length of a record is damaged, so the rest of the file is not read"
NOT_REGULAR = "not a regular file"
NOT_OPENED = "cannot be opened or read"
# One record or value:
BAD_DATA = "the data of a record is damaged"
TOO_LONG = "a record is longer than {} bytes".format(LONGEST_RECORD)
NO_EVENT = "a record is no event"
LONG_VALUE = "a value is longer than {} bytes".format(LONGEST_VALUE)
BAD_VALUE = "a value is no summary, or its parts do not agree"
# Directories:
TOO_MANY = "not entered, after {} directories".format(MOST_DIRECTORIES)

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_TIME = struct.Struct("<d")
#: By `DataType`, the NumPy type of a tensor and the field that may list its values.
_NUMBERS = {1: ("<f4", "float_val"), 2: ("<f8", "double_val")}


class Histogram(NamedTuple):
    """One histogram, in whichever form it was written.

    Attributes:
        lefts, rights: float64, shape ``(n,)``: the edges of each bucket. The old form
            has right edges only; there each bucket begins where the one before ends.
        counts: float64, shape ``(n,)``.
        min, max: The extremes; in the new form, the outer edges.
        count: Number of values.
        sum, sum_squares: None in the new form, which does not have them.
    """

    lefts: np.ndarray
    rights: np.ndarray
    counts: np.ndarray
    min: float
    max: float
    count: float
    sum: Optional[float]
    sum_squares: Optional[float]


class Value(NamedTuple):
    """One value of one tag at one step.

    Attributes:
        run: Its directory below the one that is read, ``.`` for that itself.
        tag: As it was written: pass it through `printable`.
        step: The step.
        wall_time: Seconds since the epoch.
        data: A float, a `Histogram`, or None for anything else, such as an image.
    """

    run: str
    tag: str
    step: int
    wall_time: float
    data: Any


class Reader:
    """Iterates over the `Value`s of all event files below a directory.

    Runs and files come in the order of their names, the values of a file in the order
    in which they were written. Every iteration reads anew.

    Args:
        log_dir: A local directory.

    Attributes:
        skipped: `Counter` of ``(path, cause)``: what the last iteration left out.
    """

    def __init__(self, log_dir):
        self._log_dir = os.fspath(log_dir)
        self.skipped = collections.Counter()

    def __iter__(self):
        self.skipped.clear()
        parse = runtime.summary_value_class().FromString
        for run, path in self._files():
            for data in self._records(path):
                try:
                    step, wall_time, values = _values_of(data)
                except (ValueError, TypeError, struct.error):
                    self.skipped[path, NO_EVENT] += 1
                    continue
                for value in values:
                    if len(value) > LONGEST_VALUE:
                        self.skipped[path, LONG_VALUE] += 1
                        continue
                    try:
                        value = parse(bytes(value))
                        number = _data_of(value)
                    except Exception:
                        # What is raised differs between implementations of protobuf.
                        self.skipped[path, BAD_VALUE] += 1
                        continue
                    yield Value(run, value.tag, step, wall_time, number)

    def _files(self):
        """Yields ``(run, path)`` of every event file, each once."""
        seen = set()
        entered = 0
        waiting = [self._log_dir]
        while waiting:
            folder = waiting.pop()
            if not _is_new(folder, seen):
                continue
            entered += 1
            if entered > MOST_DIRECTORIES:
                self.skipped[folder, TOO_MANY] += 1
                return
            try:
                names = sorted(os.listdir(folder))
            except OSError:
                self.skipped[folder, NOT_OPENED] += 1
                continue
            paths = [os.path.join(folder, name) for name in names]
            waiting += [path for path in reversed(paths) if os.path.isdir(path)]
            run = os.path.relpath(folder, self._log_dir).replace(os.sep, "/")
            for name, path in zip(names, paths):
                if "tfevents" in name and not os.path.isdir(path):
                    if _is_new(path, seen):
                        yield run, path

    def _records(self, path):
        """Yields the data of every sound record of a file, as long as it is now."""
        try:
            # To open a pipe would wait for somebody who writes.
            if not stat.S_ISREG(os.stat(path).st_mode):
                self.skipped[path, NOT_REGULAR] += 1
                return
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                for data in self._records_of(file, size, path):
                    yield data
        except OSError:
            self.skipped[path, NOT_OPENED] += 1

    def _records_of(self, file, size, path):
        end = 0
        while end < size:
            header = file.read(12)
            if len(header) < 12:
                self.skipped[path, CUT_OFF] += 1
                return
            if not _is_sound(header):
                self.skipped[path, BAD_LENGTH] += 1
                return
            length = _LENGTH.unpack(header[:8])[0] + 4
            end += 12 + length
            if end > size:
                self.skipped[path, CUT_OFF] += 1
                return
            if length > LONGEST_RECORD:
                file.seek(end)
                self.skipped[path, TOO_LONG] += 1
                continue
            data = file.read(length)
            if _is_sound(data):
                yield data[:-4]
            else:
                self.skipped[path, BAD_DATA] += 1


def _is_new(path, seen):
    """Whether a file or directory is in none of the places seen; notes it there.

    A path that leads nowhere, or in circles, is left to whoever opens it.
    """
    try:
        status = os.stat(path)
    except OSError:
        return True
    place = status.st_dev, status.st_ino
    if place in seen:
        return False
    seen.add(place)
    return True


# Events are taken apart here: a parser of protobuf makes objects of everything that
# a record holds, and sixteen million empty values fit into one.


def _values_of(event):
    """Returns the step and time of an event, and an iterable of its raw values.

    Raises:
        ValueError, TypeError, struct.error: It is no event.
    """
    step, wall_time, summaries = 0, 0.0, []
    for number, value in _fields(memoryview(event)):
        if number == 1:
            (wall_time,) = _TIME.unpack(value)
        elif number == 2:
            # An int64: the upper half is negative.
            step = (value + (1 << 63)) % (1 << 64) - (1 << 63)
        elif number == 5:
            # All of it is checked before any of it is used.
            collections.deque(_fields(value), maxlen=0)
            summaries.append(value)
    return step, wall_time, _values_within(summaries)


def _values_within(summaries):
    for summary in summaries:
        for number, value in _fields(summary):
            if number == 1 and not isinstance(value, int):
                yield value


def _fields(message):
    """Yields ``(number, value)`` of each field: an integer, or a part of the message.

    Raises:
        ValueError: It is no message.
    """
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(message, place)
        else:
            if kind == 2:
                size, place = _varint(message, place)
            else:
                size = {1: 8, 5: 4}.get(kind, len(message) + 1)
            value = message[place : place + size]
            place += size
            if place > len(message):
                raise ValueError("a field that ends outside of its message")
        yield key >> 3, value


def _varint(message, place):
    number = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            break
        byte = message[place]
        place += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place
    raise ValueError("a number that does not end")


def _data_of(value):
    """Returns the number or the `Histogram` of a `Summary.Value`, or None.

    Raises:
        ValueError: Its parts do not agree.
    """
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return value.simple_value
    if kind == "histo":
        histogram = value.histo
        rights, counts = np.array(histogram.bucket_limit), np.array(histogram.bucket)
        if len(rights) != len(counts):
            raise ValueError
        lefts = np.append([histogram.min], rights[:-1])[: len(rights)]
        return Histogram(
            lefts,
            rights,
            counts,
            histogram.min,
            histogram.max,
            histogram.num,
            histogram.sum,
            histogram.sum_squares,
        )
    if kind == "tensor" and value.tensor.dtype in _NUMBERS:
        return _data_of_tensor(value.tensor)
    return None


def _data_of_tensor(tensor):
    dtype, field = _NUMBERS[tensor.dtype]
    if tensor.tensor_content:
        numbers = np.frombuffer(tensor.tensor_content, dtype).astype(np.float64)
    else:
        numbers = np.array(getattr(tensor, field), np.float64)
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    if not shape:
        (number,) = numbers
        return float(number)
    if len(shape) != 2 or shape[1] != 3:
        return None
    if shape[0] * 3 != len(numbers):
        raise ValueError
    lefts, rights, counts = numbers.reshape(-1, 3).T
    lowest = lefts[0] if len(lefts) else 0.0
    highest = rights[-1] if len(rights) else 0.0
    count = counts.sum()
    return Histogram(lefts, rights, counts, lowest, highest, count, None, None)


def printable(text, longest=200):
    """Returns a text that a terminal takes for nothing but text, on one line.

    Control characters, and those that change what is around them, are written as
    Python escapes. In a page it must be quoted like any text.

    Args:
        text: Any string.
        longest: The rest is left out, with the number of characters that it has.
    """
    rest = len(text) - longest
    shown = "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape").decode("ascii")
        for character in text[:longest]
    )
    return shown if rest <= 0 else "{}... ({} more)".format(shown, rest)


# The checksum is linear: each byte of a block adds, by XOR, a number that depends on
# its value and its place alone. NumPy looks up those of a whole block at once.

_BLOCK = 128
#: Bytes that are looked up at a time.
_PIECE = 1 << 16


def _places():
    """Returns what a byte adds to the checksum, uint32, shape ``(_BLOCK, 256)``."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ (table & 1) * np.uint32(0x82F63B78)
    places = np.empty((_BLOCK, 256), np.uint32)
    places[-1] = table
    for place in range(_BLOCK - 2, -1, -1):
        after = places[place + 1]
        places[place] = (after >> 8) ^ table[after & 255]
    return places


_PLACES = _places()
_BYTES = _PLACES[-1].tolist()
#: The state so far is added to the first four bytes of a block.
_FIRST = [_PLACES[place].tolist() for place in range(4)]
_STARTS = np.arange(0, _BLOCK * 256, 256)


def checksum(data):
    """Returns the CRC-32C of bytes."""
    state = 0xFFFFFFFF
    start = len(data) % _BLOCK
    for byte in data[:start]:
        state = (state >> 8) ^ _BYTES[(state ^ byte) & 255]
    first, second, third, fourth = _FIRST
    for piece in range(start, len(data), _PIECE):
        count = min(_PIECE, len(data) - piece)
        blocks = np.frombuffer(data, np.uint8, count, piece).reshape(-1, _BLOCK)
        parts = np.bitwise_xor.reduce(_PLACES.take(blocks + _STARTS), axis=1)
        for part in parts.tolist():
            state = (
                first[state & 255]
                ^ second[state >> 8 & 255]
                ^ third[state >> 16 & 255]
                ^ fourth[state >> 24]
                ^ part
            )
    return state ^ 0xFFFFFFFF


def _is_sound(data):
    """Whether the last four bytes are the checksum of the others, masked."""
    number = checksum(data[:-4])
    # What is stored is turned, so that the checksum of a checksum is none.
    masked = ((number >> 15 | number << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return _CHECKSUM.pack(masked) == data[-4:]
