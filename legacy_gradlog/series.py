"""What event files hold, as a series of numbers for each run and tag.

Of a histogram the buckets are read and dropped: a record keeps a few numbers. Knows
which bucket layout is this package's own, since only that one tells exact zeros. Must
not know what the numbers mean to whoever asks, nor how they are shown.
"""

import array
import collections
import math
import re
from typing import Dict, List, NamedTuple, Tuple

import numpy as np

from . import events, progress, runtime, sketch, terminal
from .errors import LogDirectoryError, UnsupportedError

__all__ = [
    "HISTOGRAM",
    "Log",
    "PERCENTS",
    "Run",
    "SCALAR",
    "Series",
    "is_gradient",
    "is_own",
    "nonfinite_tag",
    "norms",
    "path_of",
    "read",
]

#: What a record of a scalar keeps. ``order`` counts the values of its run as they were
#: written; ``wall_time`` is in seconds.
SCALAR = ("order", "step", "wall_time", "value")
#: What a record of a histogram keeps. ``sum`` and ``sum_squares`` are NaN where the
#: form does not have them, ``zeros`` where the buckets do not tell exact zeros. ``own``
#: is 1 where the buckets are this package's, else 0, and NaN where there are none.
HISTOGRAM = (
    "order",
    "step",
    "wall_time",
    "count",
    "min",
    "max",
    "sum",
    "sum_squares",
    "size",
    "zeros",
    "own",
)
#: The percentiles that a record keeps besides, where they are asked for.
PERCENTS = (0, 5, 25, 50, 75, 95, 100)

#: A record takes some 90 bytes, and 150 with its percentiles.
MOST_RECORDS = 1 << 22
MOST_SERIES = 1 << 16

#: Values read between two reports of how far it is.
REPORT_EVERY = 1000

# Causes for which something is left out, besides those of `events`.
TOO_MANY_RECORDS = "more than {} values".format(MOST_RECORDS)
TOO_MANY_SERIES = "more than {} tags".format(MOST_SERIES)


class Series:
    """The records of one tag in one run, in the order in which they were written.

    ``series["step"]`` is the column of that name: float64, shape ``(n,)``.

    Args:
        fields: The names of the columns.
    """

    def __init__(self, fields):
        self.fields = fields
        # One flat array a series: a million empty lists would take more than a log.
        self._numbers = array.array("d")

    def __len__(self):
        return len(self._numbers) // len(self.fields)

    def __getitem__(self, field):
        return self.table()[:, self.fields.index(field)]

    def add(self, numbers):
        """Appends one record: a number for each field."""
        self._numbers.extend(numbers)

    def table(self):
        """Returns all records: float64, shape ``(n, number of fields)``."""
        # A copy: the array cannot grow while something looks into it.
        return np.array(self._numbers).reshape(-1, len(self.fields))

    def within(self, first, last):
        """Returns the records from step ``first`` to step ``last``, both included."""
        table = self.table()
        step = table[:, self.fields.index("step")]
        chosen = Series(self.fields)
        chosen.add(table[(step >= first) & (step <= last)].ravel())
        return chosen


class Run(NamedTuple):
    """One directory with event files: its series by tag, in the order written."""

    name: str
    histograms: Dict[str, Series]
    scalars: Dict[str, Series]

    def gradients(self):
        """Returns the histograms of gradients, by tag."""
        return {t: series for t, series in self.histograms.items() if is_gradient(t)}


class Log(NamedTuple):
    """All that was read below a directory.

    Attributes:
        runs: By name, in the order of their names.
        skipped: ``(path, cause, number)`` of what was left out.
    """

    runs: Dict[str, Run]
    skipped: List[Tuple[str, str, int]]


def is_gradient(tag):
    """Whether a tag names a gradient: all tools that write them call them so."""
    return re.search("grad", tag, re.IGNORECASE) is not None


def path_of(tag):
    """Returns the weight of a tag: ``dense/kernel`` of ``dense/kernel_0_grad``."""
    return re.sub(r"(_0)?_grad$", "", tag)


def nonfinite_tag(tag):
    """Returns where this package counts what is not finite of a histogram's weight."""
    return "grad_nonfinite/" + path_of(tag)


def is_own(histograms):
    """Whether this package wrote a `Series`: no bucket is anybody else's."""
    own = histograms["own"]
    return bool((own == 1).any() and not (own == 0).any())


