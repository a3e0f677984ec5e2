"""The names that weights have in the log, the same on every generation.

Made of layer names, never of TensorFlow's variable names. How a generation hides its
sublayers is `runtime`'s business; nothing here imports a framework.
"""

import fnmatch
import re
from typing import Any, NamedTuple, Tuple

from . import runtime
from .errors import InvalidArgumentError

__all__ = ["Weight", "name_variables", "name_weights", "select"]


class Weight(NamedTuple):
    """One weight of a model and its names.

    Attributes:
        path: ``encoder/dense_1/kernel``: the layers that lead to it, and its own name.
            Unique in the model.
        tag: ``encoder/dense_1/kernel_0``, the name that stock Keras 2 gave its
            histogram. Unique in the model.
        layers: The names of the layers that lead to it, outermost first.
        variable: The framework's variable.
    """

    path: str
    tag: str
    layers: Tuple[str, ...]
    variable: Any

    def matches(self, pattern):
        """Whether a shell pattern names this weight or a layer that leads to it."""
        prefixes = ("/".join(self.layers[: i + 1]) for i in range(len(self.layers)))
        names = set(self.layers).union(prefixes, [self.path])
        return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _own_name(layer, variable):
    """Returns the name that ``layer`` gave its weight, without its scope.

    Where two models of one process share a graph, TensorFlow may have numbered it; the
    attribute that holds it tells.
    """
    scope, _, name = re.sub(r":\d+$", "", variable.name).rpartition("/")
    whole = scope.split("/")[-1]
    if re.match(r"part_\d+$", name) and whole not in ("", layer.name):
        # A parameter server strategy has cut it in parts.
        return whole + "/" + name
    given = re.sub(r"_\d+$", "", name)
    return given if vars(layer).get(given) is variable else name


def _is_unnamed_cell(parent, layer):
    """Whether ``layer`` is the cell that a recurrent layer made for itself.

    Keras 2 leaves it out of the weight's name, later ones number it by the process.
    """
    name = re.sub(r"_\d+$", "", layer.name).replace("_", "")
    return (
        getattr(parent, "cell", None) is layer and name == type(layer).__name__.lower()
    )


def _walk(layer, layers, seen):
    """Yields ``(layer names, own name, variable)`` for every weight, in model order."""
    if id(layer) in seen:
        return
    seen.add(id(layer))
    children = runtime.sublayers(layer)
    for variable in runtime.own_weights(layer, children):
        yield layers, _own_name(layer, variable), variable
    for child in children:
        if _is_unnamed_cell(layer, child):
            for item in _walk(child, layers, seen):
                yield item
        else:
            for item in _walk(child, layers + (child.name,), seen):
                yield item


def name_weights(model):
    """Returns a `Weight` for every weight of ``model``, each once, in model order."""
    return _named(_walk(model, (), set()))


def name_variables(variables):
    """Returns a `Weight` for each of ``variables`` where no model is known.

    The framework's own names are all there is.
    """
    names = [runtime.variable_name(variable).split("/") for variable in variables]
    return _named(
        (tuple(parts[:-1]), parts[-1], variable)
        for parts, variable in zip(names, variables)
    )


def _named(found):
    weights, paths, tags, variables = [], set(), set(), set()
    for layers, name, variable in found:
        if id(variable) in variables:
            continue
        variables.add(id(variable))
        stem = path = "/".join(layers + (name,))
        number = 0
        tag = stem + "_0"
        while path in paths or tag in tags:
            number += 1
            path = tag = "{}_{}".format(stem, number)
        paths.add(path)
        tags.add(tag)
        weights.append(Weight(path, tag, layers, variable))
    return weights


def select(weights, patterns, argument):
    """Returns those of ``weights`` that any of ``patterns`` names; all for None.

    Raises:
        InvalidArgumentError: A pattern names no weight.
    """
    if patterns is None:
        return weights
    for pattern in patterns:
        if not any(weight.matches(pattern) for weight in weights):
            raise InvalidArgumentError(
                "`{}` must name layers or weights that are trained. Received: {!r}, "
                "which matches none of: {}.".format(
                    argument, pattern, ", ".join(_names(weights)) or "(no weights)"
                )
            )
    return [w for w in weights if any(w.matches(p) for p in patterns)]


def _names(weights):
    names = []
    for weight in weights:
        for name in ("/".join(weight.layers), weight.path):
            if name and name not in names:
                names.append(name)
    return names
