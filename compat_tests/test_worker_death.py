"""A worker dies in the middle of a step that two make together.

The other one fails, or waits for it as long as TensorFlow does, which no test does: it
is killed where it waits. What it has logged before must be there.
"""

import signal

import pytest
import tensorflow as tf
from packaging.version import Version

from .cluster import run_workers
from .oracle import read_events
from .test_multi_worker import WORKER

if Version(tf.__version__) < Version("2.2"):
    pytest.skip(
        "before TF 2.2 strategies of several processes are refused; test_tf20",
        allow_module_level=True,
    )

DEATH = """
import signal, threading

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Death(fw.keras.callbacks.Callback):
    batches = 0

    def on_batch_end(self, batch, logs=None):
        Death.batches += 1
        if Death.batches == 5:
            print("FIVE", flush=True)
            meet("five")
            if worker == 1:
                # The other one is in the next step by then.
                time.sleep(1)
                die()
            # By then it has long begun to wait for the other one.
            threading.Timer(4, die).start()

board = TensorBoard("board", write_grads=True, grads_freq="batch")
callbacks = [board, GradientLogger("logger", freq="batch"), Death()]
make().fit(batches(), epochs=9, steps_per_epoch=3, verbose=0, callbacks=callbacks)
"""


def test_what_was_logged_survives(fw, tmp_path):
    if not fw.eager or fw.is_keras_3:
        pytest.skip("refused, or not logged at all")
    children = run_workers(WORKER + DEATH, tmp_path, fw.name)
    for status, text in children:
        assert "FIVE" in text and status != 0, text
    assert children[1][0] == -signal.SIGKILL
    for name in ("board", "logger"):
        events = read_events(fw, tmp_path / name)
        steps = [e.step for e in events if e.tag == "d/kernel_0_grad"]
        assert steps == [0, 1, 2, 3, 4]
