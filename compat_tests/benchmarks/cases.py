"""What is compared with what: our callback at every cadence, and what else there is."""

import contextlib
from typing import Any, Callable, NamedTuple, Optional

from packaging.version import Version

from legacy_gradlog import GradientLogger

from . import peers
from .timing import Run
from .workloads import WORKLOADS

__all__ = ["Case", "cases_of"]

#: A cadence, and an epoch, that the targets are given for, in steps.
HUNDRED = 100

CADENCES = [
    ("epoch, last", dict(freq="epoch"), 1.01),
    ("every 100th step", dict(freq=HUNDRED), 1.02),
]
#: A gate that stays shut, which shows where a step is short.
NEVER = ("never due", dict(freq=10**9), 1.01)


class Case(NamedTuple):
    """One comparison.

    Attributes:
        workload: The name of what is trained.
        what: What is measured.
        target: The largest ratio that is hoped for, None for a peer.
        runs: Called with a log directory; returns the run and the one without.
        whole: Data of a longer epoch and its number of steps, where the measured epoch
            is shorter than the `HUNDRED` steps that are meant: what is done once an
            epoch is easier to see in a short one.
    """

    workload: str
    what: str
    target: Optional[float]
    runs: Callable[[str], Any]
    whole: Optional[Callable[[], Any]] = None


def cases_of(fw, strategy=None):
    """Returns every `Case` that this Keras can run, or those under a strategy."""
    if strategy is not None:
        return [
            _logged(fw, "mlp", what, arguments, target, strategy=strategy)
            for what, arguments, target in CADENCES + [NEVER]
        ]
    compiled = fw.eager and fw.version >= Version("2.5")
    custom = fw.eager and fw.version >= Version("2.4")
    found = [Case("mlp", "no callback either", None, lambda _: _ours(fw, "mlp", None))]
    for name in WORKLOADS:
        for what, arguments, target in CADENCES:
            found.append(_logged(fw, name, what, arguments, target))
    found.append(_logged(fw, "mlp", *NEVER))
    every = dict(freq="batch")
    found.append(_logged(fw, "convnet", "every step", every, 1.1))
    every_step = ("every step", every, 1.8)
    found.append(_logged(fw, "mlp", *every_step))
    pool = dict(reduce="pool")
    found.append(_logged(fw, "convnet", "epoch, pool", pool, 1.1))
    if compiled:
        # The default of Keras 3 is the first of the two.
        for jit, name in ((True, "XLA"), (False, "no XLA")):
            for what, arguments, target in CADENCES + [NEVER, every_step]:
                what = "{}, {}".format(what, name)
                more = dict(jit_compile=jit)
                found.append(_logged(fw, "mlp", what, arguments, target, **more))
    if fw.tf_version < Version("2.0"):
        found.append(Case("mlp", "peer: stock write_grads", None, _stock(fw)))
    if custom:
        for what, runs in (
            ("peer: cached variables", _cached),
            ("peer: tf.summary.histogram in the step", _summarized),
            ("peer: recomputed at epoch end", _recomputed),
        ):
            found.append(Case("mlp", what, None, runs(fw)))
    return found


def _logged(fw, name, what, arguments, target, **compile_arguments):
    """Returns the case of our callback; once an epoch is once in `HUNDRED` steps."""
    workload = WORKLOADS[name]
    steps, whole = workload.steps, None
    if arguments.get("freq") in ("epoch", HUNDRED):
        steps = workload.short
        if arguments["freq"] == HUNDRED:
            arguments = dict(arguments, freq=steps)

        def whole():
            longer = min(HUNDRED, 10 * steps)
            return workload.data(longer), longer

    def runs(log_dir):
        logger = GradientLogger(log_dir, **arguments)
        return _ours(fw, name, logger, steps, **compile_arguments)

    return Case(name, what, target, runs, whole)


def _pair(fw, workload, model, plain, callback, steps=None, **arguments):
    """Returns the run of a model with a callback, and that of the plain one without."""
    data = workload.data(steps)
    callbacks = [callback] if callback else []
    return (
        Run(fw, model, data, workload.batch, callbacks, **arguments),
        Run(fw, plain, data, workload.batch, **arguments),
    )


def _ours(fw, name, logger, steps=None, strategy=None, **compile_arguments):
    workload = WORKLOADS[name]
    # Both are fits of one model, so that its place in memory makes no difference.
    with strategy.scope() if strategy else contextlib.ExitStack():
        model = workload.model(fw, **compile_arguments)
    return _pair(fw, workload, model, model, logger, steps)


def _stock(fw):
    def runs(log_dir):
        workload = WORKLOADS["mlp"]
        model = workload.model(fw)
        validation = workload.data(workload.steps // 5)
        stock = peers.stock_callback(fw, log_dir, workload.batch)
        return _pair(fw, workload, model, model, stock, validation_data=validation)

    return runs


def _compared(fw, make, callback):
    """Returns the runs of a recipe and of a plain model, both without XLA."""
    workload = WORKLOADS["mlp"]
    compile_arguments = dict(jit_compile=False) if fw.is_keras_3 else {}
    plain = workload.model(fw, **compile_arguments)
    model = workload.model(fw, make, **compile_arguments)
    return _pair(fw, workload, model, plain, callback)


def _cached(fw):
    def runs(log_dir):
        cache = []
        make = peers.caching_model(fw, cache)
        return _compared(fw, make, peers.write_cached(fw, log_dir, cache))

    return runs


def _summarized(fw):
    def runs(log_dir):
        return _compared(fw, peers.summarizing_model(fw, log_dir), None)

    return runs


def _recomputed(fw):
    def runs(log_dir):
        workload = WORKLOADS["mlp"]
        batch = workload.data(1)
        callback = peers.recomputing_callback(fw, log_dir, *batch)
        return _compared(fw, None, callback)

    return runs
