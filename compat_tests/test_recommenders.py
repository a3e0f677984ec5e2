"""A two-tower retrieval model of TensorFlow Recommenders, with and without a strategy.

It has no `call`, no compiled loss and no weights before it has seen data: its
`train_step` is that of `tfrs.Model`. The library trains with Keras 2 only.
"""

import numpy as np
import pytest
import tensorflow as tf

from legacy_gradlog import GradientLogger, TensorBoard, tags

from .frameworks import BATCH, Trained, run_replicas
from .oracle import (
    assert_histogram,
    assert_scalars,
    assert_step_level,
    expected_keys,
    gradient_events,
    keys,
    read_events,
    updates_of,
)

tfrs = pytest.importorskip(
    "tensorflow_recommenders", reason="TensorFlow Recommenders is not in this line"
)
if not tf.executing_eagerly():
    pytest.skip("a `train_step` is called in eager mode only", allow_module_level=True)

layers = tf.keras.layers
USERS = ["user {}".format(number) for number in range(6)]
ITEMS = ["item {}".format(number) for number in range(9)]
UPDATES = 5


class TwoTowers(tfrs.Model):
    """Users and items, each in a tower that ends in as many numbers."""

    def __init__(self, user_tower, item_tower):
        super().__init__()
        self.user_tower = user_tower
        self.item_tower = item_tower
        candidates = tf.data.Dataset.from_tensor_slices(ITEMS).batch(4)
        self.task = tfrs.tasks.Retrieval(
            metrics=tfrs.metrics.FactorizedTopK(candidates.map(item_tower), ks=[2])
        )

    def compute_loss(self, features, training=False):
        return self.task(
            self.user_tower(features["user"]),
            self.item_tower(features["item"]),
            compute_metrics=not training,
        )


def tower(vocabulary, name=None):
    """Returns a tower whose layers, given a name, are named too."""
    dense, embedding = (name and name + end for end in ("_dense", "_embedding"))
    stack = [
        layers.StringLookup(vocabulary=vocabulary),
        layers.Embedding(len(vocabulary) + 1, 3, name=embedding),
        layers.Dense(2, name=dense),
    ]
    return tf.keras.Sequential(stack, name=name and name + "_tower")


def two_towers(fw):
    """Returns the model, not built, with what is trained in it."""
    towers = tower(USERS, "user"), tower(ITEMS, "item")
    model = TwoTowers(*towers)
    model.compile(fw.optimizer())
    probes = []
    for name, part in zip(["user", "item"], towers):
        path = "{0}_tower/{0}_".format(name)
        _, embedding, dense = part.layers
        probes += [
            (path + "embedding/embeddings", embedding, 0),
            (path + "dense/kernel", dense, 0),
            (path + "dense/bias", dense, 1),
        ]
    return Trained(model, probes)


def interactions():
    """Returns batches of names, and the rows of the embeddings each of them touches."""
    random = np.random.RandomState(0)
    features, rows = {}, {}
    for name, vocabulary in [("user", USERS), ("item", ITEMS)]:
        ids = random.randint(0, len(vocabulary), BATCH * UPDATES)
        features[name] = np.array(vocabulary)[ids]
        # Row 0 is for names that are not in the vocabulary.
        batches = (ids + 1).reshape(UPDATES, BATCH)
        path = "{0}_tower/{0}_embedding/embeddings".format(name)
        rows[path] = [np.unique(batch) for batch in batches]
        assert all(len(touched) < BATCH for touched in rows[path])
    return tf.data.Dataset.from_tensor_slices(features).batch(BATCH), rows


def train_and_compare(fw, trained, log_dir):
    """Trains a model that is not built, and again for the comparison."""
    data, rows = interactions()
    chosen = ["user_tower", "*_embedding"]
    paths = [path for path in trained.paths if "item_dense" not in path]
    callbacks = [
        TensorBoard(log_dir + "/last", write_grads=True, grads_layers=chosen),
        GradientLogger(log_dir + "/steps", freq=2),
    ]
    trained.model.fit(data, verbose=0, callbacks=callbacks)
    weights = fw.recorder(trained)
    trained.model.fit(data, epochs=2, verbose=0, callbacks=callbacks + [weights])

    rows = {path: touched * 2 for path, touched in rows.items()}
    last = gradient_events(read_events(fw, log_dir + "/last"))
    assert keys(last) == expected_keys(paths, range(3), "train")
    for path in paths:
        updates = updates_of(weights, path, rows.get(path))
        # The fit that was not recorded was epoch 0.
        for epoch, expected in [(1, updates[UPDATES - 1]), (2, updates[-1])]:
            key = (path + "_0_grad", epoch)
            (histogram,) = [e.value for e in last if (e.tag, e.step) == key]
            assert_histogram(histogram, expected)
            assert_scalars(last, epoch, path, expected, ("mean_abs", "norm"))

    steps = read_events(fw, log_dir + "/steps")
    assert keys(steps) == expected_keys(trained.paths, range(0, 3 * UPDATES, 2))
    compared = range(UPDATES + 1, 3 * UPDATES, 2)
    assert_step_level(steps, weights, trained.paths, compared, rows, first=UPDATES)


def test_two_towers(fw, tmp_path):
    train_and_compare(fw, two_towers(fw), str(tmp_path))


def test_two_towers_on_two_replicas(fw, tmp_path):
    """Every replica has negatives of its own; the gradients are summed."""
    script = """
from compat_tests import test_recommenders

with strategy.scope():
    trained = test_recommenders.two_towers(fw)
test_recommenders.train_and_compare(fw, trained, "logs")
print("all compared")
"""
    printed = run_replicas(script, fw, tmp_path)
    assert printed.endswith("all compared\n")


def test_towers_without_names_are_named_by_their_order(fw):
    """As Keras names them; the same in every process, and none twice."""
    for _ in range(2):
        fw.clear()
        model = TwoTowers(tower(USERS), tower(ITEMS))
        model.compile(fw.optimizer())
        model.fit(interactions()[0], verbose=0)
        trained = {id(variable) for variable in model.trainable_variables}
        found = [w for w in tags.name_weights(model) if id(w.variable) in trained]
        assert [weight.tag for weight in found] == [
            "sequential/embedding/embeddings_0",
            "sequential/dense/kernel_0",
            "sequential/dense/bias_0",
            "sequential_1/embedding_1/embeddings_0",
            "sequential_1/dense_1/kernel_0",
            "sequential_1/dense_1/bias_0",
        ]
