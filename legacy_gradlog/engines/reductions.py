"""The gradients that Horovod has reduced, found in the graph of a training step.

Horovod's optimizer adds collective operations to the graph while the train function is
built. Every worker runs those in every step, so their results can be fetched by one
worker alone. One more collective, which the others do not run, would wait for ever:
nothing here adds any.
"""

import re

from .. import runtime
from ..errors import UnsupportedError

__all__ = ["Reductions"]

#: The name scope that Horovod gives to the reduction of an optimizer's gradients.
_SCOPE = re.compile(r"(?:.*/)?[^/]+_Allreduce(?:_\d+)?/")


class Reductions:
    """The reductions within the updates of one train function.

    Args:
        updates: The operation that runs all updates.
    """

    def __init__(self, updates):
        self._step = _reached_from([updates])
        self._collectives = {op for op in self._step if _is_collective(op)}
        scopes = (_SCOPE.match(op.name) for op in self._collectives)
        self._scopes = tuple({scope.group() for scope in scopes if scope})

    def __bool__(self):
        """Whether the step has any collective, in an optimizer's reduction or not."""
        return bool(self._collectives)

    def gradient_of(self, variable, path):
        """Returns the reduced gradient that updates a variable.

        The walk goes from what assigns to the variable back to the first tensors that
        come out of a reduction: those that the optimizer applies, after averaging and
        decompression.

        Args:
            variable: A variable that the train function updates.
            path: How to call it in an error.

        Returns:
            A tensor, or `tf.IndexedSlices`: the rows of all workers.

        Raises:
            UnsupportedError: There is not exactly one such gradient.
        """
        handle = variable.op.outputs[0]
        writers = [op for op in handle.consumers() if op in self._step and _writes(op)]
        found = []
        _reached_from(writers, lambda tensor: self._take(tensor, found))
        results = [tensor for tensor in found if self._is_reduced(tensor)]
        values = [tensor for tensor in results if tensor.dtype.is_floating]
        rows = [tensor for tensor in results if tensor.dtype.is_integer]
        if not writers:
            problem = "no update outside of a condition"
        elif not results:
            problem = "an update that no reduction leads to"
        elif len(values) != 1 or len(rows) != len(results) - 1 or len(rows) > 1:
            problem = "an update that {} tensors of reductions lead to".format(
                len(results)
            )
        elif any(_is_conditional(tensor.op) for tensor in results):
            problem = "a reduction that not every step runs"
        elif not rows and not values[0].shape.is_compatible_with(variable.shape):
            problem = "a reduction of shape {} for a weight of shape {}".format(
                values[0].shape, variable.shape
            )
        elif rows:
            return runtime.tensorflow().IndexedSlices(values[0], rows[0])
        else:
            return values[0]
        raise UnsupportedError(
            "Under Horovod the update of a logged weight must take its gradient from "
            "one reduction, in every step. Received: {} for {}. Wrap the optimizer in "
            "`DistributedOptimizer`, leave `backward_passes_per_step` at 1 and control "
            "flow at its first version, or log other layers than local ones.".format(
                problem, path
            )
        )

    def _take(self, tensor, found):
        """Whether the walk ends at ``tensor``, which then belongs to a reduction."""
        inside = tensor.op.name.startswith(self._scopes)
        if inside and tensor not in found:
            found.append(tensor)
        return inside

    def _is_reduced(self, tensor):
        """Whether a tensor of a reduction comes from a collective of it."""
        within = _reached_from(
            [tensor.op], lambda t: not t.op.name.startswith(self._scopes)
        )
        return not self._collectives.isdisjoint(within)


def _reached_from(operations, ends_at=lambda tensor: False):
    """Returns the operations that others depend on, and they themselves.

    Args:
        operations: Where to start.
        ends_at: Whether not to go beyond a tensor.
    """
    reached = set()
    waiting = list(operations)
    while waiting:
        operation = waiting.pop()
        if operation in reached:
            continue
        reached.add(operation)
        waiting += operation.control_inputs
        waiting += [tensor.op for tensor in operation.inputs if not ends_at(tensor)]
    return reached


def _is_collective(operation):
    return operation.type.startswith("Horovod")


def _writes(operation):
    return any(part in operation.type for part in ("Assign", "Apply", "Scatter"))


def _is_conditional(operation):
    """Whether an operation is inside of a condition: its result may be missing."""
    return operation._get_control_flow_context() is not None
