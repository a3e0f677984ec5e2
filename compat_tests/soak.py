"""Trains for long and often, and prints what this process then holds.

``python -m compat_tests.soak --steps 20000 --fits 200`` is the long form of what
`test_soak` runs: in a process of its own, where nobody else makes graphs and threads.
"""

import argparse
import gc
import json
import os
import tempfile

from legacy_gradlog import GradientLogger, TensorBoard, errors

from . import conftest
from .frameworks import small_data
from .oracle import read_events


def usage(fw):
    """Returns what this process holds, and its resident memory in bytes."""
    # A second round takes what the finalizers of the first let go.
    gc.collect()
    gc.collect()
    graphs = [o for o in gc.get_objects() if issubclass(type(o), fw.v1.Graph)]
    # TensorFlow empties those of functions that are gone. Since 2.13 they have no
    # dictionary to empty.
    graphs = [graph for graph in graphs if getattr(graph, "__dict__", True)]
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "graphs": len(graphs),
        "nodes": sum(len(graph.get_operations()) for graph in graphs),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def make_nothing(fw, log_dir, freq):
    return fw.keras.callbacks.Callback()


def make_logger(fw, log_dir, freq):
    return GradientLogger(log_dir, freq=freq)


def make_board(fw, log_dir, freq):
    return TensorBoard(log_dir, write_grads=True, grads_freq=freq)


def train_long(fw, log_dir, steps, make):
    """Trains for many steps; returns the usage after a fifth of them and at the end."""
    seen = []

    class Watch(fw.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch in (1, 9):
                seen.append(usage(fw))

    trained = fw.linear_model()
    x, y = small_data(rows=8 * steps // 10)
    callbacks = [make(fw, log_dir, 10), Watch()]
    fw.fit(trained.model, x, y, epochs=10, callbacks=callbacks)
    return seen


def train_often(fw, log_dir, fits, make):
    """Trains often, each time with a new callback; returns the same."""
    seen = []
    trained = fw.linear_model()
    for number in range(fits):
        callback = make(fw, os.path.join(log_dir, str(number)), 1)
        fw.fit(trained.model, *small_data(), callbacks=[callback])
        if number in (fits // 5, fits - 1):
            seen.append(usage(fw))
    return seen


def main():
    parser = argparse.ArgumentParser(prog="python -m compat_tests.soak")
    parser.add_argument("--keras", help="its name, where there are several")
    parser.add_argument("--steps", type=int, default=20000, help="of one fit")
    parser.add_argument("--fits", type=int, default=200)
    options = parser.parse_args()
    errors.strict = True
    fw = conftest.available(options.keras)[0]
    for train, number in ((train_long, options.steps), (train_often, options.fits)):
        for make in (make_nothing, make_logger, make_board):
            fw.clear()
            with tempfile.TemporaryDirectory() as log_dir:
                before, after = train(fw, log_dir, number, make)
                events = read_events(fw, log_dir)
            result = dict(train=train.__name__, make=make.__name__, number=number)
            result.update(before=before, after=after)
            steps = [e.step for e in events if e.tag == "d/kernel_0_grad"]
            result["steps"] = sorted(steps)
            print("USAGE", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
