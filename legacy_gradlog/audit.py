"""``audit``: whether the gradient histograms of a log directory are to be trusted.

Each rule looks at one run and yields findings; what stock ``write_grads`` does is known
here, per generation. Must not know how files are read, nor train anything.

Stock ``write_grads`` walked the validation data in slices, in test mode, and wrote a
histogram of each:

* ``keras`` 2.0.5 to 2.3.1, ``tf.keras`` 1.4 to 1.9: slices of the callback's own
  ``batch_size``, all of them at the step that is the epoch;
* ``tf.keras`` 1.10 to 1.12: batches of ``fit``; the step is the epoch plus a part of
  it, which runs into later epochs where the callback's ``batch_size`` is another;
* ``tf.keras`` 1.13 to 1.15: batches of ``fit``, shuffled anew in every epoch; the step
  counts them.
"""

import json
import math
import re
import textwrap
from typing import List, NamedTuple, Optional, Tuple

import numpy as np

from . import series, terminal
from .errors import GradlogError
from .events import CUT_OFF, printable

__all__ = ["CLEAN", "FINDINGS", "Finding", "examine", "find_spikes", "run"]

#: Exit codes; what cannot be read is an error of the command line, 2.
CLEAN, FINDINGS = 0, 1

#: Characters of a line of text.
WIDTH = 80
#: The tags that a text names of one finding.
MOST_TAGS = 5

# What a spike is: this many times the median of the records around it,
LEAST_HEIGHT = 1.5
LEAST_LOG_HEIGHT = math.log(LEAST_HEIGHT)
#: and this many robust standard deviations of the logarithm above it.
LEAST_DEVIATIONS = 5
#: Records around it whose median it is compared with.
WINDOW = 11
LEAST_REPEATS = LEAST_PERIOD = 3
#: The share of a period's places that must be spikes, and of spikes at its places.
LEAST_SHARE = 0.8
#: How probable it may be at most that spikes anywhere make such a period by chance.
MOST_CHANCE = 1e-3
#: Three spikes in a row of few records may be chance, unless all are this high.
CERTAIN_HEIGHT = 3.0
#: Distances between the tallest records that are tried as periods, commonest first.
MOST_PERIODS = 5


class Finding(NamedTuple):
    """Something that a reader of a run's histograms must know.

    Attributes:
        kind: Which rule found it, such as ``"several-records"``.
        run: Its run.
        tags: The tags that it is about, in the order written.
        explanation: What was seen and what makes it so, in words.
        real: Whether the training itself was like that, so that the histograms are
            right. Only what is not real makes a run one with findings.
    """

    kind: str
    run: str
    tags: Tuple[str, ...]
    explanation: str
    real: bool


class Slices(NamedTuple):
    """The validation slices of which stock ``write_grads`` made its records.

    Attributes:
        tags: The tags that it wrote.
        number: Records per epoch.
        sizes: Samples of each slice, None where the log does not tell.
    """

    tags: Tuple[str, ...]
    number: int
    sizes: Optional[List[int]]


class Spikes(NamedTuple):
    """Spikes that repeat.

    Attributes:
        period: Records from one to the next.
        first: The first record, counted from 0.
        number: How many there are.
        height: Their median, against the median of the records around each.
    """

    period: int
    first: int
    number: int
    height: float


def run(log_dir, as_json=False):
    """Prints what is found below a directory.

    Args:
        log_dir: A local directory.
        as_json: Whether JSON is printed instead of text.

    Returns:
        The exit code: 0 where every run is clean, 1 with findings.

    Raises:
        GradlogError: Nothing can be read, or there is no histogram of a gradient.
    """
    log = series.read(log_dir)
    found = examine(log)
    if not found:
        raise GradlogError(
            "`LOGDIR` must hold histograms of gradients: ones with `grad` in their "
            "tags. Received: {} with {} other tags. Log them with "
            "`TensorBoard(..., write_grads=True)` of this package.".format(
                printable(str(log_dir)),
                sum(len(r.histograms) + len(r.scalars) for r in log.runs.values()),
            )
        )
    lost = [entry for entry in log.skipped if entry[1] != CUT_OFF]
    code = CLEAN
    if lost or any(not f.real for findings in found.values() for f in findings):
        code = FINDINGS
    if as_json:
        _print_json(log, found, code)
    else:
        _print_text(log, found)
    return code


