"""Event files that nobody should trust: what is sound is read, the rest is counted.

Sound records are made by TensorFlow's own writer; `TFRecordWriter` frames any bytes.
"""

import os
import struct

import numpy as np
import pytest
import tensorflow as tf

from legacy_gradlog import TensorBoard, events

from .frameworks import no_profile, run_script, small_data
from .oracle import read_events

V1 = getattr(getattr(tf, "compat", None), "v1", tf)
NAME = "events.out.tfevents.1.host"


def write_records(folder, records, name=NAME):
    """Writes records of any bytes into one event file, and returns its path."""
    os.makedirs(str(folder), exist_ok=True)
    path = os.path.join(str(folder), name)
    with V1.python_io.TFRecordWriter(path) as writer:
        for record in records:
            writer.write(record)
    return path


def event(step, tag="loss", number=0.5):
    value = V1.Summary.Value(tag=tag, simple_value=number)
    summary = V1.Summary(value=[value])
    return V1.Event(step=step, wall_time=7.5, summary=summary).SerializeToString()


def read(folder):
    """Returns the values below a directory, and how often each cause was counted."""
    reader = events.Reader(str(folder))
    values = list(reader)
    assert [value[:3] for value in reader] == [value[:3] for value in values]
    causes = {}
    for (_, cause), count in reader.skipped.items():
        causes[cause] = causes.get(cause, 0) + count
    return values, causes


@pytest.mark.parametrize("size", [0, 1, 9, 127, 128, 129, 4096, 70001])
def test_checksum_is_that_of_tensorflow(tmp_path, size):
    data = np.random.RandomState(size).bytes(size)
    with open(write_records(tmp_path, [data]), "rb") as file:
        written = file.read()
    assert events._is_sound(written[:12]) and events._is_sound(written[12:])
    assert not events._is_sound(written[:11] + b"\0")
    # The check value of the catalogue of such codes.
    assert events.checksum(b"123456789") == 0xE3069283


def numbers_of(data):
    """Returns what is compared of a value, as `Reader` or TensorFlow itself has it."""
    if isinstance(data, events.Histogram):
        data = (data.rights, data.counts, data.min, data.sum_squares)
    elif hasattr(data, "bucket_limit"):
        data = (data.bucket_limit, data.bucket, data.min, data.sum_squares)
    elif hasattr(data, "tensor_shape"):
        array = tf.make_ndarray(data)
        if array.shape == ():
            return float(array) if array.dtype.kind == "f" else None
        data = (array[:, 1], array[:, 2], array[0, 0], None)
    else:
        return data if isinstance(data, float) else None
    return (list(data[0]), list(data[1])) + data[2:]


def test_files_of_ours_and_of_the_stock_callback(fw, tmp_path):
    """Every value of both forms, old and new, as TensorFlow's own reader has it."""
    # A graph may hold every function of the process, and be too long to read.
    no_graph = dict(no_profile(fw), write_graph=False)
    board = TensorBoard(str(tmp_path), 1, write_grads=True, **no_graph)
    fw.fit(
        fw.small_model().model,
        *small_data(),
        epochs=2,
        validation_data=small_data(rows=8, seed=1),
        callbacks=[board],
    )
    values, causes = read(tmp_path)
    assert causes == {}
    ours = [(v.run, v.tag, v.step, numbers_of(v.data)) for v in values]
    expected = [e[:3] + (numbers_of(e.value),) for e in read_events(fw, tmp_path)]
    assert sorted(ours, key=str) == sorted(expected, key=str)
    found = {v.tag for v in values if isinstance(v.data, events.Histogram)}
    assert "d1/kernel_0_grad" in found and len(found) > 6
    assert any(isinstance(v.data, float) for v in values)


def test_the_edges_of_a_bucket():
    old = V1.HistogramProto(min=-3, max=2, num=4, bucket_limit=[-1, 1, 2])
    old.bucket.extend([1, 2, 1])
    new = tf.make_tensor_proto(np.array([[-3.0, -1, 1], [-1, 1, 2], [1, 2, 1]]))
    for value in (V1.Summary.Value(histo=old), V1.Summary.Value(tensor=new)):
        histogram = events._data_of(value)
        assert histogram.lefts.tolist() == [-3, -1, 1]
        assert histogram.rights.tolist() == [-1, 1, 2]
        assert (histogram.min, histogram.max, histogram.count) == (-3, 2, 4)


