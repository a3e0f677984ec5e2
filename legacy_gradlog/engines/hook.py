"""Where an optimizer has its gradients ready, on every generation of TensorFlow 2.

One place a generation: the gradients are reduced over replicas and accumulated there,
and not clipped yet. Knows optimizers, and nothing of what is done with their gradients.
"""

import functools
import operator
import threading

from .. import runtime
from ..patching import Patch

__all__ = ["OptimizerHook", "unconverted"]


class OptimizerHook:
    """Sees the gradients of every update of one optimizer while it is entered.

    Args:
        optimizer: The optimizer; its class tells which of its methods are wrapped.
        on_update: Called inside the step with the gradients before clipping and those
            after it, two lists of ``(gradient, variable)``. Both are reduced over
            replicas and accumulated, as the optimizer does it before it clips.
        symbolic: The step is made from the optimizer's symbolic updates.
    """

    def __init__(self, optimizer, on_update, symbolic=False):
        self._on_update = on_update
        self._optimizer = optimizer
        # Two replicas of a mirrored step are traced in two threads.
        self._clipping = threading.local()
        wraps = {
            "symbolic": {"get_updates": self._wrap_get_updates},
            "v2 of 2.0": {"_distributed_apply": self._wrap_distributed_apply},
            "v2 of 2.2": {
                "_clip_gradients": self._wrap_clip,
                "_aggregate_gradients": self._wrap_aggregate,
                "apply_gradients": self._wrap_apply_gradients,
            },
            "v2": {
                "_transform_gradients": self._wrap_transform,
                "apply_gradients": self._wrap_apply_gradients,
            },
            "experimental": {
                "_clip_gradients": self._wrap_clip,
                "_internal_apply_gradients": self._wrap_apply,
            },
            "keras3": {
                "_clip_gradients": self._wrap_clip,
                "_backend_update_step": self._wrap_update,
            },
        }[runtime.optimizer_generation(optimizer, symbolic)]
        self._patches = [Patch(optimizer, name, wrap) for name, wrap in wraps.items()]

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
                if runtime.clips(self._optimizer):
                    after = self._optimizer.get_gradients(loss, params)

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
            self._on_update(updates, updates)
            return original(distribution, pairs, **kwargs)

        return _distributed_apply

    def _wrap_apply_gradients(self, original):
        # Gradients that are reduced already pass none of the other methods.
        @unconverted(original)
        def apply_gradients(
            grads_and_vars, name=None, experimental_aggregate_gradients=True
        ):
            pairs = list(grads_and_vars)
            clipping = self._clipping
            if not experimental_aggregate_gradients:
                before, gradients = pairs, [gradient for gradient, _ in pairs]
                after = getattr(clipping, "after", [])
                same = len(after) == len(gradients)
                if same and all(map(operator.is_, after, gradients)):
                    before = zip(clipping.before, [variable for _, variable in pairs])
                self._on_update(list(before), pairs)
            clipping.applying = experimental_aggregate_gradients
            try:
                return original(pairs, name, experimental_aggregate_gradients)
            finally:
                clipping.applying = False

        return apply_gradients

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