def _print_json(log, found, code):
    runs = [
        {
            "run": name,
            "verdict": _verdict(findings),
            "findings": [finding._asdict() for finding in findings],
        }
        for name, findings in found.items()
    ]
    skipped = [dict(zip(("path", "cause", "number"), entry)) for entry in log.skipped]
    terminal.say(json.dumps({"exit": code, "runs": runs, "skipped": skipped}, indent=2))


def _print_text(log, found):
    for name, findings in found.items():
        terminal.say("{}: {}".format(printable(name), _verdict(findings)))
        for finding in findings:
            mark = "note" if finding.real else "finding"
            terminal.say("  {} ({})".format(mark, finding.kind))
            for text in (finding.explanation, "In " + _list(finding.tags)):
                for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False):
                    terminal.say("    " + line)
    for path, cause, number in log.skipped:
        terminal.say("left out of {}: {} ({})".format(printable(path), cause, number))


def _list(tags):
    shown = ", ".join(printable(tag) for tag in tags[:MOST_TAGS])
    rest = len(tags) - MOST_TAGS
    return shown if rest <= 0 else "{} and {} more".format(shown, rest)


def _verdict(findings):
    return "clean" if all(finding.real for finding in findings) else "findings"


def examine(log):
    """Returns the findings of each run that has histograms of gradients.

    Args:
        log: A `series.Log`.

    Returns:
        Dict of run -> list of `Finding`.
    """
    found = {}
    for name, logged in sorted(log.runs.items()):
        if logged.gradients():
            slices = find_slices(logged)
            found[name] = [
                Finding(kind, name, tuple(tags), explanation, real)
                for kind, rule in RULES
                for tags, explanation, real in rule(logged, slices)
            ]
    return found


# What stock `write_grads` leaves in a log beside its gradients, by which it is known:
# histograms of the weight itself and of each layer's output, all in one event, in
# the buckets that TensorFlow makes.


def find_slices(logged):
    """Returns the `Slices` of a run, None where stock ``write_grads`` wrote nothing."""
    outputs = _outputs(logged)
    tags = [
        tag
        for tag, gradient in logged.gradients().items()
        if _is_stock(tag, gradient, logged, outputs)
    ]
    if not tags:
        return None
    gradient = logged.histograms[tags[0]]
    number = _records_per_epoch(gradient, logged)
    return Slices(tuple(tags), number, _slice_sizes(outputs, number))


def _outputs(logged):
    """Returns ``(output, bias)`` of each layer: series, or None without a bias.

    A layer's weights are written right before its output. Their names may differ:
    `tf.keras` of TensorFlow 1.4 calls the output of ``dense`` ``dense_1_out``.
    """
    found, bias = [], None
    for tag, histograms in logged.histograms.items():
        if re.search(r"/bias_0(_\d+)?$", tag):
            bias = histograms
        elif re.search(r"._out(_\d+)*$", tag):
            found.append((histograms, bias))
            bias = None
    return found


def _is_stock(tag, gradient, logged, outputs):
    match = re.match(r"(.+_\d+)_grad((?:_\d+)?)$", tag)
    weight = logged.histograms.get(match.group(1) + match.group(2)) if match else None
    return (
        weight is not None
        and not (gradient["own"] == 1).any()
        and _are_of_the_same_events(gradient, weight)
        and any(_are_of_the_same_events(gradient, output) for output, _ in outputs)
    )


def _are_of_the_same_events(first, second):
    return np.array_equal(first["wall_time"], second["wall_time"]) and np.array_equal(
        first["step"], second["step"]
    )


