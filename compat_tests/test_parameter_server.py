"""`ParameterServerStrategy`: workers make the steps whenever they come to it.

The cluster is in one process, which ends with it: one parameter server, two workers.
"""

import json

import pytest
import tensorflow as tf
from packaging.version import Version

from . import cluster, oracle
from .frameworks import run_script

if Version(tf.__version__) < Version("2.4"):
    pytest.skip(
        "before TF 2.4 this strategy is another one, which `fit` cannot train under",
        allow_module_level=True,
    )

CLUSTER = """
import json, os, sys
import numpy as np
import tensorflow as tf
from compat_tests import cluster, conftest, frameworks
from legacy_gradlog import GradientLogger, TensorBoard, errors

errors.strict = True
(fw,) = conftest.available(sys.argv[2])
ps, *workers = cluster.free_addresses(3)
spec = tf.train.ClusterSpec({"ps": [ps], "worker": workers})
# A worker waits for the others on threads of its own: more of them than cores.
config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4)
servers = [
    tf.distribute.Server(spec, job_name=job, task_index=index, config=config)
    for job, index in (("ps", 0), ("worker", 0), ("worker", 1))
]
distribute = tf.distribute.experimental
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
partitioner = distribute.partitioners.FixedShardsPartitioner(2)
strategy = distribute.ParameterServerStrategy(resolver, partitioner)

def make(inputs):
    with strategy.scope():
        model = fw.linear_model(fw.optimizer(rate=0.0), inputs=inputs).model
    model.set_weights([np.zeros_like(w) for w in model.get_weights()])
    return model

def batches(inputs):
    # Every other batch has the gradient -8, and the others 4.
    y = np.array([[4.0], [4.0], [-2.0], [-2.0]], "float32")
    def of_worker(context=None):
        data = tf.data.Dataset.from_tensor_slices((np.ones((4, inputs), "float32"), y))
        return data.repeat().batch(2)
    utils = fw.keras.utils
    return utils.experimental.DatasetCreator(of_worker)

def fit(model, *callbacks, inputs=1, epochs=1):
    return model.fit(batches(inputs), epochs=epochs, steps_per_epoch=8, verbose=0,
                     callbacks=list(callbacks))
"""

CASES = """
result = {}
for name, kwargs in (("steps", {"freq": 2}), ("pool", {"reduce": "pool"})):
    model = make(1)
    try:
        fit(model, GradientLogger(name, **kwargs))
    except errors.UnsupportedError as error:
        result[name] = str(error)
    result[name + " updates"] = int(model.optimizer.iterations.numpy())

model = make(200)
logger = GradientLogger("last")
fit(model, logger, inputs=200, epochs=6)
fit(model, logger, inputs=200, epochs=1)
result["updates"] = int(model.optimizer.iterations.numpy())
fit(make(1), TensorBoard("board", histogram_freq=2, write_grads=True), epochs=3)
print("RESULT", json.dumps(result), flush=True)
# The servers have no end of their own.
os._exit(0)
"""

NO_FIT = """
# Keras fails before it comes to the callbacks; other releases may come farther.
model = make(1)
x, y = np.ones((2, 1), "float32"), np.ones((2, 1), "float32")
data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(2)
logger = GradientLogger("logs")
for train in (
    lambda: model.fit(data, steps_per_epoch=2, verbose=0),
    lambda: model.fit(data, steps_per_epoch=2, verbose=0, callbacks=[logger]),
    lambda: logger.set_model(model),
):
    try:
        train()
    except Exception as error:
        print("FAILED", type(error).__name__, str(error).split("\\n")[0], flush=True)
os._exit(0)
"""

_runs = {}


def run(fw, tmp_path_factory):
    """Returns the log directory and the result, from one run for each Keras."""
    if not fw.eager:
        pytest.skip("strategies are logged in eager mode only")
    if fw.is_keras_3 or fw.tf_version < Version("2.5"):
        pytest.skip("`fit` of this Keras cannot train under this strategy; refused")
    if fw.name not in _runs:
        log_dir = tmp_path_factory.mktemp("cluster")
        timeout = cluster.SECONDS
        printed = run_script(CLUSTER + CASES, log_dir, fw.name, timeout=timeout)
        (line,) = [x for x in printed.split("\n") if x.startswith("RESULT ")]
        _runs[fw.name] = log_dir, json.loads(line[len("RESULT ") :])
    return _runs[fw.name]


def test_step_level_is_refused(fw, tmp_path_factory):
    log_dir, result = run(fw, tmp_path_factory)
    assert 'Received: every 2 updates. Log with "epoch".' in result["steps"]
    assert result["steps updates"] == 0
    assert not (log_dir / "steps").exists()


def test_pooling_is_refused(fw, tmp_path_factory):
    log_dir, result = run(fw, tmp_path_factory)
    assert 'Take "last".' in result["pool"]
    assert result["pool updates"] == 0
    assert not (log_dir / "pool").exists()


def test_a_record_is_of_one_update(fw, tmp_path_factory):
    """Two workers write at the same time; the weight is cut in two parts."""
    log_dir, result = run(fw, tmp_path_factory)
    assert result["updates"] == 7 * 8
    events = oracle.read_events(fw, log_dir / "last")
    paths = ["d/kernel/part_0", "d/kernel/part_1"]
    assert oracle.keys(events) == oracle.expected_keys(paths, range(7))
    for event in events:
        if event.tag.endswith("_grad"):
            histogram = event.value
            assert histogram.num == 100
            assert histogram.min == histogram.max
            assert histogram.min in (-8.0, 4.0)
            assert list(histogram.bucket) == [100]
            assert histogram.sum == 100 * histogram.min
            norms = {
                e.value
                for e in events
                if e.tag.startswith("grad_norm/") and e.step == event.step
            }
            # Both parts are of the same update.
            assert norms == {abs(histogram.min) * 10}


def test_the_stock_callback_shares_its_file(fw, tmp_path_factory):
    log_dir, _ = run(fw, tmp_path_factory)
    events = oracle.read_events(fw, log_dir / "board")
    found = [e for e in events if e.tag == "d/kernel_0_grad"]
    assert [e.step for e in found] == [0, 2]
    assert {e.value.min for e in found} <= {-8.0, 4.0}
    assert {e.run for e in events} == {"train"}


def test_a_keras_that_cannot_train_is_refused(fw, tmp_path):
    if not fw.eager:
        pytest.skip("strategies are logged in eager mode only")
    if not fw.is_keras_3 and fw.tf_version >= Version("2.5"):
        pytest.skip("it can")
    timeout = cluster.SECONDS
    printed = run_script(CLUSTER + NO_FIT, tmp_path, fw.name, timeout=timeout)
    plain, logged, ours = [x for x in printed.split("\n") if x.startswith("FAILED ")]
    assert plain.startswith("FAILED ValueError") and logged == plain
    assert ours.startswith("FAILED UnsupportedError The strategy must be one that")
    assert not (tmp_path / "logs").exists()
