"""`run` as a user types it: next to plain ``python SCRIPT``, and in a real training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from legacy_gradlog import runner

from .conftest import available
from .frameworks import no_profile

ROOT = str(Path(__file__).resolve().parent.parent)


def result(arguments, cwd):
    """Returns exit code, stdout and stderr of a Python process."""
    process = subprocess.Popen(
        [sys.executable] + arguments,
        cwd=str(cwd),
        env=dict(os.environ, PYTHONPATH=ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = process.communicate()
    return process.returncode, out.decode("utf-8"), err.decode("utf-8")


def run(cwd, *arguments):
    return result(["-m", "legacy_gradlog", "run"] + list(arguments), cwd)


SCRIPTS = {
    "what a script sees": """
        "The docstring."
        import sys, __main__, neighbour
        print(sys.argv, sys.path, sorted(vars(__main__)), neighbour)
        print(__name__, __file__, __package__, __spec__, __doc__, __cached__)
        print(__builtins__, __loader__.name, __loader__.path, __annotations__)
        print(sys.modules["__main__"].__dict__ is globals())
        print(repr(sys.stdin.read()), __loader__.get_source("__main__")[:20])
        """,
    "code": "import sys; print('out', flush=True); sys.exit(3)",
    "text": "import sys; sys.exit('a text')",
    "none": "import sys; sys.exit()",
    "error with a cause": """
        def fail():
            try:
                {}["key"]
            except KeyError as error:
                raise ValueError("a value") from error

        fail()
        """,
    "error while at another": "try:\n    1 / 0\nfinally:\n    undefined",
    "own exception hook": """
        import sys, traceback

        def hook(kind, error, trace):
            print(kind, [f.name for f in traceback.extract_tb(trace)])
            print(trace is error.__traceback__)

        sys.excepthook = hook
        def fail(): raise OSError(5)
        fail()
        """,
    "Ctrl-C": "def wait(): raise KeyboardInterrupt\nwait()",
    "Ctrl-C by a signal": """
        import os, signal, time
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
        """,
    "syntax": "print('before')\nx = = 1\n",
    "encoding": "# coding: latin-1\nprint(ascii('\xe9'))",
    "at exit": "import atexit; atexit.register(print, 'bye'); raise SystemExit(4)",
    "pickles and spawned processes": """
        import multiprocessing, pickle, sys

        class Point:
            pass

        def square(number):
            return number * number

        if __name__ == "__main__":
            assert type(pickle.loads(pickle.dumps(Point()))) is Point
            context = multiprocessing.get_context("spawn")
            with context.Pool(2) as pool:
                print(pool.map(square, [1, 2, 3]), sys.argv)
        """,
}
ARGUMENTS = ["--grads", "-m", "--", "--grads-freq", "x", "--help", "--json", "--", ""]


@pytest.mark.parametrize("name", SCRIPTS)
def test_is_as_plain_python(tmp_path, name):
    folder = tmp_path / "some where"
    folder.mkdir()
    (folder / "neighbour.py").write_text("")
    source = SCRIPTS[name]
    source = source.replace("\n        ", "\n").lstrip("\n")
    (folder / "script.py").write_bytes(source.encode("latin-1"))
    path = os.path.join("some where", "script.py")
    plain = result([path] + ARGUMENTS, tmp_path)
    assert run(tmp_path, "--grads-freq", "1", path, *ARGUMENTS) == plain
    assert "".join(plain[1:]) or plain[0] == 0


def test_link_leads_to_the_folder_of_the_script(tmp_path):
    (tmp_path / "folder").mkdir()
    script = tmp_path / "folder" / "script.py"
    script.write_text("import sys; print(sys.path, sys.argv, __file__)")
    os.symlink(str(script), str(tmp_path / "link.py"))
    assert run(tmp_path, "link.py") == result(["link.py"], tmp_path)


def test_modules(tmp_path):
    package = tmp_path / "tools"
    package.mkdir()
    (package / "__init__.py").write_text("")
    source = "import sys; print(sys.argv[1:], __name__, __package__, __spec__.name)"
    (package / "__main__.py").write_text(source)
    (package / "one.py").write_text(source + "; from . import __main__; 1 / 0")
    for name in ("tools", "tools.one"):
        code, out, err = result(["-m", name, "-m", "x"], tmp_path)
        ours = run(tmp_path, "-m", name, "-m", "x")
        assert ours[:2] == (code, out)
        # Python shows how it came to the module, too.
        assert err.endswith(ours[2].replace("Traceback (most recent call last):\n", ""))
        assert "legacy_gradlog" not in ours[2]


#: What cannot be started, and what is said of it.
_WRONG = [
    ([], "SCRIPT"),
    (["missing.py"], "'missing.py' (No such file or directory)"),
    (["folder"], "'folder' (Is a directory)"),
    (["-m", "missing"], "'missing'"),
    (["--grads-freq", "0", "script.py"], "`grads_freq` must be"),
    (["--grads-reduce", "mean", "script.py"], "`grads_reduce` must be"),
    (["--grads-scalars", "size", "script.py"], "`grads_scalars` must"),
    (["--unknown", "script.py"], "unrecognized arguments: --unknown"),
]

_START = """
import json, sys
from legacy_gradlog.__main__ import main