def _records_per_epoch(gradient, logged):
    """Returns how many records an epoch has."""
    _, at_a_step = np.unique(gradient["step"], return_counts=True)
    if (at_a_step > 1).all():
        return _most_common(at_a_step)
    for tag in ("val_loss", "epoch_val_loss", "loss", "epoch_loss"):
        if tag in logged.scalars:
            epochs = np.searchsorted(logged.scalars[tag]["order"], gradient["order"])
            # Counted between the values that are written once an epoch.
            _, in_an_epoch = np.unique(epochs, return_counts=True)
            return _most_common(in_an_epoch)
    return _most_common(at_a_step)


def _most_common(numbers):
    return int(np.bincount(numbers).argmax())


def _slice_sizes(outputs, number):
    """Returns the samples of each slice of an epoch, None where they are not told.

    A layer of n units has n biases, and n outputs a sample, or more where it has them
    at several places: the fewest are right.
    """
    found = []
    for output, bias in outputs:
        if bias is not None and bias["count"][0] > 0:
            sizes = output["count"][:number] / bias["count"][0]
            if (sizes == np.round(sizes)).all():
                found.append([int(size) for size in sizes])
    return min(found) if found else None


def _arithmetic(slices):
    """Tells how ``batch_size`` and the validation samples make the slices."""
    number = slices.number
    if slices.sizes is None:
        return (
            "{0} records an epoch = ceil(validation samples / batch_size), so there "
            "were more than {1} and at most {0} times batch_size samples".format(
                number, number - 1
            )
        )
    batch, samples = max(slices.sizes), sum(slices.sizes)
    if number == 1:
        return "the one slice has all {} validation samples".format(samples)
    text = "{} records an epoch = ceil({} validation samples / batch_size {})".format(
        number, samples, batch
    )
    if slices.sizes[-1] == batch:
        return text + ", all slices full"
    return text + ", and the last slice has {} % {} = {} samples".format(
        samples, batch, slices.sizes[-1]
    )


# The rules. Each yields (tags, explanation, whether it is real).


def _validation_slices(logged, slices):
    if slices is None:
        return
    text = (
        "Stock `write_grads` of Keras wrote these, beside histograms of weights and "
        "outputs in the same events. They are no gradients of the training: they are "
        "of slices of the validation data, in test mode. Here {}."
    )
    yield slices.tags, text.format(_arithmetic(slices)), False


def _several_records(logged, slices):
    groups = {}
    for tag, gradient in logged.gradients().items():
        step, wall_time = gradient["step"], gradient["wall_time"]
        # Not of one event, where it is a shared tag; and one after the other, where a
        # restart is told by itself.
        again = (np.diff(step) == 0) & (np.diff(wall_time) != 0)
        if again.any():
            _, at_a_step = np.unique(step, return_counts=True)
            steps = len(np.unique(step[1:][again]))
            key = (
                steps,
                int(at_a_step.min()),
                int(at_a_step.max()),
                series.is_own(gradient),
            )
            groups.setdefault(key, []).append(tag)
    for (steps, fewest, most, is_own), tags in groups.items():
        number = str(most) if fewest == most else "{} to {}".format(fewest, most)
        text = (
            "A step has several records, at {}: {} a step. TensorBoard draws them as "
            "steps of their own, or one over the other.".format(
                _count(steps, "step"), number
            )
        )
        if slices is not None and set(tags) <= set(slices.tags):
            text += " They are the slices of the validation data: {}.".format(
                _arithmetic(slices)
            )
        elif fewest == most and not is_own:
            text += (
                " As many at every step are what stock `write_grads` leaves: one for "
                "each slice of the validation data, ceil(validation samples / "
                "batch_size) = {}.".format(most)
            )
        else:
            text += (
                " Several writers in one directory, or a training that was resumed at "
                "a step that was logged already, make such logs."
            )
        yield tags, text, False


def _count(number, noun):
    return "{} {}{}".format(number, noun, "" if number == 1 else "s")


