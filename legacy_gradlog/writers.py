"""Where records go: packed into one `Summary` a step, handed over once.

Knows nothing of training. The stock callback's own writer is used where there is one,
since two event files that grow in one directory make TensorBoard lose the first.
"""

import contextlib
import itertools
import os
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
    "check_directory",
    "exclusive_second",
    "parse_scalars",
    "summarize",
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


def summarize(records, scalars, histograms, optimizer=None):
    """Returns one `Summary` of all weights of one step.

    Args:
        records: List of ``(tags.Weight, sketch.Record)``.
        scalars: The scalars to write, out of `SCALARS`.
        histograms: Whether histograms are written.
        optimizer: What the model calls the optimizer of these weights, where it has
            several: each has a norm over all of its own.
    """
    summary = runtime.summary_class()()
    for weight, record in records:
        if histograms:
            add_histogram(summary, weight.tag + "_grad", record)
        for name in scalars:
            tag = "grad_{}/{}".format(name, weight.path)
            summary.value.add(tag=tag, simple_value=SCALARS[name](record))
        if record.nonfinite:
            tag = "grad_nonfinite/" + weight.path
            summary.value.add(tag=tag, simple_value=record.nonfinite)
    if "norm" in scalars:
        total = sum(record.sum_squares for _, record in records)
        tag = "grad_global_norm" + ("/" + optimizer if optimizer else "")
        summary.value.add(tag=tag, simple_value=np.sqrt(total))
    return summary


def add_histogram(summary, tag, record):
    """Adds the non-empty buckets of one record as a `HistogramProto`."""
    histogram = summary.value.add(tag=tag).histo
    histogram.min = record.min
    histogram.max = record.max
    histogram.num = record.count
    histogram.sum = record.sum
    histogram.sum_squares = record.sum_squares
    filled = np.flatnonzero(record.counts)
    histogram.bucket_limit.extend(sketch.EDGES[filled + 1].tolist())
    histogram.bucket.extend(record.counts[filled].tolist())


class StockWriter:
    """Writes through the stock callback's writer, which the stock callback closes."""

    def __init__(self, writer):
        self._writer = writer
        self._flushed = time.time()

    def write(self, summary, step):
        """Hands over one `Summary`; on disk after at most 30 seconds."""
        if hasattr(self._writer, "add_summary"):
            self._writer.add_summary(summary, step)
        else:
            tf = runtime.tensorflow()
            # Inside `fit` the stock callback's own `record_if` gate is closed.
            with tf.summary.record_if(True), self._writer.as_default():
                tf.summary.experimental.write_raw_pb(
                    summary.SerializeToString(), step=step
                )
        if time.time() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self):
        """Puts everything written so far on disk."""
        self._flushed = time.time()
        self._writer.flush()

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
        super().__init__(writer)

    def close(self):
        self._writer.close()


class NoWriter:
    """Writes nothing and makes no file."""

    def write(self, summary, step):
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
        writable = os.access(log_dir, os.W_OK | os.X_OK)
        cause = "permission denied"
    except OSError as error:
        writable, cause = False, error
    if not writable:
        raise LogDirectoryError(
            "`log_dir` must be a directory that can be written. Received: {!r} ({}). "
            "Give another directory.".format(log_dir, cause)
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