for arguments in json.loads(sys.argv[1]):
    try:
        code = main(["run"] + arguments)
    except SystemExit as stop:
        code = stop.code
    print(code)
    sys.stderr.write("next\\n")
"""


def test_what_cannot_start_is_one_line(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "script.py").write_text("print('started')")
    arguments = json.dumps([arguments for arguments, _ in _WRONG])
    code, out, err = result(["-c", _START, arguments], tmp_path)
    assert (code, out.split()) == (0, ["2"] * len(_WRONG)), err
    said = err.split("next\n")
    assert said.pop() == "" and len(said) == len(_WRONG)
    for text, (_, told) in zip(said, _WRONG):
        assert ": error: " in text and told in text and text.count("\n") == 1


#: Each gives `Given`, the class that a script would call.
_WAYS = {
    "keras": [
        "from keras.callbacks import TensorBoard as Given",
        "from keras.callbacks import *; Given = TensorBoard",
        "import keras; Given = keras.callbacks.TensorBoard",
        "import keras.callbacks as c; Given = getattr(c, 'TensorBoard')",
    ],
    "tf.keras": [
        "import tensorflow as tf; Given = tf.keras.callbacks.TensorBoard",
        "from tensorflow.keras.callbacks import TensorBoard as Given",
        "from tensorflow import keras; Given = keras.callbacks.TensorBoard",
        "import tensorflow as tf; Given = tf.compat.v1.keras.callbacks.TensorBoard",
    ],
    "tf_keras": [
        "from tf_keras.callbacks import TensorBoard as Given",
        "import tf_keras; Given = tf_keras.callbacks.TensorBoard",
    ],
}

_TRAIN = """
import copy, pickle, sys
from compat_tests import conftest, frameworks, oracle

for fw in conftest.available():
    fw.clear()
    for number, way in enumerate(WAYS[fw.name]):
        exec(way)
        assert Given.__mro__[1].__module__ == "legacy_gradlog.callbacks", way
        assert Given.__name__ == "TensorBoard"

    class Board(Given):
        epochs = []

        def __init__(self, folder, freq, some, more, **options):
            super().__init__(folder, freq, **options)

        def on_epoch_end(self, epoch, logs=None):
            self.epochs.append(self.model is trained.model)
            super().on_epoch_end(epoch, logs)

    options = dict(NO_PROFILE[fw.name], write_graph=False)
    plain = Given(fw.name + "/plain", **options)
    # Its class has a name in every process.
    assert type(pickle.loads(pickle.dumps(plain))).__module__ == (
        "legacy_gradlog.callbacks"
    )
    boards = [copy.deepcopy(plain), Board(fw.name + "/sub", 0, 1, 2, **options)]
    trained = fw.small_model()
    weights = fw.recorder(trained)
    data = frameworks.small_data()
    fw.fit(trained.model, *data, epochs=2, callbacks=boards + [weights])
    paths = [path for path in trained.paths if path.startswith("d")]
    for callback in boards:
        events = oracle.gradient_events(oracle.read_events(fw, callback.log_dir))
        assert {e.tag for e in events} == {
            name for path in paths
            for name in (path + "_0_grad", "grad_max_abs/" + path)
        }
        for path in paths:
            gradients = oracle.updates_of(weights, path)
            for step in range(0, 10, 3):
                (value,) = [e.value for e in events
                            if (e.tag, e.step) == (path + "_0_grad", step)]
                oracle.assert_histogram(value, gradients[step])
    assert Board.epochs == [True, True]
    print("trained", fw.name)
"""


def importable(way):
    try:
        exec(way, {})
    except (ImportError, AttributeError):
        return False
    return True


def test_trains_an_unedited_script(tmp_path):
    """Every Keras of the line, in one process, by each way to write the import."""
    names = [fw.name for fw in available()]
    ways = {name: [w for w in _WAYS[name] if importable(w)] for name in names}
    assert all(len(found) >= 2 for found in ways.values())
    profiles = {fw.name: no_profile(fw) for fw in available()}
    (tmp_path / "script.py").write_text(
        "WAYS, NO_PROFILE = {!r}, {!r}\n{}".format(ways, profiles, _TRAIN)
    )
    options = ["--grads-freq", "3", "--grads-layers", "d1", "--grads-layers", "d2"]
    options += ["--grads-scalars", "max_abs"]
    code, out, err = run(tmp_path, *options + ["script.py"])
    assert code == 0, err
    told = [line for line in out.splitlines() if line.startswith("trained ")]
    assert told == ["trained " + name for name in names]


class Stock:
    """Called as a stock callback of its generation is."""

    def __init__(self, log_dir="./logs", histogram_freq=0, batch_size=32, **kwargs):
        pass


def test_positional_arguments_are_those_of_the_stock_class():
    made = runner._make_class(Stock, {"grads_freq": 5})("logs", 2, 64, write_grads=0)
    assert (made.log_dir, made.histogram_freq, made.write_grads) == ("logs", 2, True)
    assert made._native == {"batch_size": 64}
    assert made._gradient_arguments["grads_freq"] == 5
