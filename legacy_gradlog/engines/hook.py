"""Where an optimizer has its gradients ready, on every generation of TensorFlow 2.

One place a generation: the gradients are reduced over replicas and accumulated there,
and not clipped yet. Knows optimizers, and nothing of what is done with their gradients.
"""

import functools
import inspect
import operator
import threading
import weakref

from .. import runtime
from ..errors import UnsupportedError
from ..patching import Patch

__all__ = ["Calls", "OptimizerHook", "generation_of", "unconverted"]


def generation_of(optimizer, symbolic=False):
    """Returns the generation of an optimizer, as `runtime` tells it.

    Raises:
        UnsupportedError: It is none whose gradients can be seen.
    """
    generation = runtime.optimizer_generation(optimizer, symbolic)
    if generation is None:
        raise UnsupportedError(
            "Gradients can be logged for Keras optimizers whose step is known. "
            "Received: {!r}. Train with an optimizer of the model's own Keras, and "
            "accumulate no gradients with loss scaling.".format(
                type(optimizer).__name__
            )
        )
    return generation


class Calls:
    """Numbers the calls of one optimizer within a step that is traced or runs."""

    def __init__(self):
        self._traced = weakref.WeakKeyDictionary()
        self._graphs = weakref.WeakSet()
        self._most = 0
        self._certain = True
        self.begin()

    def begin(self):
        """Starts a call of the train function, which may run eagerly."""
        self._eager = {}

    def next(self):
        """Returns the number of this call, and whether its step has made one before.

        A train function may hold the step twice, within a loop and before it.
        """
        tf = runtime.tensorflow()
        replica = runtime.replica_number()
        if tf.executing_eagerly():
            number = self._eager.get(replica, 0)
            self._eager[replica] = number + 1
            return number, False
        graph = tf.compat.v1.get_default_graph()
        whole = _traced_function(graph)
        self._certain &= whole is graph
        self._graphs.add(runtime.outermost(graph))
        numbers = self._traced.setdefault(whole, {})
        number = numbers.get(replica, 0)
        numbers[replica] = number + 1
        self._most = max(self._most, number + 1)
        seen = numbers.setdefault((replica, "graphs"), weakref.WeakSet())
        again = graph in seen
        seen.add(graph)
        return number, again

    @property
    def are_certain(self):
        """Whether every step that was traced makes all of them, in no branch."""
        return self._certain and len(self._graphs) > 0

    @property
    def hold_random_state(self):
        """Whether a step that was traced has random numbers of its own."""
        return any(runtime.holds_random_state(graph) for graph in self._graphs)

    def made(self, steps):
        """Returns how many updates a call of ``steps`` batches has made at most."""
        if self._eager:
            return max(self._eager.values())
        return steps * self._most