def _periodic_spikes(logged, slices):
    groups = {}
    for tag, gradient in logged.gradients().items():
        is_stock = slices is not None and tag in slices.tags
        spikes = find_spikes(
            gradient["size"], _known_period(gradient, is_stock, slices)
        )
        if spikes is not None:
            own = series.is_own(gradient)
            key = spikes.period, spikes.first % spikes.period, is_stock, own
            groups.setdefault(key, []).append((tag, spikes, gradient["step"]))
    for (period, _, is_stock, own), found in groups.items():
        heights = sorted(spikes.height for _, spikes, _ in found)
        # The tag in which they begin first; in others some may be too low.
        _, spikes, steps = min(found, key=lambda one: one[1].first)
        first = spikes.first
        text = "Every {} record is a spike, {} from record {} (step {:.0f}) on: "
        text = text.format(
            _ordinal(period), _count(spikes.number, "time"), first, steps[first]
        )
        text += "its norm is {} times the median of those around it. ".format(
            _range(heights[0], heights[-1])
        )
        if is_stock:
            text += _why_slices_spike(slices, first)
        else:
            text += _why_batches_spike(steps, spikes, own)
        yield [tag for tag, _, _ in found], text, own


def _known_period(gradient, is_stock, slices):
    """Returns the only period that spikes can have, None where any can."""
    if is_stock:
        return slices.number
    step = gradient["step"]
    _, at_a_step = np.unique(step, return_counts=True)
    same = at_a_step.min() == at_a_step.max() > 1 and (np.diff(step) >= 0).all()
    return int(at_a_step[0]) if same else None


def _why_slices_spike(slices, first):
    if first % slices.number == slices.number - 1 and slices.sizes is not None:
        if slices.sizes[-1] < max(slices.sizes):
            return (
                "It is no event of the training: it is the gradient of the last slice "
                "of the validation data, of fewer samples than the others: {}.".format(
                    _arithmetic(slices)
                )
            )
    return (
        "It is no event of the training: it is always slice {} of {} of the validation "
        "data: {}.".format(
            first % slices.number + 1, slices.number, _arithmetic(slices)
        )
    )


def _why_batches_spike(steps, spikes, own):
    apart = np.median(np.diff(steps[spikes.first :: spikes.period]))
    if not own:
        return (
            "Such a period comes of data that is walked in the same slices again and "
            "again. Whether these were of training or validation data the file does "
            "not tell."
        )
    return (
        "It is real: this package logged the gradients of the very updates, and one "
        "batch in {0:.0f} steps is another than the rest, as a short last batch of an "
        "epoch of that many steps is. A batch size that divides the number of samples "
        "avoids it.".format(apart)
    )


def _ordinal(number):
    ending = "th"
    if number // 10 % 10 != 1:
        ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return "{}{}".format(number, ending)


def _range(lowest, highest):
    lowest, highest = "{:.1f}".format(lowest), "{:.1f}".format(highest)
    return lowest if lowest == highest else "{} to {}".format(lowest, highest)


def find_spikes(sizes, period=None):
    """Returns the `Spikes` of a row of records, or None.

    Robust against what else a training does: a record is compared with the median of
    those around it, on a logarithmic scale, in units of the median deviation. A period
    must be too unlikely to be chance, and repeat at least three times.

    Args:
        sizes: The norms of the records, shape ``(n,)``.
        period: The only one that can be, None for any.
    """
    sizes = np.asarray(sizes)
    usable = np.isfinite(sizes) & (sizes > 0)
    if usable.sum() < 2 * LEAST_REPEATS:
        return None
    # Zeros, and numbers that are not finite, are no spikes: other rules tell them.
    logs = np.log(np.where(usable, sizes, np.median(sizes[usable])))
    if period is not None:
        return _spikes_at_one_place(logs, period)
    above = logs - _rolling_median(logs)
    for period, first in _candidates(above):
        at_places = np.zeros(len(logs), bool)
        at_places[first::period] = True
        usual = np.median(above[at_places])
        if usual <= max(
            LEAST_LOG_HEIGHT, LEAST_DEVIATIONS * _scatter(above[~at_places])
        ):
            continue
        # Noise may grow with time; what is much lower than these is no rival of them.
        tall = above > usual / 2
        hits = np.flatnonzero(tall & at_places)
        is_certain = above[hits].min() > max(
            math.log(CERTAIN_HEIGHT), LEAST_DEVIATIONS * _scatter(above)
        )
        numbers = len(logs), at_places.sum(), tall.sum(), len(hits)
        if _is_a_period(*numbers, is_certain=is_certain):
            return Spikes(period, int(hits[0]), len(hits), float(np.exp(usual)))
    return None


