"""Event files: other readers, and two that start in the same second."""

import time

import pytest

from legacy_gradlog import GradientLogger, TensorBoard

from .frameworks import files_below, small_data
from .oracle import expected_keys, keys, read_events


def test_tensorboard_reads_it_back(fw, tmp_path):
    """TensorBoard's own `EventAccumulator` finds every tag, step and number."""
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    trained = fw.small_model()
    logger = GradientLogger(str(tmp_path), freq="batch")
    fw.fit(trained.model, *small_data(), callbacks=[logger])

    accumulator = accumulators.EventAccumulator(str(tmp_path))
    accumulator.Reload()
    tags = accumulator.Tags()
    expected = expected_keys(trained.paths, [0])
    histograms = [tag for _, tag, _ in expected if tag.endswith("_grad")]
    scalars = [tag for _, tag, _ in expected if not tag.endswith("_grad")]
    found = set(tags["histograms"]) | set(tags["scalars"]) | set(tags["tensors"])
    assert found == set(histograms + scalars)
    for path, record in logger.latest.items():
        if tags["histograms"]:
            last = accumulator.Histograms(path + "_0_grad")[-1]
            value = last.histogram_value
            assert last.step == record.step == 4
            assert (value.num, value.min, value.max) == (
                record.count,
                record.min,
                record.max,
            )
        norm = accumulator.Scalars("grad_norm/" + path)
        assert [event.step for event in norm] == list(range(5))
        assert norm[-1].value == pytest.approx(record.norm)


def begin_a_second(fw, trained, log_dir):
    """Does what makes a first fit slow, and waits until a new second has begun."""
    callback = TensorBoard(str(log_dir), write_grads=True)
    fw.fit(trained.model, *small_data(), callbacks=[callback])
    time.sleep(1 - time.time() % 1)


def test_two_loggers_in_one_second(fw, tmp_path):
    """TensorFlow 1 names files by the second and overwrites: no record is lost."""
    trained = fw.linear_model()
    x, y = small_data()
    log_dir = tmp_path / "logs"
    begin_a_second(fw, trained, tmp_path / "before")
    for number in range(3):
        logger = GradientLogger(str(log_dir), freq="batch", layers=["d"])
        fw.fit(trained.model, x, y, callbacks=[logger])
    events = read_events(fw, log_dir)
    assert keys(events) == expected_keys(["d/kernel"], range(5, 20))
    assert len(files_below(log_dir)["."]) == 3


def test_two_fits_in_one_second_keep_the_stock_records(fw, tmp_path):
    trained = fw.linear_model()
    x, y = small_data()
    log_dir = tmp_path / "logs"
    begin_a_second(fw, trained, tmp_path / "before")
    for number in range(2):
        callback = TensorBoard(str(log_dir), write_grads=True, grads_freq=5)
        fw.fit(
            trained.model,
            x,
            y,
            initial_epoch=number,
            epochs=number + 1,
            callbacks=[callback],
        )
    events = read_events(fw, log_dir)
    losses = [event.step for event in events if event.tag in ("loss", "epoch_loss")]
    assert sorted(losses) == [0, 1]
    gradients = [event.step for event in events if event.tag == "d/kernel_0_grad"]
    assert sorted(gradients) == [5, 10]
