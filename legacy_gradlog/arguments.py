"""What users may pass: checked values, and the stock callback's arguments.

Plain Python; nothing here imports a framework.
"""

import difflib
import inspect
import os
from typing import NamedTuple, Optional, Tuple

from . import schedule, writers
from .errors import InvalidArgumentError, UnknownArgumentError, warn

__all__ = ["Settings", "check_native", "check_period", "parse_settings", "stock_kwargs"]

#: Every further argument that a stock callback ever had, and what to do where the
#: running one has it no more or not yet.
NATIVE = {
    "batch_size": "it has no effect, as gradients come from the training step itself",
    "write_graph": "use `tf.summary.graph`",
    "write_images": "write images with `tf.summary.image` from a callback of your own",
    "write_steps_per_second": "use TensorFlow 2.5 or later",
    "update_freq": "use Keras 2.2.3, TensorFlow 1.13 or later",
    "profile_batch": "use TensorFlow 1.14 or later, or its profiler directly",
    "embeddings_freq": "use the projector plugin directly",
    "embeddings_layer_names": "name the layers as keys of `embeddings_metadata`",
    "embeddings_metadata": "use the projector plugin directly",
    "embeddings_data": "it has no effect, since later versions save the weights alone",
}


class Settings(NamedTuple):
    """What one logger logs.

    Attributes:
        cadence: When.
        layers: Patterns of layer names and weight paths, None for all.
        clipped: The gradient after clipping instead of before it.
        scalars: Which scalars.
        histograms: Whether histograms are written.
        prefix: What the user's argument names begin with, for messages.
    """

    cadence: schedule.Cadence
    layers: Optional[Tuple[str, ...]]
    clipped: bool
    scalars: Tuple[str, ...]
    histograms: bool
    prefix: str


def parse_settings(
    freq, layers, reduce, clipped, scalars, histograms=True, epochs=1, prefix=""
):
    """Returns the `Settings` of a logger's arguments.

    Raises:
        InvalidArgumentError: One of them has a wrong value.
    """
    every = schedule.parse_freq(freq, prefix + "freq")
    pool = schedule.parse_reduce(reduce, prefix + "reduce")
    return Settings(
        cadence=schedule.Cadence(every, pool and every is None, epochs),
        layers=_parse_layers(layers, prefix + "layers"),
        clipped=_parse_flag(clipped, prefix + "clipped"),
        scalars=writers.parse_scalars(scalars, prefix + "scalars"),
        histograms=_parse_flag(histograms, prefix + "histograms"),
        prefix=prefix,
    )


def _parse_layers(value, argument):
    if value is None:
        return None
    rule = "`{}` must be None or a list of layer names and patterns.".format(argument)
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise InvalidArgumentError("{} Received: {!r}.".format(rule, value))
    value = tuple(value)
    if not value or not all(isinstance(pattern, str) for pattern in value):
        raise InvalidArgumentError("{} Received: {!r}.".format(rule, value))
    return value


def _parse_flag(value, argument):
    if value not in (True, False):
        raise InvalidArgumentError(
            "`{}` must be True or False. Received: {!r}.".format(argument, value)
        )
    return bool(value)


def check_period(value, argument):
    """Checks a number of epochs that may be 0.

    Raises:
        InvalidArgumentError: Not an integer >= 0.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 0:
        raise InvalidArgumentError(
            "`{}` must be an integer >= 0. Received: {!r}.".format(argument, value)
        )


def check_path(value, argument):
    """Checks a directory name.

    Raises:
        InvalidArgumentError: Neither a string nor a path object.
    """
    try:
        if os.fspath(value):
            return
    except TypeError:
        pass
    raise InvalidArgumentError(
        "`{}` must be the name of a directory. Received: {!r}.".format(argument, value)
    )


def check_native(native):
    """Checks the names of the stock callback's own arguments.

    Raises:
        UnknownArgumentError: No generation has one of that name.
    """
    own = ["write_grads", "grads_freq", "grads_layers", "grads_reduce"]
    own += ["grads_clipped", "grads_scalars", "log_dir", "histogram_freq"]
    for name in native:
        if name not in NATIVE:
            near = difflib.get_close_matches(name, list(NATIVE) + own, n=1, cutoff=0.0)
            raise UnknownArgumentError(
                "`TensorBoard` must get arguments that some generation of it has. "
                "Received: {!r}. Did you mean {!r}?".format(name, near[0])
            )


def _names_of(stock_class):
    """Returns the names of the arguments that a stock callback takes."""
    names = set()
    for base in stock_class.__mro__:
        parameters = inspect.signature(base.__init__).parameters
        names.update(parameters)
        # The class of Keras 2.3 hands on what only its base names.
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            break
    return names


def stock_kwargs(stock_class, native):
    """Returns those of the user's arguments that the running stock callback has.

    Warns about the others, by name, with what to use instead.
    """
    known = _names_of(stock_class)
    lacking = [name for name in native if name not in known]
    if lacking:
        warn(
            "The TensorBoard callback of this Keras has no {}.".format(
                "; ".join("`{}`: {}".format(name, NATIVE[name]) for name in lacking)
            )
        )
    return {name: value for name, value in native.items() if name in known}
