"""``show``: the gradients of a log directory, a row for each weight, or a picture.

Every number is one that the file has; what a file does not tell is shown as ``-``.
Must not know how files are read, nor judge what they hold.
"""

import fnmatch
import importlib
import json
import math
import os
from typing import List, NamedTuple, Optional

import numpy as np

from . import series, terminal
from .errors import GradlogError, InvalidArgumentError, UnsupportedError
from .events import printable

__all__ = ["Row", "rows", "run"]

#: Panels of one picture; more cannot be read.
MOST_PANELS = 60
#: Inches of a panel, and how many stand in a row of a large picture.
PANEL_WIDTH, PANEL_HEIGHT = 3.6, 2.1
PANELS_ACROSS = 5
#: Of an axis of values, so that their labels have room.
MOST_TICKS = 7
#: Percentiles between which a band is drawn, and how dark it is.
BANDS = ((0, 100, 0.15), (5, 95, 0.3), (25, 75, 0.5))


class Row(NamedTuple):
    """What the records of one weight's gradient in one run come to.

    Attributes:
        run: Its run.
        tag: Its tag.
        records: Number of records.
        first_step, last_step: Of the first and the last record.
        last_norm, median_norm, max_norm: Of the records' norms, the last one that is
            finite, and None where the form does not have them.
        zeros: Share of exact zeros in all values, None where the buckets do not tell.
        nonfinite: Number of values that are NaN or infinite, None where nobody
            counted them.
        norms: The norm of each record, None where it is not finite or not known.
    """

    run: str
    tag: str
    records: int
    first_step: int
    last_step: int
    last_norm: Optional[float]
    median_norm: Optional[float]
    max_norm: Optional[float]
    zeros: Optional[float]
    nonfinite: Optional[int]
    norms: List[Optional[float]]


def run(log_dir, run=None, tag=None, steps=(None, None), as_json=False, png=None):
    """Prints a table, or JSON, and draws a picture where one is asked for.

    Args:
        log_dir: A local directory.
        run: Shell pattern of the runs, None for all.
        tag: Shell pattern of the tags, or of the weights that they are about; None for
            all histograms of gradients.
        steps: First and last step, both included; None for no bound.
        as_json: Whether JSON is printed instead of a table.
        png: File of the picture, None for none.

    Returns:
        The exit code, 0.

    Raises:
        GradlogError: Nothing can be read or nothing is chosen, or the picture cannot
            be drawn or written.
    """
    canvas = None if png is None else _canvas()
    log = series.read(log_dir, percentiles=png is not None)
    chosen = _choose(log, run, tag, steps)
    if png is not None:
        _draw(chosen, canvas, png)
    table = rows(chosen)
    if as_json:
        terminal.say(json.dumps([row._asdict() for row in table], indent=2))
    else:
        _print(table)
    return 0


class _Chosen(NamedTuple):
    """One weight's gradient, within the steps that were asked for."""

    run: str
    tag: str
    histograms: series.Series
    nonfinite: Optional[series.Series]


def _choose(log, run, tag, steps):
    """Returns a list of `_Chosen`, in the order of the runs and as they were written.

    Raises:
        InvalidArgumentError: There is none.
    """
    first = -math.inf if steps[0] is None else steps[0]
    last = math.inf if steps[1] is None else steps[1]
    chosen = []
    for name, logged in sorted(log.runs.items()):
        if run is not None and not fnmatch.fnmatchcase(name, run):
            continue
        for found, histograms in logged.histograms.items():
            if _is_meant(found, tag):
                records = histograms.within(first, last)
                counted = logged.scalars.get(series.nonfinite_tag(found))
                if counted is not None:
                    counted = counted.within(first, last)
                if len(records):
                    chosen.append(_Chosen(name, found, records, counted))
    if not chosen:
        raise InvalidArgumentError(
            "`--run`, `--tag` and `--steps` must leave a histogram of a gradient. "
            "Received: {}, none of it in {}.".format(
                ", ".join(
                    "{} {}".format(option, printable(value))
                    for option, value in (
                        ("--run", run),
                        ("--tag", tag),
                        ("--steps", _range_text(steps)),
                    )
                    if value
                )
                or "no filter",
                _summary(log),
            )
        )
    return chosen


def _range_text(steps):
    if steps == (None, None):
        return ""
    return ":".join("" if step is None else str(step) for step in steps)


def _summary(log):
    """Tells what can be chosen from."""
    found = []
    for name, logged in sorted(log.runs.items()):
        gradients = logged.gradients()
        shown = [printable(tag) for tag in list(gradients)[:3]]
        more = len(gradients) - len(shown)
        text = ", ".join(shown) or "no gradients"
        text += " and {} more".format(more) if more else ""
        found.append("run {} ({})".format(printable(name), text))
    rest = len(found) - 5
    return "; ".join(found[:5]) + (
        "; and {} more runs".format(rest) if rest > 0 else ""
    )


def _is_meant(tag, pattern):
    if pattern is None:
        return series.is_gradient(tag)
    names = tag, series.path_of(tag)
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def rows(chosen):
    """Returns the `Row` of each of what `_choose` returned."""
    return [_row(*one) for one in chosen]