class OptimizerHook:
    """Sees the gradients of every update of one optimizer while it is entered.

    Args:
        optimizer: The optimizer; its class tells which of its methods are wrapped.
        on_update: Called inside the step with the gradients before clipping and those
            after it, two lists of ``(gradient, variable)``. Both are reduced over
            replicas, accumulated and unscaled, as the optimizer does it before it
            clips.
        symbolic: The step is made from the optimizer's symbolic updates.
    """

    def __init__(self, optimizer, on_update, symbolic=False):
        self._on_update = on_update
        self._optimizer = optimizer
        inner = runtime.inner_optimizer(optimizer)
        generation = runtime.optimizer_generation(optimizer, symbolic)
        if generation == "wrapped v2 of 2.2" and runtime.replicas_here() > 1:
            raise UnsupportedError(
                "`apply_gradients` of an optimizer must be that of Keras for several "
                "replicas to be logged before TensorFlow 2.4. Received: {!r}, where it "
                "is overridden or wrapped. Leave it as it is, or upgrade "
                "TensorFlow.".format(type(optimizer).__name__)
            )
        if not all(map(runtime.is_of_keras, runtime.scaled_update_methods(optimizer))):
            raise UnsupportedError(
                "With loss scaling, what applies the gradients of an optimizer must be "
                "that of Keras. Received: {!r} of {!r}, one of which overrides it or "
                "is wrapped. Leave both as they are, or train without loss "
                "scaling.".format(type(optimizer).__name__, type(inner).__name__)
            )
        # Two replicas of a mirrored step are traced in two threads.
        self._clipping = threading.local()
        wraps = {
            "symbolic": {"get_updates": self._wrap_get_updates},
            "v2 of 2.0": {"_distributed_apply": self._wrap_distributed_apply},
            # What wraps `apply_gradients` may change the gradients, below us.
            "wrapped v2 of 2.2": {
                "_clip_gradients": self._wrap_clip,
                "_distributed_apply": self._wrap_distributed_apply,
            },
            "v2 of 2.2": {
                "_clip_gradients": self._wrap_clip,
                "_aggregate_gradients": self._wrap_aggregate,
                "apply_gradients": self._wrap_apply_gradients,
            },
            "v2": {"_transform_gradients": self._wrap_transform},
            "experimental": {
                "_clip_gradients": self._wrap_clip,
                "_internal_apply_gradients": self._wrap_apply,
            },
            "keras3": {
                "_clip_gradients": self._wrap_clip,
                "_backend_update_step": self._wrap_update,
            },
            # An update that overflowed never reaches the optimizer within.
            "scaled v2": {"apply_gradients": self._wrap_scaled_apply_gradients},
            "scaled v2 of 2.5": {"apply_gradients": self._wrap_reduced},
            "scaled experimental": {"apply_gradients": self._wrap_reduced},
            "scaled keras3": {"apply": self._wrap_scaled_apply},
        }[generation]
        self._patches = [Patch(optimizer, name, wrap) for name, wrap in wraps.items()]
        if self._wrap_reduced in wraps.values():
            # The optimizer within reduces the unscaled gradients before it is decided
            # whether there is an update.
            name = "aggregate_gradients"
            name = name if hasattr(inner, name) else "_" + name
            self._patches.append(Patch(inner, name, self._wrap_scaled_aggregate))

    def __enter__(self):
        for patch in self._patches:
            patch.apply()

    def __exit__(self, *exc_info):
        for patch in reversed(self._patches):
            patch.undo()

    def _wrap_get_updates(self, original):
        def get_updates(loss, params):
            tf = runtime.tensorflow()
            with loss.graph.as_default():
                before = after = tf.gradients(loss, params)
                optimizer = self._optimizer
                if runtime.clips(optimizer) or not runtime.is_of_keras(
                    optimizer.get_gradients
                ):
                    after = optimizer.get_gradients(loss, params)

                # A function keeps its reads and writes in order; this graph does not.
                @tf.function(autograph=False)
                def capture(before, after):
                    self._on_update(list(zip(before, params)), list(zip(after, params)))
                    return tf.constant(0)

                # Standalone Keras would make new ones on new slots, all zero.
                updates = getattr(self._optimizer, "updates", None)
                updates = updates or original(loss=loss, params=params)
                return list(updates) + [capture(before, after)]

        return get_updates

    def _wrap_distributed_apply(self, original):
        # TF 2.0 and 2.1 reduce in here, and `fit` does not clip.
        @unconverted(original)
        def _distributed_apply(distribution, grads_and_vars, **kwargs):
            pairs = list(grads_and_vars)
            updates = [(_summed(distribution, g), variable) for g, variable in pairs]
            self._on_update(self._unclipped(updates), updates)
            return original(distribution, pairs, **kwargs)

        return _distributed_apply

    def _wrap_apply_gradients(self, original):
        # TF 2.2 and 2.3: what is reduced already passes none of the other methods.
        @unconverted(original)
        def apply_gradients(
            grads_and_vars, name=None, experimental_aggregate_gradients=True
        ):
            pairs = list(grads_and_vars)
            if not experimental_aggregate_gradients:
                self._on_update(self._unclipped(pairs), pairs)
            self._clipping.applying = experimental_aggregate_gradients
            try:
                return original(pairs, name, experimental_aggregate_gradients)
            finally:
                self._clipping.applying = False

        return apply_gradients

    def _unclipped(self, pairs):
        """Returns the gradients that were clipped to these, or these."""
        before = getattr(self._clipping, "before", [])
        after = getattr(self._clipping, "after", [])
        before = [b for b, a in zip(before, after) if a is not None]
        after = [gradient for gradient in after if gradient is not None]
        pairs = [pair for pair in pairs if pair[0] is not None]
        gradients, variables = zip(*pairs) if pairs else ((), ())
        same = len(after) == len(gradients)
        if same and all(map(operator.is_, after, gradients)):
            return list(zip(before, variables))
        return pairs

    def _wrap_aggregate(self, original):
        # TF 2.2 and 2.3: a custom `train_step` reaches this from `apply_gradients`,
        # and is not clipped. `fit` itself calls it before clipping.
        @unconverted(original)
        def _aggregate_gradients(grads_and_vars):
            pairs = list(grads_and_vars)
            reduced = original(pairs)
            if getattr(self._clipping, "applying", False):
                updates = list(zip(reduced, [variable for _, variable in pairs]))
                self._on_update(updates, updates)
            return reduced

        return _aggregate_gradients

    def _wrap_transform(self, original):
        @unconverted(original)
        def _transform_gradients(grads_and_vars):
            before = list(grads_and_vars)
            after = list(original(before))
            self._on_update(before, after)
            return after

        return _transform_gradients

    def _wrap_clip(self, original):
        @unconverted(original)
        def _clip_gradients(grads):
            clipped = original(grads)
            self._clipping.before, self._clipping.after = list(grads), list(clipped)
            return clipped

        return _clip_gradients

    def _wrap_apply(self, original):
        @unconverted(original)
        def _internal_apply_gradients(grads_and_vars):
            grads_and_vars = list(grads_and_vars)
            self._updated([variable for _, variable in grads_and_vars])
            return original(grads_and_vars)

        return _internal_apply_gradients

    def _wrap_update(self, original):
        @unconverted(original)
        def _backend_update_step(grads, trainable_variables, learning_rate):
            self._updated(trainable_variables)
            return original(grads, trainable_variables, learning_rate)

        return _backend_update_step

    def _wrap_scaled_apply_gradients(self, original):
        @unconverted(original)
        def apply_gradients(grads_and_vars, *args, **kwargs):
            pairs = list(grads_and_vars)
            self._on_scaled_update(pairs)
            return original(pairs, *args, **kwargs)

        return apply_gradients

    def _wrap_reduced(self, original):
        # Gradients that are reduced already are not reduced again.
        parameters = inspect.signature(original)

        @unconverted(original)
        def apply_gradients(grads_and_vars, *args, **kwargs):
            pairs = list(grads_and_vars)
            given = parameters.bind(pairs, *args, **kwargs).arguments
            given.update(given.pop("kwargs", {}))
            if given.get("skip_gradients_aggregation") or not given.get(
                "experimental_aggregate_gradients", True
            ):
                self._on_scaled_update(pairs)
            return original(pairs, *args, **kwargs)

        return apply_gradients

    def _wrap_scaled_aggregate(self, original):
        @unconverted(original)
        def aggregate_gradients(grads_and_vars):
            reduced = list(original(grads_and_vars))
            self._on_scaled_update(reduced)
            return reduced

        return aggregate_gradients

    def _wrap_scaled_apply(self, original):
        optimizer = self._optimizer

        @unconverted(original)
        def apply(grads, trainable_variables=None):
            grads = list(grads)
            variables = trainable_variables or optimizer._trainable_variables
            scale = optimizer.initial_scale
            if optimizer.built:
                scale = runtime.tensorflow().convert_to_tensor(optimizer.dynamic_scale)
            gradients = [runtime.divided(gradient, scale) for gradient in grads]
            self._on_scaled_update(list(zip(gradients, variables)))
            return original(grads, trainable_variables)

        return apply

    def _on_scaled_update(self, pairs):
        # Clipping happens within the branch that an overflow skips: done here as well.
        pairs = [pair for pair in pairs if pair[0] is not None]
        inner = runtime.inner_optimizer(self._optimizer)
        after = pairs
        if runtime.clips(inner):
            after = runtime.clipped(inner, pairs)
        self._on_update(pairs, after)

    def _updated(self, variables):
        self._on_update(
            list(zip(self._clipping.before, variables)),
            list(zip(self._clipping.after, variables)),
        )


def _summed(distribution, gradient):
    """Returns the sum of the replicas' parts of one gradient."""
    tf = runtime.tensorflow()
    parts = distribution.experimental_local_results(gradient)
    if len(parts) == 1:
        return parts[0]
    if not isinstance(parts[0], tf.IndexedSlices):
        return tf.add_n(parts)
    return tf.IndexedSlices(
        tf.concat([part.values for part in parts], axis=0),
        tf.concat([part.indices for part in parts], axis=0),
        parts[0].dense_shape,
    )


def unconverted(original):
    """Decorates a wrapper of ``original`` that AutoGraph must leave alone."""

    def decorate(wrapper):
        wrapper = functools.wraps(original)(wrapper)
        return runtime.tensorflow().autograph.experimental.do_not_convert(wrapper)

    return decorate


def _traced_function(graph):
    """Returns the function's graph that a branch or loop body belongs to."""
    while graph.name.startswith(("cond", "while")) and hasattr(graph, "outer_graph"):
        graph = graph.outer_graph
    return graph
