"""Which updates are due and which steps records get. Needs no framework."""

import pytest

from legacy_gradlog.errors import InvalidArgumentError
from legacy_gradlog.schedule import Cadence, EpochLength, EpochSteps, parse_freq


@pytest.mark.parametrize(
    "value, every", [("epoch", None), ("batch", 1), (1, 1), (7, 7)]
)
def test_frequencies(value, every):
    assert parse_freq(value, "freq") == every


@pytest.mark.parametrize("value", [0, -1, True, False, 1.5, "weekly", None, [1]])
def test_wrong_frequencies(value):
    with pytest.raises(InvalidArgumentError) as caught:
        parse_freq(value, "grads_freq")
    assert str(caught.value) == (
        '`grads_freq` must be "epoch", "batch" or an integer >= 1. '
        "Received: {!r}.".format(value)
    )


@pytest.mark.parametrize(
    "every, first, last, due",
    [(1, 0, 1, True), (5, 0, 1, True), (5, 1, 5, False), (5, 1, 6, True)]
    + [(5, 5, 6, True), (5, 6, 10, False), (4, 3, 3, False)],
)
def test_due_updates(every, first, last, due):
    assert Cadence(every).has_due(first, last) is due


def test_epoch_level_has_its_own_period():
    assert [Cadence(None, epochs=3).logs_epoch(epoch) for epoch in range(5)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert not Cadence(1).logs_epoch(0)


def test_epoch_steps_are_never_written_twice():
    steps = EpochSteps()
    steps.begin_fit()
    assert [steps.step(epoch) for epoch in (0, 2, 4)] == [0, 2, 4]
    steps.begin_fit()
    assert [steps.step(epoch) for epoch in (0, 2)] == [5, 7]
    steps.begin_fit()
    assert steps.step(20) == 20


def run_epoch(length, calls, steps=1):
    """Returns for each call whether it was foretold to hold the epoch's last batch."""
    length.begin()
    ends = []
    for _ in range(calls):
        ends.append(length.ends_with(steps))
        length.advance(steps)
    return ends, length.finish(steps)


def test_an_announced_length_is_believed():
    length = EpochLength()
    length.announce(3)
    assert run_epoch(length, 3) == ([False, False, True], True)


def test_an_unknown_length_is_learned():
    length = EpochLength()
    length.announce(None)
    assert run_epoch(length, 3) == ([True, True, True], True)
    assert run_epoch(length, 3) == ([False, False, True], True)


@pytest.mark.parametrize("calls", [2, 4])
def test_a_length_that_was_wrong_is_not_believed_again(calls):
    length = EpochLength()
    length.announce(3)
    assert run_epoch(length, calls)[1] is False
    assert run_epoch(length, 2) == ([True, True], True)


def test_a_shorter_last_call_ends_the_epoch():
    length = EpochLength()
    length.announce(5)
    assert run_epoch(length, 3, steps=2) == ([False, False, True], True)