def _row(run, tag, histograms, nonfinite):
    norms = series.norms(histograms)
    finite = norms[np.isfinite(norms)]
    known = len(finite) > 0
    zeros, count = histograms["zeros"], histograms["count"]
    # An empty record has no buckets, whoever wrote it.
    tell = (count == 0) | ~np.isnan(zeros)
    share = None
    if tell.all() and count.sum() > 0:
        share = float(np.nansum(zeros) / count.sum())
    number = None
    if nonfinite is not None:
        number = int(nonfinite["value"].sum())
    elif series.is_own(histograms):
        number = 0
    return Row(
        run=run,
        tag=tag,
        records=len(histograms),
        first_step=int(histograms["step"][0]),
        last_step=int(histograms["step"][-1]),
        last_norm=float(finite[-1]) if known else None,
        median_norm=float(np.median(finite)) if known else None,
        max_norm=float(finite.max()) if known else None,
        zeros=share,
        nonfinite=number,
        norms=[float(norm) if math.isfinite(norm) else None for norm in norms],
    )


def _print(table):
    """Prints one line a weight, run by run."""
    width = max(len(_name(row)) for row in table)
    line = "  {:<{}}  {:>7}  {:>9}  {:>9}  {:>9}  {:>6}  {:>9}  {}"
    characters = terminal.bars()
    shown = None
    for row in table:
        if row.run != shown:
            shown = row.run
            terminal.say("run {}".format(printable(shown)))
            titles = "records", "last norm", "median", "largest", "zeros", "nonfinite"
            title = "norm over the steps, from 0 to its largest"
            terminal.say(line.format("weight", width, *titles + (title,)))
        norms = [norm for norm in row.norms if norm is not None]
        terminal.say(
            line.format(
                _name(row),
                width,
                row.records,
                _number(row.last_norm, "{:.3e}"),
                _number(row.median_norm, "{:.3e}"),
                _number(row.max_norm, "{:.3e}"),
                _number(row.zeros, "{:.1%}"),
                _number(row.nonfinite, "{}"),
                terminal.sparkline(norms, characters) if norms else "-",
            )
        )


def _name(row):
    return printable(series.path_of(row.tag), 60)


def _number(value, form):
    return "-" if value is None else form.format(value)


# The picture.


def _canvas():
    """Returns matplotlib's module that draws into files, without a screen.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        return importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        raise UnsupportedError(
            "`--png` must have matplotlib. Received: {}. Install it with: python -m "
            "pip install 'legacy_gradlog[plot]'".format(error)
        ) from error


def _draw(chosen, canvas, path):
    """Draws a panel for each weight: bands of percentiles over the steps."""
    if len(chosen) > MOST_PANELS:
        raise InvalidArgumentError(
            "A picture must have at most {} weights. Received: {}. Choose with `--run` "
            "and `--tag`.".format(MOST_PANELS, len(chosen))
        )
    figure = importlib.import_module("matplotlib.figure")
    across = min(PANELS_ACROSS, len(chosen))
    down = -(-len(chosen) // across)
    size = max(PANEL_WIDTH * across, 7), max(PANEL_HEIGHT * down, 3) + 0.6
    picture = figure.Figure(figsize=size)
    canvas.FigureCanvasAgg(picture)
    many_runs = len({one.run for one in chosen}) > 1
    for place, one in enumerate(chosen, 1):
        axes = picture.add_subplot(down, across, place)
        _draw_panel(axes, one.histograms)
        name = series.path_of(one.tag)
        title = "{}: {}".format(one.run, name) if many_runs else name
        axes.set_title(_without_math(printable(title, 48)), fontsize=8)
        if place > len(chosen) - across:
            axes.set_xlabel("step", fontsize=8)
    picture.suptitle(
        "gradient values: least to largest, 5 to 95 %, 25 to 75 %, median", fontsize=9
    )
    picture.tight_layout(rect=(0, 0, 1, 1 - 0.25 / size[1]))
    try:
        picture.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise GradlogError(
            "`--png` must be a file that can be written. Received: {} ({}). Give "
            "another.".format(printable(os.fspath(path)), error.strerror)
        ) from error


def _without_math(text):
    """Returns a text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")


def _draw_panel(axes, histograms):
    percents = {percent: histograms[percent] for percent in series.PERCENTS}
    step = histograms["step"]
    for lowest, highest, alpha in BANDS:
        axes.fill_between(
            step,
            percents[lowest],
            percents[highest],
            color="C0",
            alpha=alpha,
            linewidth=0,
        )
    axes.plot(step, percents[50], color="C3", linewidth=0.8)
    _scale(axes, percents)
    axes.tick_params(labelsize=7)


def _scale(axes, percents):
    """Shows small and large gradients alike: linear near zero, logarithmic beyond."""
    middle = np.concatenate([percents[25], percents[75]])
    middle = np.abs(middle[np.isfinite(middle) & (middle != 0)])
    if len(middle):
        # A power of ten, so that no tick lies close to another; a little more, since
        # matplotlib's logarithm of 1000 is less than 3, and it would add one at 100.
        linear = 10.0 ** np.ceil(np.log10(np.median(middle))) * (1 + 1e-9)
        axes.set_yscale("symlog", linthresh=linear)
        axes.yaxis.get_major_locator().set_params(numticks=MOST_TICKS)