def test_a_tensor_larger_than_its_content(tmp_path):
    """Its shape is believed only where the values are there."""
    records = []
    for sizes in ([1 << 60, 3], [2, 3], []):
        made = V1.Event(step=1)
        tensor = made.summary.value.add(tag="t").tensor
        tensor.dtype = 1
        tensor.float_val.extend([1.0, 2.0, 3.0])
        for size in sizes:
            tensor.tensor_shape.dim.add(size=size)
        records.append(made.SerializeToString())
    made = V1.Event(step=1)
    made.summary.value.add(tag="h").histo.bucket.extend([1.0])
    write_records(tmp_path, records + [made.SerializeToString()])
    assert read(tmp_path) == ([], {events.BAD_VALUE: 4})


RECORD = len(event(1)) + 16
#: What is done to the bytes of three records, which of their steps are still read,
#: and what is counted.
FAULTS = {
    "nothing": (lambda data: data, [1, 2, 3], {}),
    "empty": (lambda data: b"", [], {}),
    "cut in the length": (lambda data: data[: RECORD + 5], [1], {events.CUT_OFF: 1}),
    "cut in the data": (lambda data: data[: RECORD + 20], [1], {events.CUT_OFF: 1}),
    "cut in a checksum": (lambda data: data[:-1], [1, 2], {events.CUT_OFF: 1}),
    "flipped bit of the data": (
        lambda data: flipped(data, RECORD + 12),
        [1, 3],
        {events.BAD_DATA: 1},
    ),
    "wrong checksum of the data": (
        lambda data: flipped(data, 2 * RECORD - 1),
        [1, 3],
        {events.BAD_DATA: 1},
    ),
    "flipped bit of a length": (
        lambda data: flipped(data, RECORD),
        [1],
        {events.BAD_LENGTH: 1},
    ),
    "wrong checksum of a length": (
        lambda data: flipped(data, RECORD + 8),
        [1],
        {events.BAD_LENGTH: 1},
    ),
    "length of 2**63": (
        lambda data: data[:RECORD] + length(1 << 63) + data[RECORD:],
        [1],
        {events.CUT_OFF: 1},
    ),
    "text": (lambda data: b"<html>" * 9, [], {events.BAD_LENGTH: 1}),
}


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def length(number):
    """Returns the head of a record: its length, and the right checksum of that."""
    head = struct.pack("<Q", number)
    masked = events.checksum(head)
    masked = ((masked >> 15 | masked << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return head + struct.pack("<I", masked)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_damaged_files(tmp_path, name):
    damage, steps, causes = FAULTS[name]
    path = write_records(tmp_path / "a", [event(step) for step in (1, 2, 3)])
    with open(path, "rb") as file:
        data = file.read()
    with open(path, "wb") as file:
        file.write(damage(data))
    # A damaged file costs no other one anything.
    write_records(tmp_path / "b", [event(9)])
    values, counted = read(tmp_path)
    assert [(v.run, v.step) for v in values] == [("a", s) for s in steps] + [("b", 9)]
    assert all(v[1] == "loss" and v[3:] == (7.5, 0.5) for v in values)
    assert counted == causes


def test_records_that_are_no_events(tmp_path):
    """Any bytes; an event's fields with other types; a number that does not end."""
    wrong = [b"\x0b", b"\x08\x01", b"\x12\x01\0", b"\x28\x01", b"\x2a\x05\n\x09"]
    wrong += [b"\xff" * 30, b"\x10" + b"\x80" * 10 + b"\x01"]
    # No UTF-8: some implementations of protobuf tell so when it is parsed, some never.
    wrong_tag = event(1).replace(b"loss", b"lo\xff\xfe")
    write_records(tmp_path, wrong + [wrong_tag, b"", event(-2)])
    values, counted = read(tmp_path)
    assert values[-1] == (".", "loss", -2, 7.5, 0.5)
    assert counted.pop(events.NO_EVENT) == len(wrong)
    assert sum(counted.values()) + len(values) == 2


def test_memory_is_bounded(tmp_path):
    """A tag of 100 MB, one of 2 MB, and half a million empty values in a record."""
    bomb = b"\n\0" * 500000
    size = len(bomb)
    head = bytes([0x2A, size & 127 | 128, size >> 7 & 127 | 128, size >> 14])
    long = [event(1, "a" * 100 * 10**6), event(2, "b" * 2 * 10**6)]
    write_records(tmp_path / "logs", long + [head + bomb, event(3)])
    script = """
import re
from legacy_gradlog import events, runtime

def most():
    # `getrusage` begins with what the parent process had.
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\\s*(\\d+)", file.read()).group(1))

runtime.summary_value_class()
before = most()
reader = events.Reader("logs")
steps = [value.step for value in reader if value.tag]
print(steps, sorted(cause for _, cause in reader.skipped), most() - before)
"""
    told, grown = run_script(script, tmp_path).strip().rsplit(" ", 1)
    assert told == str([3]) + " " + str(sorted([events.TOO_LONG, events.LONG_VALUE]))
    assert int(grown) < 40000


def test_a_file_that_grows_while_it_is_read(tmp_path):
    """What was there at first is read, and that ends."""
    path = write_records(tmp_path, [event(step) for step in range(3)])
    with open(path, "rb") as file:
        data = file.read()
    steps, reader = [], events.Reader(str(tmp_path))
    for value in reader:
        steps.append(value.step)
        with open(path, "ab") as file:
            file.write(data)
    assert steps == [0, 1, 2] and not reader.skipped


def test_an_endless_tree(tmp_path):
    """Links in circles, to what is above, to nothing; a pipe; one file, two names."""
    path = write_records(tmp_path / "runs" / "a", [event(1)])
    write_records(tmp_path / "elsewhere", [event(2)])
    links = {
        "runs/a/up": tmp_path / "runs",
        "runs/a/here": ".",
        "runs/b": "a",
        "runs/c": tmp_path / "elsewhere",
        "runs/circle": "circle",
        "runs/nothing.tfevents": "nowhere",
        "runs/tfevents.again": path,
    }
    for name, target in links.items():
        os.symlink(str(target), str(tmp_path / name))
    os.mkfifo(str(tmp_path / "runs" / "tfevents.pipe"))
    (tmp_path / "runs" / "tfevents").mkdir()
    values, causes = read(tmp_path / "runs")
    assert [(v.run, v.step) for v in values] == [(".", 1), ("c", 2)]
    assert causes == {events.NOT_REGULAR: 1, events.NOT_OPENED: 1}


def test_a_tree_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "MOST_DIRECTORIES", 3)
    for number in range(5):
        write_records(tmp_path / str(number), [event(number)])
    values, causes = read(tmp_path)
    assert [value.step for value in values] == [0, 1]
    assert causes == {events.TOO_MANY: 1}
    assert read(tmp_path / "no directory") == ([], {events.NOT_OPENED: 1})


HOSTILE = {
    "dense/kernel_0_grad": "dense/kernel_0_grad",
    "größe/重み 🙂": "größe/重み 🙂",
    "<script>alert(1)</script>": "<script>alert(1)</script>",
    "\x1b[2J\x1b]0;owned\x07": "\\x1b[2J\\x1b]0;owned\\x07",
    "\x9b31m a\r\nb\tc\x00\x7f": "\\x9b31m a\\r\\nb\\tc\\x00\\x7f",
    # What turns the direction of the text around, and what cannot be seen.
    "a\u202eb\u200b\u2028": "a\\u202eb\\u200b\\u2028",
    "x" * 203: "x" * 200 + "... (3 more)",
}


def test_nothing_but_text_reaches_the_terminal(tmp_path):
    write_records(tmp_path, [event(1, tag) for tag in HOSTILE])
    tags = [value.tag for value in events.Reader(str(tmp_path))]
    assert tags == list(HOSTILE)
    for tag, shown in HOSTILE.items():
        assert events.printable(tag) == shown
    # Half a character, as the name of a directory can have it.
    assert events.printable("run\udc9b") == "run\\udc9b"
    every = "".join(map(chr, range(0x110000)))
    assert events.printable(every, len(every)).isprintable()