def _candidates(above):
    """Yields periods that the tallest records may have, and the place of each.

    Distances within the tallest few, and then within more and more: how many are
    spikes is not known, and one record of noise among them breaks the distances. How
    tall noise is cannot tell it, since the spikes themselves widen what is taken for
    noise.
    """
    order = np.argsort(-above, kind="mergesort")
    order = order[: np.count_nonzero(above > LEAST_LOG_HEIGHT)]
    number, tried = LEAST_REPEATS, set()
    while number <= len(order):
        tallest = np.sort(order[:number])
        gaps, numbers = np.unique(np.diff(tallest), return_counts=True)
        commonest = gaps[np.argsort(-numbers, kind="mergesort")][:MOST_PERIODS]
        # Every other record can hardly be told from noise.
        for period in commonest[commonest >= LEAST_PERIOD].tolist():
            candidate = period, int(np.bincount(tallest % period).argmax())
            if candidate not in tried:
                tried.add(candidate)
                yield candidate
        number += number // 2


def _scatter(values):
    """Returns a standard deviation that a few strange values leave alone."""
    return 1.4826 * np.median(np.abs(values - np.median(values)))


def _is_a_period(records, places, spikes, hits, is_certain):
    if hits < LEAST_REPEATS:
        return False
    if hits < LEAST_SHARE * places or hits < LEAST_SHARE * spikes:
        return False
    # As many spikes, thrown anywhere, at these places; and every period and place
    # that could have been.
    chance = (
        _log_choose(places, hits)
        + _log_choose(records - hits, spikes - hits)
        - _log_choose(records, spikes)
        + math.log(records**2 / 18.0)
    )
    is_perfect = hits == places == spikes
    return is_perfect and is_certain or chance < math.log(MOST_CHANCE)


def _log_choose(n, k):
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _rolling_median(values):
    half = WINDOW // 2
    padded = np.pad(values, half, mode="reflect") if len(values) > half else values
    if len(padded) < len(values) + 2 * half:
        return np.full(len(values), np.median(values))
    windows = np.stack([padded[i : i + len(values)] for i in range(WINDOW)])
    return np.median(windows, axis=0)


def _spikes_at_one_place(logs, period):
    """Returns the spikes at one place of a known period, each against its own period.

    Two slices an epoch, or few epochs, leave nothing else to compare with.
    """
    epochs = len(logs) // period
    if period < 2 or epochs < LEAST_REPEATS:
        return None
    table = logs[: epochs * period].reshape(epochs, period)
    place = int(np.median(table, axis=0).argmax())
    others = np.delete(table, place, axis=1)
    above = table[:, place] - np.median(others, axis=1)
    scatter = 1.4826 * np.median(np.abs(others - np.median(others, axis=1)[:, None]))
    hits = above > max(LEAST_LOG_HEIGHT, scatter)
    if hits.sum() < max(LEAST_REPEATS, LEAST_SHARE * epochs):
        return None
    first = place + int(hits.argmax()) * period
    return Spikes(period, first, int(hits.sum()), float(np.exp(np.median(above))))