def read(log_dir, percentiles=False):
    """Reads all event files below a directory.

    Args:
        log_dir: A local directory.
        percentiles: Whether a record of a histogram keeps its `PERCENTS` as well, in
            columns of these numbers.

    Returns:
        A `Log`.

    Raises:
        LogDirectoryError: There is no event file to be read.
        UnsupportedError: Neither TensorBoard nor TensorFlow is there to parse them.
    """
    reader = events.Reader(log_dir)
    log = _Collector(HISTOGRAM + PERCENTS if percentiles else HISTOGRAM)
    terminal.quieten_frameworks()
    try:
        runtime.summary_value_class()
    except ImportError as error:
        raise UnsupportedError(
            "To read event files there must be TensorBoard or TensorFlow. Received: "
            "{}. Install one with: python -m pip install tensorboard".format(error)
        ) from error
    with progress.Progress("reading events") as shown:
        for number, value in enumerate(reader, 1):
            log.add(value)
            if not number % REPORT_EVERY:
                shown.update("{} values, {}".format(number, value.run))
    skipped = reader.skipped + log.skipped
    if not log.runs:
        causes = sorted({cause for _, cause in skipped})
        raise LogDirectoryError(
            "`LOGDIR` must be a directory with event files. Received: {}, where no "
            "value could be read ({}). Give the directory that a callback was "
            "given.".format(
                events.printable(str(log_dir)),
                "; ".join(causes) or "there is no event file",
            )
        )
    return Log(
        log.runs,
        sorted((path, cause, number) for (path, cause), number in skipped.items()),
    )


class _Collector:
    """Takes values as they are read, and makes series of them.

    Args:
        fields: What a record of a histogram keeps.
    """

    def __init__(self, fields):
        self.runs = {}
        self.skipped = collections.Counter()
        self._fields = fields
        self._records = self._series = 0
        self._orders = collections.Counter()

    def add(self, value):
        run = self.runs.setdefault(value.run, Run(value.run, {}, {}))
        place = self._orders[value.run], value.step, value.wall_time
        self._orders[value.run] += 1
        if isinstance(value.data, events.Histogram):
            histogram, percents = value.data, self._fields[len(HISTOGRAM) :]
            home, fields = run.histograms, self._fields
            numbers = place + _describe(histogram, percents)
        elif isinstance(value.data, float):
            home, fields = run.scalars, SCALAR
            numbers = place + (value.data,)
        else:
            return
        if self._records == MOST_RECORDS:
            self.skipped[value.run, TOO_MANY_RECORDS] += 1
            return
        if value.tag not in home:
            if self._series == MOST_SERIES:
                self.skipped[value.run, TOO_MANY_SERIES] += 1
                return
            self._series += 1
            home[value.tag] = Series(fields)
        self._records += 1
        home[value.tag].add(numbers)


def _describe(histogram, percents):
    """Returns what a record keeps of a `Histogram`, from ``count`` on."""
    own, zeros = math.nan, math.nan
    lefts, rights = histogram.lefts, histogram.rights
    if len(rights):
        places = np.searchsorted(sketch.EDGES, rights)
        known = sketch.EDGES[np.minimum(places, len(sketch.EDGES) - 1)]
        own = float(np.array_equal(known, rights) and places[0] > 0)
        if own:
            is_zero = places == sketch.ZERO + 1
            zeros = float(histogram.counts[is_zero].sum())
            # The layout tells where a bucket begins, the one before it need not.
            lefts = np.where(is_zero, 0.0, sketch.EDGES[places - 1])
            rights = np.where(is_zero, 0.0, rights)
    total, squares = histogram.sum, histogram.sum_squares
    described = (
        histogram.count,
        histogram.min,
        histogram.max,
        math.nan if total is None else total,
        math.nan if squares is None else squares,
        _size(histogram, lefts, rights),
        zeros,
        own,
    )
    return described + _percentiles(histogram, lefts, rights, percents)


def _size(histogram, lefts, rights):
    """Returns about how long the vector of the values is.

    That is the norm where the record has it; else it is made of the middles of the
    buckets, which is good enough to compare records of one tag.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if histogram.sum_squares is not None:
            return float(np.sqrt(histogram.sum_squares))
        middles = (lefts + rights) / 2
        return float(np.sqrt((histogram.counts * middles**2).sum()))


def _percentiles(histogram, lefts, rights, percents):
    """Returns percentiles, taking the values of a bucket as evenly spread in it."""
    if not percents:
        return ()
    filled = histogram.counts > 0
    edges = np.stack([lefts, rights], axis=1)[filled]
    if not len(edges):
        return (math.nan,) * len(percents)
    # The outermost values are known, and may lie beyond all edges.
    edges[0, 0], edges[-1, 1] = histogram.min, histogram.max
    if not np.isfinite(edges).all():
        return (math.nan,) * len(percents)
    after = np.cumsum(histogram.counts[filled])
    reached = np.stack([after - histogram.counts[filled], after], axis=1)
    wanted = np.array(percents) / 100.0 * after[-1]
    return tuple(np.interp(wanted, reached.ravel(), edges.ravel()))


def norms(series):
    """Returns the norm of each record, NaN where the file does not have it.

    Returns:
        float64, shape ``(n,)``.
    """
    with np.errstate(invalid="ignore"):
        return np.sqrt(series["sum_squares"])
