"""Where records go: packed into one `Event` a step, handed over once.

Knows nothing of training. The stock callback's own writer is used where there is one,
since two event files that grow in one directory make TensorBoard lose the first.
"""

import contextlib
import errno
import itertools
import os
import tempfile
import time

import numpy as np

from . import runtime, sketch
from .errors import InvalidArgumentError, LogDirectoryError

try:
    import fcntl
except ImportError:
    fcntl = None

__all__ = [
    "NoWriter",
    "OwnWriter",
    "StockWriter",
    "add_histograms",
    "check_directory",
    "event_of",
    "exclusive_second",
    "new_event",
    "parse_scalars",
]

#: What ``scalars`` may name, and how each is read from a record.
SCALARS = {
    "mean_abs": lambda record: record.mean_abs,
    "norm": lambda record: record.norm,
    "max_abs": lambda record: record.max_abs,
}

FLUSH_SECONDS = 30

_file_numbers = itertools.count()


def parse_scalars(value, argument):
    """Returns a ``scalars`` argument as a tuple.

    Raises:
        InvalidArgumentError: Not a list of known names.
    """
    rule = "`{}` must be a list of names out of {}.".format(
        argument, ", ".join('"{}"'.format(name) for name in SCALARS)
    )
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise InvalidArgumentError("{} Received: {!r}.".format(rule, value))
    value = tuple(value)
    for name in value:
        if not isinstance(name, str) or name not in SCALARS:
            raise InvalidArgumentError("{} Received: {!r}.".format(rule, name))
    return value


def new_event(step):
    """Returns an `Event` of now without anything in it."""
    return runtime.event_class()(step=step, wall_time=time.time())


def event_of(step, weights, records, counts, scalars, histograms, optimizer=None):
    """Returns one `Event` of all weights of one step.

    Args:
        step: The number that it is shown at.
        weights: List of `tags.Weight`.
        records: The `sketch.Record` of each.
        counts: Those of the records together, shape ``(n, sketch.SIZE)``.
        scalars: The scalars to write, out of `SCALARS`.
        histograms: Whether histograms are written.
        optimizer: What the model calls the optimizer of these weights, where it has
            several: each has a norm over all of its own.
    """
    event = new_event(step)
    summary = event.summary
    if histograms:
        tags = [weight.tag + "_grad" for weight in weights]
        add_histograms(summary, tags, records, counts)
    for weight, record in zip(weights, records):
        for name in scalars:
            tag = "grad_{}/{}".format(name, weight.path)
            summary.value.add(tag=tag, simple_value=SCALARS[name](record))
        if record.nonfinite:
            tag = "grad_nonfinite/" + weight.path
            summary.value.add(tag=tag, simple_value=record.nonfinite)
    if "norm" in scalars:
        total = sum(record.sum_squares for record in records)
        tag = "grad_global_norm" + ("/" + optimizer if optimizer else "")
        summary.value.add(tag=tag, simple_value=np.sqrt(total))
    return event


def add_histograms(summary, tags, records, counts):
    """Adds records as `HistogramProto`: their non-empty buckets, and their gaps.

    The buckets of all of them are found at once, in ``counts``, of shape ``(n,
    sketch.SIZE)``: one after the other takes most of the time of a logged step.

    Readers let a bucket begin where the one before it ends. So that none seems to reach
    across a gap, the last empty bucket of each gap is stored, too.
    """
    width = sketch.NONFINITE
    # NumPy looks through integers more slowly than it makes truth values of them.
    filled = np.flatnonzero(counts[:, :width] != 0)
    rows = filled // width
    after = 1 + np.flatnonzero((np.diff(filled) > 1) & (rows[1:] == rows[:-1]))
    stored = np.insert(filled, after, filled[after] - 1)
    ends = np.searchsorted(stored, width * np.arange(1, len(records) + 1)).tolist()
    rows, columns = stored // width, stored % width
    limits = _doubles(sketch.EDGES[1:][columns])
    counts = _doubles(counts[rows, columns])
    for tag, record, start, end in zip(tags, records, [0] + ends, ends):
        histogram = summary.value.add(tag=tag).histo
        histogram.min = record.min
        histogram.max = record.max
        histogram.num = record.count
        histogram.sum = record.sum
        histogram.sum_squares = record.sum_squares
        if end > start:
            # Taken over as bytes: number by number takes ten times as long.
            histogram.MergeFromString(
                _packed(_BUCKET_LIMIT, limits[8 * start : 8 * end])
                + _packed(_BUCKET, counts[8 * start : 8 * end])
            )


#: The numbers of two fields of `HistogramProto`, both ``repeated double``.
_BUCKET_LIMIT, _BUCKET = 6, 7


