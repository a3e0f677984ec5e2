"""Two that log into one directory, started in one second: no record is lost.

Two processes, and two threads of one. Each trains a model of its own on data of its
own, so that a record says by its norm whose it is.
"""

import json

import numpy as np
import pytest

from .frameworks import run_script
from .oracle import read_events

SCRIPT = """
import contextlib, json, multiprocessing, os, sys, threading, time
import numpy as np
import tensorflow as tf

if sys.argv[3] == "graph" and hasattr(tf.compat, "v1"):
    tf.compat.v1.disable_eager_execution()

from compat_tests import conftest, frameworks, oracle
from legacy_gradlog import GradientLogger, TensorBoard, errors

errors.strict = True
(fw,) = conftest.available(sys.argv[2])
# A process has one profiler, which the stock callbacks of two threads both want.
no_profile = frameworks.no_profile(fw)


def train(number, log_dir, barrier):
    with contextlib.ExitStack() as stack:
        if not fw.eager:
            stack.enter_context(fw.v1.Graph().as_default())
            stack.enter_context(fw.v1.Session().as_default())
        x, y = frameworks.small_data(seed=number)
        with building:
            # Early Kerases build all models in one graph. The first fit does what makes
            # it slow, so that the next two begin together.
            trained = fw.linear_model()
            fw.fit(trained.model, x, y)
        callbacks = [
            # First, since TensorBoard waits for a second of its own on TF 1.
            GradientLogger(log_dir + "/logger", freq="batch"),
            TensorBoard(
                log_dir + "/board", write_grads=True, grads_freq="batch", **no_profile
            ),
            fw.recorder(trained),
        ]
        barrier.wait(60)
        time.sleep(1 - time.time() % 1)
        fw.fit(trained.model, x, y, epochs=2, callbacks=callbacks)
        updates = oracle.updates_of(callbacks[-1], "d/kernel")
        norms = [float(np.linalg.norm(update.values)) for update in updates]
        with open("{}-{}.json".format(log_dir, number), "w") as file:
            json.dump(norms, file)


building = threading.Lock()
barrier = multiprocessing.get_context("fork").Barrier(2)
children = [frameworks.fork(train, n, "processes", barrier) for n in range(2)]
for child in children:
    os.waitpid(child, 0)
barrier = threading.Barrier(2)
threads = [
    threading.Thread(target=train, args=(n, "threads", barrier)) for n in range(2)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""

_log_dirs = {}


@pytest.fixture
def log_dir(fw, tmp_path_factory):
    """Returns where one process a framework has done all of this."""
    if fw.name not in _log_dirs:
        log_dir = _log_dirs[fw.name] = tmp_path_factory.mktemp("two")
        mode = "eager" if fw.eager else "graph"
        run_script(SCRIPT, log_dir, fw.name, mode, timeout=200)
    return _log_dirs[fw.name]


@pytest.fixture(params=["processes", "threads"])
def kind(fw, request):
    """What two trainings are; expects a failure where Keras trains in one thread."""
    if request.param == "threads" and fw.name == "keras" and fw.eager:
        if not fw.is_keras_3:
            reason = "Keras 2.3 on TF 2 makes layers in the thread that imported it"
            request.node.add_marker(pytest.mark.xfail(strict=True, reason=reason))
    return request.param


@pytest.mark.parametrize("name", ["board", "logger"])
def test_no_record_is_lost(fw, log_dir, kind, name):
    made = [log_dir / "{}-{}.json".format(kind, number) for number in range(2)]
    first, second = [json.loads(path.read_text()) for path in made]
    events = read_events(fw, log_dir / kind / name)
    for tag in ("grad_norm/d/kernel", "grad_global_norm"):
        norms = {step: [] for step in range(5, 15)}
        for event in events:
            if event.tag == tag:
                norms[event.step].append(event.value)
        expected = [sorted(pair) for pair in zip(first, second)]
        found = [sorted(norms[step]) for step in sorted(norms)]
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    steps = sorted(event.step for event in events if event.tag == "d/kernel_0_grad")
    assert steps == sorted(list(range(5, 15)) * 2)