def _steps_back(logged, slices):
    groups = {}
    for tag, gradient in logged.gradients().items():
        step, wall_time = gradient["step"], gradient["wall_time"]
        back = np.flatnonzero(np.diff(step) < 0)
        if len(back):
            last, first = int(step[back[0]]), int(step[back[0] + 1])
            overlap = bool((np.diff(wall_time)[back] < 0).any())
            groups.setdefault((len(back), last, first, overlap), []).append(tag)
    for (number, last, first, overlap), tags in groups.items():
        text = "The steps go back {}, first from {} to {}. ".format(
            _count(number, "time"), last, first
        )
        if slices is not None and set(tags) <= set(slices.tags):
            text += (
                "It is no restart: `tf.keras` of TensorFlow 1.10 to 1.12 makes such "
                "steps where the `batch_size` of the callback is not that of `fit`, "
                "since a step is the epoch + slice / ceil(validation samples / the "
                "callback's batch_size)."
            )
        elif overlap:
            text += (
                "The records after it are older than those before: two writers were at "
                "work in this directory at one time. Give each its own."
            )
        else:
            text += (
                "A training was started again and logs into the same directory: the "
                "records from step {} on are of both. A jump at that place is the "
                "restart, not the training. Give each training its own "
                "directory.".format(first)
            )
        yield tags, text, False


def _nonfinite(logged, slices):
    groups = {}
    for tag, gradient in logged.gradients().items():
        numbers = np.stack([gradient[name] for name in ("count", "min", "max", "size")])
        steps = gradient["step"][~np.isfinite(numbers).all(axis=0)]
        counted = logged.scalars.get(series.nonfinite_tag(tag))
        if counted is not None:
            steps = np.append(steps, counted["step"][counted["value"] > 0])
        steps = np.unique(steps)
        if len(steps):
            key = len(steps), int(steps[0]), int(steps[-1])
            groups.setdefault(key, []).append(tag)
    for (number, first, last), tags in groups.items():
        text = (
            "Gradients have values that are NaN or infinite, at {}, first at step {}, "
            "last at step {}. The training diverged, or a step of loss scaling was "
            "skipped; the buckets hold the finite values only.".format(
                _count(number, "step"), first, last
            )
        )
        yield tags, text, False


def _empty(logged, slices):
    groups = {}
    for tag, gradient in logged.gradients().items():
        steps = gradient["step"][gradient["count"] == 0]
        if len(steps):
            key = len(steps), len(gradient), int(steps[0])
            groups.setdefault(key, []).append(tag)
    for (number, records, first), tags in groups.items():
        text = (
            "{} of {} hold no value, first at step {}: none was finite, or a sparse "
            "gradient touched no row.".format(
                number, _count(records, "histogram"), first
            )
        )
        yield tags, text, False


def _shared_tags(logged, slices):
    groups = {}
    for tag, gradient in logged.gradients().items():
        table = np.stack([gradient["step"], gradient["wall_time"]], axis=1)
        _, in_an_event = np.unique(table, axis=0, return_counts=True)
        _, where = np.unique(gradient["step"], return_inverse=True)
        most = np.full(where.max() + 1, -math.inf)
        fewest = -most
        np.maximum.at(most, where, gradient["count"])
        np.minimum.at(fewest, where, gradient["count"])
        if in_an_event.max() > 1:
            key = "one event has {} records of it".format(in_an_event.max())
        elif (fewest < most).any() and (np.diff(gradient["step"]) == 0).any():
            place = int((fewest < most).argmax())
            key = "at one step there are records of {:.0f} and of {:.0f} values".format(
                fewest[place], most[place]
            )
        else:
            continue
        groups.setdefault(key, []).append(tag)
    for seen, tags in groups.items():
        text = "Several weights share a tag: {}. Their histograms are mixed up."
        yield tags, text.format(seen), False


RULES = (
    ("validation-slices", _validation_slices),
    ("several-records", _several_records),
    ("periodic-spike", _periodic_spikes),
    ("steps-back", _steps_back),
    ("nonfinite", _nonfinite),
    ("empty", _empty),
    ("shared-tag", _shared_tags),
)
