"""What must not come back, counted: traces, reads by the host, graphs that grow."""

import contextlib

from legacy_gradlog import GradientLogger

from . import cases
from .workloads import WORKLOADS

__all__ = ["bounds", "counts"]

EPOCHS, STEPS = 2, 50

#: What a fit may do once, whatever its length.
SLACK = {"traces": 0, "operations": 0, "host reads": EPOCHS * STEPS // 4}

#: For medians of few pairs, which only a change of kind exceeds.
BOUNDS = {"never due": 2.0, "epoch, last": 2.0, "every step": 10.0}


def counts(fw, log_dir):
    """Trains and counts; yields ``(what, counted, allowed)``."""
    workload = WORKLOADS["mlp"]
    data = workload.data(STEPS)
    model = workload.model(fw)
    # Update 0, the only one that is due, is made by the fit before.
    never = GradientLogger(log_dir, freq=10**9)
    count = _count_eagerly if fw.eager else _count_in_session
    with count(fw, model) as counted:

        def fit(*callbacks):
            before = counted()
            sizes = dict(batch_size=workload.batch, epochs=EPOCHS)
            fw.fit(model, *data, callbacks=list(callbacks), **sizes)
            return {what: now - before[what] for what, now in counted().items()}

        new, plain, first, again = fit(), fit(), fit(never), fit(never)
    if "traces" in first:
        yield "traces in the first logged fit", first["traces"], new["traces"]
    for what, usual in sorted(plain.items()):
        yield "{} in a further fit".format(what), again[what], usual + SLACK[what]


@contextlib.contextmanager
def _count_eagerly(fw, model):
    """Counts traces of the step, and tensors that become arrays of the host."""
    counted = dict.fromkeys(["traces", "host reads"], 0)
    step, tensor = model.train_step, type(fw.tf.constant(0))
    to_array = tensor._numpy

    def train_step(data):
        counted["traces"] += 1
        return step(data)

    def _numpy(self):
        counted["host reads"] += 1
        return to_array(self)

    model.train_step, tensor._numpy = train_step, _numpy
    try:
        yield lambda: dict(counted)
    finally:
        tensor._numpy = to_array
        del model.train_step


@contextlib.contextmanager
def _count_in_session(fw, model):
    """Counts operations of the graph, and what the session is asked for."""
    session = fw.keras.backend.get_session()
    runs, run = [], session.run

    def counting_run(*arguments, **kwargs):
        runs.append(arguments)
        return run(*arguments, **kwargs)

    session.run = counting_run
    operations = session.graph.get_operations
    try:
        yield lambda: {"operations": len(operations()), "host reads": len(runs)}
    finally:
        del session.run


def bounds(fw):
    """Returns the cases that are timed, with the largest ratio that is allowed."""
    return [
        (case, BOUNDS[case.what])
        for case in cases.cases_of(fw)
        if case.workload == "mlp" and case.what in BOUNDS
    ]
