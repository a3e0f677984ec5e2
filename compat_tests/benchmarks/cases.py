"""What is compared with what: our callback at every cadence, and what else there is."""

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
    ("never due", dict(freq=10**9), 1.01),
]


class Case(NamedTuple):
    """One comparison.

    Attributes:
        workload: The name of what is trained.
        what: What is measured.
        target: The largest ratio that is hoped for, None for a peer.
        runs: Called with a log directory; returns the run and the one without.
        scale: What a ratio's part above 1 is multiplied with, where the epoch that is
            measured is shorter than the hundred steps that are meant.
    """

    workload: str
    what: str
    target: Optional[float]
    runs: Callable[[str], Any]
    scale: float = 1.0


def cases_of(fw):
    """Returns every `Case` that this Keras can run."""
    compiled = fw.eager and fw.version >= Version("2.5")
    custom = fw.eager and fw.version >= Version("2.4")
    found = [Case("mlp", "no callback either", None, lambda _: _ours(fw, "mlp", None))]
    for name in WORKLOADS:
        for what, arguments, target in CADENCES:
            found.append(_logged(fw, name, what, arguments, target))
    every = dict(freq="batch")
    found.append(_logged(fw, "convnet", "every step", every, 1.1))
    found.append(_logged(fw, "mlp", "every step", every, 1.8))
    pool = dict(reduce="pool")
    found.append(_logged(fw, "convnet", "epoch, pool", pool, 1.1))
    if compiled:
        # The default of Keras 3 is the first of the two.
        for jit, name in ((True, "XLA"), (False, "no XLA")):
            for what, arguments, target in CADENCES + [("every step", every, 1.8)]:
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
    """Returns the case of our callback, one step an epoch where an epoch is short."""
    steps = WORKLOADS[name].steps
    freq = arguments.get("freq")
    scale = 1.0
    if freq in ("epoch", HUNDRED) and steps < HUNDRED:
        scale = steps / float(HUNDRED)
        if freq == HUNDRED:
            arguments = dict(arguments, freq=steps)

    def runs(log_dir):
        logger = GradientLogger(log_dir, **arguments)
        return _ours(fw, name, logger, **compile_arguments)

    return Case(name, what, target, runs, scale)


def _pair(fw, workload, model, plain, callback, **arguments):
    """Returns the run of a model with a callback, and that of the plain one without."""
    data = workload.data()
    callbacks = [callback] if callback else []
    return (
        Run(fw, model, data, workload.batch, callbacks, **arguments),
        Run(fw, plain, data, workload.batch, **arguments),
    )


def _ours(fw, name, logger, **compile_arguments):
    workload = WORKLOADS[name]
    # Both are fits of one model, so that its place in memory makes no difference.
    model = workload.model(fw, **compile_arguments)
    return _pair(fw, workload, model, model, logger)


def _stock(fw):
    def runs(log_dir):
        workload = WORKLOADS["mlp"]
        model = workload.model(fw)
        validation = workload.data(workload.steps * workload.batch // 5)
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
        batch = workload.data(workload.batch)
        callback = peers.recomputing_callback(fw, log_dir, *batch)
        return _compared(fw, None, callback)

    return runs
