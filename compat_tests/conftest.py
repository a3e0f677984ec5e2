"""One suite for every line of the matrix: which Kerases a line has, and its mode.

``--eager-off`` runs the same tests with eager execution switched off, which TensorFlow
2 can do once in a process only.
"""

import gc
import importlib
import importlib.util
import random
import signal
import sys

import numpy as np
import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import errors

from . import frameworks

TENSORFLOW = Version(tf.__version__)

#: Newer Pythons have `hypothesis`, the newest one `build`, `twine` and `selenium`:
#: tox.ini.
collect_ignore = ["test_properties.py"] if sys.version_info < (3, 8) else []
if sys.version_info < (3, 13):
    collect_ignore += ["test_packaging.py", "test_tensorboard.py"]


def pytest_addoption(parser):
    parser.addoption("--eager-off", action="store_true", help="run in graph mode")
    parser.addoption("--keras", help="run with the Keras of this name only")
    parser.addoption("--lines", help="the logs of all lines: `test_tensorboard`")


def pytest_configure(config):
    # A shell lets what it starts in the background ignore Ctrl-C, and its children too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if TENSORFLOW >= Version("2.0"):
        # Two runs of one model agree in one thread only; sessions see to it themselves.
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    if importlib.util.find_spec("tf_keras"):
        # Of no other Keras AutoGraph reads all there is, which doubles the time of the
        # tests. Those in processes of their own leave it as it is for users.
        autograph = importlib.import_module("tensorflow.python.autograph.core.config")
        rule = autograph.DoNotConvert("tf_keras")
        autograph.CONVERSION_RULES = (rule,) + autograph.CONVERSION_RULES
    if config.getoption("--eager-off"):
        tf.compat.v1.disable_eager_execution()
        # Long ones, of files and processes, which know no mode or try both.
        collect_ignore.extend(
            "test_{}.py".format(name)
            for name in (
                "audit demo disk doctor events packaging properties readme runner "
                "schedule show sketch soak terminal two_at_once"
            ).split()
        )


def pytest_report_header(config):
    names = ", ".join(framework.name for framework in available())
    return "TensorFlow {}, {}".format(tf.__version__, names)


def available(name=None):
    """Returns the frameworks that can train in this environment and mode.

    Args:
        name: The one that is wanted, None for all.
    """
    found = []
    try:
        keras = importlib.import_module("keras")
    except ImportError:
        keras = None
    if keras is not None:
        version = Version(keras.__version__)
        if version >= Version("3.0"):
            found.append(frameworks.Framework("keras", keras, tf))
        elif version < Version("2.4") and (
            # Its own callbacks cannot read weights there; `test_tf20` has that case.
            TENSORFLOW < Version("2.0") or tf.executing_eagerly()
        ):
            found.append(frameworks.Framework("keras", keras, tf))
    if TENSORFLOW < Version("2.16"):
        found.append(frameworks.Framework("tf.keras", tf.keras, tf))
    else:
        try:
            tf_keras = importlib.import_module("tf_keras")
            found.append(frameworks.Framework("tf_keras", tf_keras, tf))
        except ImportError:
            pass
    return [framework for framework in found if name in (None, framework.name)]


def messages_of(caught):
    """Returns the package's own among the warnings that a test caught."""
    return [str(w.message) for w in caught if w.category is errors.GradlogWarning]


def pytest_generate_tests(metafunc):
    if "fw" in metafunc.fixturenames:
        found = available(metafunc.config.getoption("--keras"))
        metafunc.parametrize("fw", found, ids=lambda framework: framework.name)


@pytest.fixture(autouse=True)
def strict():
    """A failure that the package would contain fails the test."""
    errors.strict = True
    yield
    errors.strict = False


@pytest.fixture(autouse=True)
def fresh(request):
    """Every test starts with known seeds, and its Keras with an empty session."""
    random.seed(1)
    np.random.seed(1)
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    for name in ("fw", "framework"):
        if name in parameters:
            parameters[name].clear()
    if hasattr(gc, "freeze"):
        # What TensorFlow never lets go of grows to gigabytes with the tests. Now no
        # collection looks through it again.
        gc.collect()
        gc.freeze()
