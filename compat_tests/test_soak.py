"""A long run fills nothing up: neither memory, nor graphs, files or threads.

The long form, 20,000 steps and 200 fits, takes the same functions with larger numbers.
"""

import gc
import os

from legacy_gradlog import GradientLogger, TensorBoard

from .frameworks import small_data
from .oracle import read_events

MEGABYTE = 2**20


def usage(fw):
    """Returns what this process holds, and its resident memory in bytes."""
    gc.collect()
    graphs = [o for o in gc.get_objects() if issubclass(type(o), fw.v1.Graph)]
    # TensorFlow empties those of functions that are gone.
    graphs = [graph for graph in graphs if vars(graph)]
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    held = {
        "graphs": len(graphs),
        "nodes": sum(len(graph.get_operations()) for graph in graphs),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }
    return held, pages * os.sysconf("SC_PAGE_SIZE")


def make_logger(fw, log_dir, freq):
    return GradientLogger(log_dir, freq=freq)


def make_board(fw, log_dir, freq):
    return TensorBoard(log_dir, write_grads=True, grads_freq=freq)


def make_nothing(fw, log_dir, freq):
    return fw.keras.callbacks.Callback()


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


def test_many_steps(fw, tmp_path):
    usages = train_long(fw, str(tmp_path), 2000, make_logger)
    (before, memory_before), (after, memory) = usages
    assert after == before
    assert memory - memory_before < 20 * MEGABYTE
    events = read_events(fw, tmp_path)
    steps = [event.step for event in events if event.tag == "d/kernel_0_grad"]
    assert steps == list(range(0, 2000, 10))


def test_many_fits(fw, tmp_path):
    """Every fit of TF 2.0 leaves three graphs behind, and no more of them with us."""
    growths = []
    for make in (make_nothing, make_logger, make_board):
        fw.clear()
        log_dir = str(tmp_path / make.__name__)
        (before, memory_before), (after, memory) = train_often(fw, log_dir, 20, make)
        growths.append({name: after[name] - before[name] for name in after})
        assert memory - memory_before < 20 * MEGABYTE
    plain = growths.pop(0)
    for growth in growths:
        assert all(growth[name] <= max(plain[name], 0) for name in plain), growth
    steps = [e.step for e in read_events(fw, tmp_path) if e.tag == "d/kernel_0_grad"]
    assert sorted(steps) == sorted(list(range(100)) * 2)
