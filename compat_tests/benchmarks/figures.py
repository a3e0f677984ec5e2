"""What is not a ratio of epoch times: bytes, memory, growth, and the sketch alone."""

import os
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np

from legacy_gradlog import GradientLogger
from legacy_gradlog.engines import sketch_ops

from ..frameworks import files_below
from ..oracle import read_events
from .timing import Run, ratio_of
from .workloads import WORKLOADS, Workload, branches_of, stack_of

__all__ = ["FIGURES", "peak_memory_here"]

#: In bytes; `getrusage` tells kibibytes.
KIBIBYTE = 1024


def bytes_per_histogram(fw, pairs):
    """Yields the event bytes of each histogram record, its scalars included."""
    total = 0, 0
    for name, workload in WORKLOADS.items():
        with tempfile.TemporaryDirectory() as log_dir:
            logger = GradientLogger(log_dir, freq=workload.steps)
            Run(
                fw, workload.model(fw), workload.data(), workload.batch, [logger]
            ).seconds()
            tags = [event.tag for event in read_events(fw, log_dir)]
            paths = [path for found in files_below(log_dir).values() for path in found]
            size = sum(os.path.getsize(path) for path in paths)
        count = sum(tag.endswith("_grad") for tag in tags)
        total = total[0] + size, total[1] + count
        yield name, "{:.0f} bytes".format(size / count)
    yield "all", "{:.0f} bytes, target 2000".format(total[0] / total[1])


def peak_memory_here(fw, log_dir):
    """Trains the big model, logged if there is a directory; returns bytes."""
    workload = WORKLOADS["big"]
    callbacks = [GradientLogger(log_dir)] if log_dir else []
    model, data = workload.model(fw), workload.data()
    fw.fit(model, *data, batch_size=workload.batch, epochs=2, callbacks=callbacks)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE


def peak_memory(fw, pairs):
    """Yields the extra peak memory of the big model, in parts of its parameters."""
    parameters = 4 * WORKLOADS["big"].model(fw).count_params()
    command = [sys.executable, "-m", __package__, "--keras", fw.name, "--peak"]
    extras = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as log_dir:
            plain, logged = (
                int(subprocess.check_output(command + [folder]).split()[-1])
                for folder in ("", log_dir)
            )
        extras.append(100.0 * (logged - plain) / parameters)
    text = "{:.1f} % of the parameters' bytes, target 10"
    yield "big", text.format(np.median(extras))


def growth(fw, pairs):
    """Yields what a logged step takes, from few weights and parameters to many."""
    sizes = [
        ("{} weights".format(2 * n), branches_of(n), (16,), 4 * n) for n in (5, 50, 500)
    ]
    sizes += [
        ("10^4 parameters", stack_of(100, 24), (76,), 24),
        ("10^6 parameters", stack_of(1000, 200), (800,), 200),
        ("5 x 10^7 parameters", stack_of(5000, 8000, 600), (1000,), 600),
    ]
    for name, outputs, shape, width in sizes:
        workload = Workload(name, outputs, shape, width, steps=10, short=10)
        model, data = workload.model(fw), workload.data()
        with tempfile.TemporaryDirectory() as log_dir:
            logger = GradientLogger(log_dir, freq="batch")
            run = Run(fw, model, data, workload.batch, [logger])
            ratio = ratio_of(run, Run(fw, model, data, workload.batch), pairs)
        extra = (ratio.median - 1) * ratio.seconds / workload.steps
        weights, values = len(model.trainable_weights), model.count_params()
        allowed = 60e-6 * weights + 10e-9 * values
        text = "{:.2f} ms a logged step, target {:.2f} ({} weights, {} values)"
        yield name, text.format(1e3 * extra, 1e3 * allowed, weights, values)


def sketch_alone(fw, pairs):
    """Yields how much faster the sketch is than ``tf.summary.histogram``."""
    tf = fw.tf
    if not fw.eager:
        return
    values = tf.Variable(np.random.RandomState(0).randn(4000000).astype("float32"))
    with tempfile.TemporaryDirectory() as log_dir:
        writer = tf.summary.create_file_writer(log_dir)

        @tf.function
        def summary():
            with writer.as_default():
                return tf.summary.histogram("values", values, step=0)

        @tf.function
        def sketch():
            return sketch_ops.sketch_rows([values])

        ratios = []
        for number in range(pairs + 1):
            times = []
            for function in (summary, sketch):
                began = time.perf_counter()
                function()
                times.append(time.perf_counter() - began)
            ratios.append(times[0] / times[1])
    # The first pair was traced.
    text = "{:.0f} times as fast as tf.summary.histogram, target 20"
    yield "4 million values", text.format(np.median(ratios[1:]))


FIGURES = [
    ("event bytes per histogram record", bytes_per_histogram),
    ("extra peak memory, epoch level", peak_memory),
    ("growth", growth),
    ("the sketch alone", sketch_alone),
]