def _doubles(values):
    """Returns the bytes of doubles in the wire format of protocol buffers."""
    return values.astype("<f8").tobytes()


def _packed(field, data):
    """Returns a packed field of protocol buffers."""
    size, head = len(data), [field << 3 | 2]
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes(head + [size]) + data


class StockWriter:
    """Writes through the stock callback's writer, which the stock callback closes.

    Args:
        writer: A `FileWriter` of TensorFlow 1, or a writer of TensorFlow 2.
        log_dir: The directory of its event file.
    """

    def __init__(self, writer, log_dir):
        self._writer = writer
        self._log_dir = os.fspath(log_dir)
        self._flushed = time.time()
        runtime.flush_each_event(writer)
        self._path = runtime.event_file(writer)
        self._size = self._handed_over = 0
        if self._path is not None and self._is_local():
            self._size = os.path.getsize(self._path)

    def write(self, event):
        """Hands over one `Event`; on disk after at most 30 seconds."""
        if hasattr(self._writer, "add_event"):
            self._handed_over += event.ByteSize()
            self._writer.add_event(event)
        else:
            summary = event.summary.SerializeToString()
            self._handed_over += len(summary)
            runtime.write_summary(self._writer, summary, event.step)
            self._writer.flush()
        if time.time() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self):
        """Puts everything written so far on disk.

        Raises:
            OSError: It is not there: TensorFlow goes on writing into a file that was
                deleted, and before 2.2 drops silently what a full disk does not take.
        """
        self._flushed = time.time()
        self._writer.flush()
        if not self._is_local():
            return
        if self._path is None:
            _check_own_file(self._log_dir)
            return
        handed_over, self._handed_over = self._handed_over, 0
        before, self._size = self._size, os.path.getsize(self._path)
        if self._size < before + handed_over:
            raise OSError(
                errno.EIO, "the disk did not take all that was written", self._path
            )

    def _is_local(self):
        return "://" not in self._log_dir

    def close(self):
        """Leaves the writer open for the stock callback."""


class OwnWriter(StockWriter):
    """Writes event files of our own into exactly the directory it is given."""

    def __init__(self, log_dir):
        check_directory(log_dir)
        log_dir = os.fspath(log_dir)
        tf = runtime.compat_v1()
        # TensorFlow 1 names the file by the second alone.
        suffix = ".{}.{}.gradlog".format(os.getpid(), next(_file_numbers))
        # Refused in eager mode, unless made inside a graph.
        with tf.Graph().as_default():
            writer = tf.summary.FileWriter(log_dir, filename_suffix=suffix)
        super().__init__(writer, log_dir)

    def close(self):
        self._writer.close()


def _check_own_file(log_dir):
    """Raises an error where no event file of this process is in a directory any more.

    The writers of TensorFlow 2 do not tell their file, but name it by the process.
    """
    mine = ".{}.".format(os.getpid())
    if not any(mine in name for name in os.listdir(log_dir)):
        raise FileNotFoundError(errno.ENOENT, "the event file was deleted", log_dir)


class NoWriter:
    """Writes nothing and makes no file."""

    def write(self, event):
        """Drops what another process writes."""

    def flush(self):
        """Does nothing."""

    def close(self):
        """Does nothing."""


def check_directory(log_dir):
    """Makes a local log directory.

    Raises:
        LogDirectoryError: It cannot be made or written.
    """
    log_dir = os.fspath(log_dir)
    if "://" in log_dir:
        return
    try:
        os.makedirs(log_dir, exist_ok=True)
        # To root, permissions say nothing.
        with tempfile.TemporaryFile(dir=log_dir):
            pass
    except OSError as error:
        raise LogDirectoryError(
            "`log_dir` must be a directory that can be written. Received: {!r} ({}). "
            "Give another directory.".format(log_dir, error)
        )


@contextlib.contextmanager
def exclusive_second(log_dir):
    """Makes sure that an event file opened within does not overwrite another.

    TensorFlow 1 names an event file by the second and truncates what is there. Waits
    for a second that no file of the directory has, and keeps others of this package
    out meanwhile. The file must be on disk when the block ends.
    """
    log_dir = os.fspath(log_dir)
    if "://" in log_dir:
        yield
        return
    os.makedirs(log_dir, exist_ok=True)
    directory = os.open(log_dir, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(directory, fcntl.LOCK_EX)
        while any(
            name.startswith("events.out.tfevents.{}.".format(int(time.time())))
            for name in os.listdir(log_dir)
        ):
            time.sleep(0.02)
        yield
    finally:
        os.close(directory)
