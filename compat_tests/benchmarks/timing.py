"""Ratios of epoch times: two runs in turn, pair by pair, since machines are noisy."""

import copy
import time
from typing import List, NamedTuple

import numpy as np

__all__ = ["Ratio", "Run", "ratio_of"]

#: The first epochs of a fit, not counted.
WARM_UP = 2


class Run:
    """One way to train one model, again and again.

    Attributes:
        first_fit: Seconds of the first fit to the end of its first epoch.
        next_fit: The same of the second fit.
    """

    #: What tells the time.
    clock = staticmethod(time.perf_counter)

    def __init__(self, fw, model, data, batch, callbacks=(), epochs=3, **arguments):
        self._fw = fw
        self._model = model
        self._data = data
        self._callbacks = list(callbacks)
        self._arguments = dict(arguments, batch_size=batch, epochs=WARM_UP + epochs)
        self._starts = []

    @property
    def first_fit(self):
        return self._starts[0]

    @property
    def next_fit(self):
        return self._starts[1]

    def of(self, data):
        """Returns the run of one counted epoch of other data."""
        run = copy.copy(self)
        run._data, run._starts = data, []
        run._arguments = dict(self._arguments, epochs=WARM_UP + 1)
        return run

    def seconds(self):
        """Fits once; returns the median seconds of an epoch after the first two."""
        marks, clock = [], self.clock

        class Clock(self._fw.keras.callbacks.Callback):
            # As ours: batches need not wait for their logs to reach the host.
            _supports_tf_logs = True

            def on_epoch_end(self, epoch, logs=None):
                marks.append(clock())

        began = clock()
        # The clock comes last, so that the others' end of an epoch belongs to it.
        callbacks = self._callbacks + [Clock()]
        self._fw.fit(self._model, *self._data, callbacks=callbacks, **self._arguments)
        self._starts.append(marks[0] - began)
        return float(np.median(np.diff(marks)[WARM_UP - 1 :]))


class Ratio(NamedTuple):
    """Epoch times of two runs over each other.

    Attributes:
        median, low, high: Of the pairs, with the quartiles.
        seconds: Median epoch of the other run.
        pairs: Every pair's ratio.
    """

    median: float
    low: float
    high: float
    seconds: float
    pairs: List[float]


def ratio_of(run, other, pairs):
    """Returns the `Ratio` of ``run`` to ``other``, alternating which comes first."""
    for warm in (other, run):
        warm.seconds()
    ratios, base = [], []
    for number in range(pairs):
        times = {}
        for one in (run, other) if number % 2 else (other, run):
            times[one] = one.seconds()
        ratios.append(times[run] / times[other])
        base.append(times[other])
    low, median, high = np.percentile(ratios, [25, 50, 75])
    return Ratio(median, low, high, float(np.median(base)), ratios)
