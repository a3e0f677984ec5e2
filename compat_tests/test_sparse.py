"""Gradients of embeddings: what was looked up twice is one row of the gradient.

`Embedding` gives a slice for every look-up; the gradient is their sum by rows, and only
these rows are logged.
"""

import numpy as np

from legacy_gradlog import GradientLogger

from .frameworks import BATCH, LEARNING_RATE, Trained
from .oracle import (
    Gradient,
    assert_histogram,
    assert_scalars,
    assert_step_level,
    expected_keys,
    keys,
    read_events,
)

ROWS = 10


def shared_embedding(fw, embedding, kernel):
    """Returns a model of two inputs whose ids are looked up in one table."""
    layers = fw.layers
    inputs = [layers.Input((size,), dtype="int32") for size in (3, 1)]
    parts = [layers.Flatten()(embedding(each)) for each in inputs]
    dense = layers.Dense(1, use_bias=False, kernel_initializer=kernel, name="d")
    return fw.keras.models.Model(inputs, dense(layers.Concatenate()(parts))), dense


def test_the_dense_maximum(fw, tmp_path):
    """Mean of the sum of all looked-up numbers: each look-up adds 1 / BATCH."""
    embedding = fw.layers.Embedding(ROWS, 1, name="embedding")
    model, dense = shared_embedding(fw, embedding, "ones")
    dense.trainable = False
    model.compile(fw.optimizer(), lambda y_true, y_pred: y_pred)
    history = np.tile([[7, 7, 2]], (BATCH, 1)).astype("int32")
    target = np.array([[7]] * 3 + [[5]] * 5, "int32")
    logger = GradientLogger(str(tmp_path), freq="batch")
    before = embedding.get_weights()[0]
    fw.fit(model, [history, target], np.zeros((BATCH, 1)), callbacks=[logger])

    rows = [2, 5, 7]
    expected = np.array([8, 5, 2 * 8 + 3]) / BATCH
    applied = (before - embedding.get_weights()[0]).ravel() / LEARNING_RATE
    np.testing.assert_allclose(applied[rows], expected, atol=1e-5)
    events = read_events(fw, tmp_path)
    assert keys(events) == expected_keys(["embedding/embeddings"], [0])
    (histogram,) = [e.value for e in events if e.tag == "embedding/embeddings_0_grad"]
    assert_histogram(histogram, Gradient(expected, 1e-6))
    assert_scalars(
        events,
        0,
        "embedding/embeddings",
        Gradient(expected, 1e-6),
        ("mean_abs", "norm"),
    )


def test_one_table_for_two_inputs(fw, tmp_path):
    """One record an update, of the rows that either input touches."""
    embedding = fw.layers.Embedding(ROWS, 2, name="embedding")
    model, dense = shared_embedding(fw, embedding, "glorot_uniform")
    model.compile(fw.optimizer(), "mse")
    random = np.random.RandomState(0)
    ids = [random.randint(0, ROWS, (40, size)).astype("int32") for size in (3, 1)]
    path = "embedding/embeddings"
    trained = Trained(model, [(path, embedding, 0), ("d/kernel", dense, 0)])
    weights = fw.recorder(trained)
    logger = GradientLogger(str(tmp_path), freq="batch")
    fw.fit(model, ids, random.randn(40, 1), callbacks=[logger, weights])

    batches = np.split(np.concatenate(ids, axis=1), 40 // BATCH)
    rows = {path: [np.unique(batch) for batch in batches]}
    events = read_events(fw, tmp_path)
    assert keys(events) == expected_keys(trained.paths, range(5))
    assert_step_level(events, weights, trained.paths, range(5), rows)
