"""What must be in the log: the change of the weights, and an independent reader.

Under plain SGD the gradient of an update is ``(before - after) / learning_rate``, to
the rounding of a float32 weight. Shares no code with the package.
"""

from typing import NamedTuple

import numpy as np

from .frameworks import LEARNING_RATE, files_below


class Event(NamedTuple):
    run: str
    tag: str
    step: int
    value: object


def read_events(fw, log_dir):
    """Returns every summary value below a directory as `Event`."""
    events = []
    for run, paths in sorted(files_below(log_dir).items()):
        for path in paths:
            for event in fw.v1.train.summary_iterator(path):
                for value in event.summary.value:
                    kind = value.WhichOneof("value")
                    events.append(
                        Event(run, value.tag, event.step, getattr(value, kind))
                    )
    return events


def gradient_events(events):
    """Returns those events that the package writes."""
    return [e for e in events if e.tag.endswith("_grad") or e.tag.startswith("grad_")]


def keys(events):
    """Returns the sorted ``(run, tag, step)`` of events."""
    return sorted((event.run, event.tag, event.step) for event in events)


def expected_keys(paths, steps, run=".", scalars=("mean_abs", "norm")):
    """Returns the sorted ``(run, tag, step)`` that a logger must have written."""
    tags = [path + "_0_grad" for path in paths]
    tags += ["grad_{}/{}".format(name, path) for name in scalars for path in paths]
    tags += ["grad_global_norm"] if "norm" in scalars else []
    return sorted((run, tag, step) for tag in tags for step in steps)


class Gradient:
    """The gradient of one weight in one update, and how exactly it is known."""

    def __init__(self, values, error):
        self.values = np.asarray(values, np.float64).ravel()
        self.error = error

    @classmethod
    def of_update(cls, before, after, rows=None, rate=LEARNING_RATE):
        values = (before.astype(np.float64) - after) / rate
        largest = max(np.abs(before).max(), np.abs(after).max())
        # Both weights are rounded to float32, and so is the update itself.
        error = 2 * np.finfo(np.float32).eps * largest / rate
        if rows is not None:
            values = values[rows]
        return cls(values, error)

    @classmethod
    def pooled(cls, gradients):
        values = np.concatenate([gradient.values for gradient in gradients])
        return cls(values, max(gradient.error for gradient in gradients))


def updates_of(recorder, path, rows=None):
    """Returns the `Gradient` of one weight in every update that was recorded.

    ``rows`` gives the touched rows of each update, for an embedding.
    """
    pairs = zip(recorder.values, recorder.values[1:])
    return [
        Gradient.of_update(
            before[path], after[path], None if rows is None else rows[number]
        )
        for number, (before, after) in enumerate(pairs)
    ]


def assert_histogram(histogram, gradient):
    """Compares a `HistogramProto` with what the weights say."""
    values, error = gradient.values, gradient.error
    size, scale = len(values), np.abs(values).sum()
    assert histogram.num == size
    assert abs(histogram.min - values.min()) <= error + 1e-5 * abs(values.min())
    assert abs(histogram.max - values.max()) <= error + 1e-5 * abs(values.max())
    assert abs(histogram.sum - values.sum()) <= size * error + 1e-5 * scale
    squares = np.square(values).sum()
    slack = 2 * error * scale + size * error**2 + 1e-5 * squares
    assert abs(histogram.sum_squares - squares) <= slack
    limits, counts = np.array(histogram.bucket_limit), np.array(histogram.bucket)
    filled = counts > 0
    # Of a gap one empty bucket is there, and none before the first value or after all.
    assert filled[:1].all() and filled[-1:].all() and (filled[1:] | filled[:-1]).all()
    assert (np.diff(limits) > 0).all()
    assert counts.sum() == size
    for limit, below in zip(limits, np.cumsum(counts)):
        # Values within their error of an edge may lie on either side of it.
        slack = error + 1e-12 * abs(limit)
        at_least = (values < limit - slack).sum()
        assert at_least <= below <= (values <= limit + slack).sum()
    # A reader lets a bucket begin where the one before it ends.
    is_narrow = np.diff(limits) <= 0.126 * np.abs(limits[1:]) + 1e-17
    assert is_narrow[filled[1:]].all()
    for limit in limits[filled & (np.abs(limits) > 1e-6)]:
        # The bucket below a limit is at most 12.5 % wide, so the next value is near.
        width = 0.126 * abs(limit) + error
        assert ((values <= limit + error) & (values >= limit - width)).any()


def assert_scalars(events, step, path, gradient, names=("mean_abs", "norm", "max_abs")):
    """Compares the scalars of one weight at one step with what the weights say."""
    values, error = np.abs(gradient.values), gradient.error
    expected = {
        "mean_abs": values.mean(),
        "norm": np.sqrt(np.square(values).sum()),
        "max_abs": values.max(),
    }
    for name in names:
        tag = "grad_{}/{}".format(name, path)
        (found,) = [e.value for e in events if e.tag == tag and e.step == step]
        slack = error * np.sqrt(len(values)) + 1e-5 * expected[name]
        assert abs(found - expected[name]) <= slack, tag


def assert_step_level(events, recorder, paths, steps, rows=None, first=0):
    """Compares every logged histogram and scalar with every update that was made.

    ``rows`` is path -> touched rows of each update; ``first`` the number of the first
    recorded update.
    """
    for path in paths:
        gradients = updates_of(recorder, path, (rows or {}).get(path))
        for step in steps:
            tag = path + "_0_grad"
            (histogram,) = [e.value for e in events if (e.tag, e.step) == (tag, step)]
            assert_histogram(histogram, gradients[step - first])
            assert_scalars(
                events, step, path, gradients[step - first], ("mean_abs", "norm")
            )
    for step in steps:
        updates = [updates_of(recorder, p, (rows or {}).get(p)) for p in paths]
        total = sum(np.square(u[step - first].values).sum() for u in updates)
        (found,) = [
            e.value for e in events if (e.tag, e.step) == ("grad_global_norm", step)
        ]
        np.testing.assert_allclose(found, np.sqrt(total), rtol=1e-4)


def assert_fit(fw, trained, logger, steps, x, y, **kwargs):
    """Trains for one epoch with a step-level logger; compares what it must have logged.

    ``steps`` are those of the updates that it logs.
    """
    weights = fw.recorder(trained)
    fw.fit(trained.model, x, y, callbacks=[logger, weights], **kwargs)
    events = read_events(fw, logger.log_dir)
    assert keys(events) == expected_keys(trained.paths, steps)
    assert_step_level(events, weights, trained.paths, steps)
