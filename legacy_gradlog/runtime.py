"""What is installed and what a model belongs to.

The only module that reads a version or asks whether TensorFlow or Keras has something;
every other module is told. Imports no framework until a model, or `detect`, asks.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import random
import sys
import types
from typing import NamedTuple, Optional

import numpy as np
from packaging.version import Version

from .errors import UnsupportedError, warn
from .patching import called_from, held_by
from .support import LINES

__all__ = ["Detection", "detect"]

#: What works, and the newest that the test matrix runs.
OLDEST_TENSORFLOW, NEWEST_TENSORFLOW = Version("1.4"), Version("2.21")
OLDEST_KERAS, NEWEST_KERAS = Version("2.0"), Version("3.15")

GRAPH = "graph"
FUNCTION = "function"
LOOP = "loop"

# How `fit` of an eager-mode model gets at its training step.
ATTRIBUTE = "train_function"
CLOSURE = "execution function"
SYMBOLIC = "backend function"


class Detection(NamedTuple):
    """What a model belongs to, or what is installed here. Immutable.

    Attributes:
        flavour: ``"keras"`` (standalone 2.x, or Keras 3), ``"tf.keras"`` or
            ``"tf_keras"``.
        keras_version: Version of that Keras.
        tensorflow_version: Version of TensorFlow, None where it is not installed.
        backend: The Keras backend, ``"tensorflow"`` where Keras has no other.
        mode: ``"graph"`` (sessions) or ``"eager"`` (compiled functions).
        engine: The engine that will be used: ``"graph"``, ``"function"``, or None
            where gradients cannot be captured.
        reason: Why this engine, or why none.
    """

    flavour: str
    keras_version: Optional[str]
    tensorflow_version: Optional[str]
    backend: str
    mode: str
    engine: Optional[str]
    reason: str

    def __str__(self):
        return (
            "{0.flavour} {0.keras_version} on TensorFlow {0.tensorflow_version}, "
            "{0.mode} mode\nengine: {0.engine} ({0.reason})"
        ).format(self)


def detect_loop():
    """Describes what a hand-written loop trains in.

    Returns:
        A `Detection`. Its engine is `LOOP`, or None in graph mode.
    """
    found = detect()
    if found.mode == "graph" or found.engine is None:
        return found._replace(engine=None)
    return found._replace(
        engine=LOOP, reason="a loop of the user's: sketched where the optimizer applies"
    )


def detect(model=None):
    """Describes the Keras that ``model`` belongs to and the engine it will get.

    Args:
        model: A model of any Keras. None describes the environment: the Keras that
            ``import keras`` would give, or `tf.keras` where there is none.

    Returns:
        A `Detection`.
    """
    if model is None:
        return _describe(*_default_keras())
    return _describe(*_keras_of(model), model=model)


def default_keras():
    """Returns the Keras package that `detect` describes when there is no model."""
    return _default_keras()[1]


def _default_keras():
    try:
        keras = importlib.import_module("keras")
    except ImportError:
        return "tf.keras", tensorflow().keras
    return _flavour(keras)


def _flavour(keras):
    """Returns what the package ``keras`` is: from 2.4 to 2.15 it is `tf.keras`."""
    if version_of(keras) < Version("2.4") or _is_keras_3(keras):
        return "keras", keras
    return "tf.keras", tensorflow().keras


def _keras_of(model):
    """Returns the flavour and the Keras package of a model, by its class."""
    for cls in type(model).__mro__:
        parts = cls.__module__.split(".")
        if parts[0] == "keras":
            return _flavour(sys.modules["keras"])
        if parts[0] == "tf_keras":
            return "tf_keras", sys.modules["tf_keras"]
        if parts[:3] == ["tensorflow", "python", "keras"]:
            return "tf.keras", tensorflow().keras
    raise UnsupportedError(
        "The model must be a Keras model. Received: an instance of {!r}.".format(
            type(model)
        )
    )


def warn_if_untested(detection):
    """Warns, once in a process, where something is newer than what was tested."""
    for name, text, newest in (
        ("TensorFlow", detection.tensorflow_version, NEWEST_TENSORFLOW),
        ("Keras", detection.keras_version, NEWEST_KERAS),
    ):
        if Version(text).release[:2] > newest.release and name not in _told_untested:
            _told_untested.add(name)
            warn(
                "Gradient logging is tested up to {0} {1}. Received: {0} {2}. It goes "
                "on; compare a step with the change of the weights.".format(
                    name, newest, text
                )
            )


_told_untested = set()


def _describe(flavour, keras, model=None):
    version = _version_text(keras)
    if Version(version) < OLDEST_KERAS:
        raise UnsupportedError(
            "Keras must be {} or later. Received: {}. Upgrade Keras.".format(
                OLDEST_KERAS, version
            )
        )
    backend = "tensorflow"
    if _is_keras_3(keras) and hasattr(keras, "config"):
        backend = keras.config.backend()
    if backend != "tensorflow":
        reason = "gradients are logged on the TensorFlow backend only"
        return Detection(flavour, version, None, backend, "eager", None, reason)
    tf = tensorflow()
    eager = _executes_eagerly(tf)
    mode = "eager" if eager else "graph"
    engine, reason = _choose_engine(tf, flavour, eager, model)
    return Detection(flavour, version, tf.__version__, backend, mode, engine, reason)


def _choose_engine(tf, flavour, eager, model):
    two = Version(tf.__version__) >= Version("2.0")
    if not eager:
        if getattr(model, "_distribution_strategy", None) is not None:
            return None, "a distribution strategy in graph mode"
        return GRAPH, "training runs in a session: gradients are fetched with the step"
    if not two:
        return None, "eager execution of TensorFlow 1: leave it off, or use 2.0"
    return FUNCTION, "training runs in a compiled function: sketched inside the step"


@functools.lru_cache(maxsize=None)
def _is_older(text, oldest):
    return Version(text) < oldest


def tensorflow():
    """Returns the `tensorflow` package.

    Raises:
        UnsupportedError: It is older than the oldest one that works.
    """
    tf = importlib.import_module("tensorflow")
    if _is_older(tf.__version__, OLDEST_TENSORFLOW):
        raise UnsupportedError(
            "TensorFlow must be {} or later. Received: {}. Upgrade TensorFlow.".format(
                OLDEST_TENSORFLOW, tf.__version__
            )
        )
    return tf


def compat_v1():
    """Returns the TensorFlow 1 API of whatever TensorFlow is installed."""
    tf = tensorflow()
    compat = getattr(tf, "compat", None)
    return getattr(compat, "v1", tf)


def version_of(keras):
    """Returns the version of a Keras package, comparable."""
    return Version(_version_text(keras))


def _version_text(keras):
    text = getattr(keras, "__version__", None)
    if text is None:
        # TF 2.13 to 2.15: `tf.keras` has lost the attribute of the package behind it.
        text = sys.modules["keras"].__version__
    return text.replace("-tf", "")


def _is_keras_3(keras):
    return version_of(keras) >= Version("3.0")


def _executes_eagerly(tf):
    if hasattr(tf, "executing_eagerly"):
        return tf.executing_eagerly()
    # TF 1.4 has eager execution in `contrib` only, and its Keras cannot use it.
    return False


# Operations whose name or availability differs between releases of TensorFlow.


def shift_right(values, bits):
    """Returns signed integers shifted right, the sign bit going along."""
    tf = tensorflow()
    if hasattr(tf.bitwise, "right_shift"):
        return tf.bitwise.right_shift(values, tf.constant(bits, values.dtype))
    return tf.floordiv(values, tf.constant(2**bits, values.dtype))


def where(condition, values, others):
    """Selects between two tensors of one shape."""
    tf = tensorflow()
    # TF 1.13 to 1.15 call the plain name deprecated.
    return getattr(tf, "where_v2", tf.where)(condition, values, others)


def bincount(values, size):
    """Counts int32 values below the constant ``size``; int64, shape ``(size,)``."""
    tf = tensorflow()
    raw_ops = getattr(tf, "raw_ops", None)
    if hasattr(raw_ops, "DenseBincount"):
        # `tf.math.bincount` computes its size at run time, which XLA cannot compile.
        # Counting in 64 bits, and a vector, takes half of the time of other ways.
        none = tf.constant([], tf.int64)
        return raw_ops.DenseBincount(input=values, size=size, weights=none)
    math = tf.math if hasattr(tf, "math") and hasattr(tf.math, "bincount") else tf
    return math.bincount(values, minlength=size, maxlength=size, dtype=tf.int64)


def segment_sum(values, positions, size):
    """Sums the rows of ``values`` that have equal ``positions``."""
    return compat_v1().unsorted_segment_sum(values, positions, size)


def segment_max(values, positions, size):
    """Returns the largest of the ``values`` that have equal ``positions``."""
    return compat_v1().unsorted_segment_max(values, positions, size)


def outlined(function):
    """Returns a function for a branch of a graph, where it is one operation.

    A branch that is not taken costs time for each of its operations.
    """
    tf = tensorflow()
    graph = compat_v1().get_default_graph()
    if not hasattr(graph, "outer_graph") or is_in_xla():
        return function
    attributes = {"_noinline": True}
    try:
        return tf.function(
            function, autograph=False, experimental_attributes=attributes
        )
    except TypeError:
        # Before TF 2.12.
        module = importlib.import_module("tensorflow.python.eager.function")
        return module.defun_with_attributes(
            function, autograph=False, attributes=attributes
        )


def is_floating(variable):
    """Whether a variable holds floating-point numbers."""
    return tensorflow().as_dtype(variable.dtype).is_floating


# What models and layers of each generation call their parts.

#: Where `tf.keras` of TF 2.0 and 2.1 has its training loops.
_ENGINE_PACKAGE = "tensorflow.python.keras.engine"


def sublayers(layer):
    """Returns the layers directly below a layer or model, in its own order."""
    layers = getattr(layer, "layers", None)
    if isinstance(layers, (list, tuple)):
        return list(layers)
    if hasattr(layer, "forward_layer"):
        # Some generations keep the layer that these are copies of, too.
        return [layer.forward_layer, layer.backward_layer]
    if hasattr(layer, "_flatten_layers"):
        return list(layer._flatten_layers(recursive=False, include_self=False))
    tracked = list(_layers_within(getattr(layer, "_layers", ())))
    if tracked:
        return tracked
    # Standalone Keras 2 and `tf.keras` before TF 1.14 do not track sublayers.
    names = ("layer", "cell", "cells")
    return list(_layers_within([getattr(layer, name, None) for name in names]))


def _layers_within(items):
    for item in items:
        if hasattr(item, "trainable_weights") and hasattr(item, "name"):
            yield item
        elif isinstance(item, (list, tuple)):
            for layer in _layers_within(item):
                yield layer
        elif hasattr(item, "layers"):
            for layer in _layers_within(item.layers):
                yield layer


def stateful_loops(layer):
    """Returns the names of recurrent layers whose gradient cannot be taken beside.

    In TensorFlow 1.4 a state is a ref variable: what reads it in the course of a step
    may see what the step has just written, and a loop's gradient that is built a second
    time reads it once more. From TF 1.10 on the two agree. Delete when TF 1.4 is
    dropped.
    """
    if Version(tensorflow().__version__) >= Version("1.10"):
        return []
    names = []
    if getattr(layer, "stateful", False) and getattr(layer, "unroll", True) is False:
        names.append(layer.name)
    for child in sublayers(layer):
        names += stateful_loops(child)
    return names


def own_weights(layer, children):
    """Returns the weights of a layer that none of its sublayers has."""
    below = {id(weight) for child in children for weight in child.weights}
    return [weight for weight in layer.weights if id(weight) not in below]


def trained_weights(model):
    """Returns the weights that training updates, None if they are not yet known."""
    collected = getattr(model, "_collected_trainable_weights", None)
    if collected:
        return list(collected)
    try:
        return list(model.trainable_weights) or None
    except ValueError:
        # A subclassed model has no weights before it has seen data.
        return None


def variable_name(variable):
    """Returns the name that the framework has given a variable."""
    return getattr(variable, "path", None) or variable.name.split(":")[0]


def raw_variable(variable):
    """Returns the framework's own variable behind a Keras 3 variable."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def steps_per_execution(model):
    """Returns how many updates one call of the train function makes at most."""
    steps = getattr(model, "steps_per_execution", None)
    if steps is None:
        steps = getattr(model, "_steps_per_execution", None)
    if hasattr(steps, "numpy"):
        steps = steps.numpy()
    return int(steps or 1)


def training_loop(model):
    """Returns how `fit` of an eager-mode model gets at its training step.

    `ATTRIBUTE`: it is ``model.train_function``. `CLOSURE` (`tf.keras` of TF 2.0 and
    2.1): a function of Keras calls what a cell of its closure holds. `SYMBOLIC`
    (standalone Keras 2.3, and `tf.keras` of TF 2.0 and 2.1 where its new loop lacks
    something): a backend function object made from the model's symbolic graph.
    """
    if hasattr(model, "make_train_function"):
        return ATTRIBUTE
    if _keras_of(model)[0] != "tf.keras":
        return SYMBOLIC
    # The new loop leaves data that it does not know, such as pandas', to the old one.
    in_old_loop = called_from(_ENGINE_PACKAGE + ".training_arrays")
    if model.run_eagerly or model._experimental_run_tf_function and not in_old_loop:
        return CLOSURE
    return SYMBOLIC


def train_function_place(model, is_ours):
    """Returns where the train function that Keras made is: ``(object, name)``.

    That is the model, unless a tool has wrapped the function and calls it from within.

    Args:
        model: A model whose `training_loop` is `ATTRIBUTE`.
        is_ours: Called with a value, returns whether it stands in for the function.

    Raises:
        UnsupportedError: It is wrapped, and not found within.
    """

    def is_original(value):
        if isinstance(value, types.FunctionType):
            return is_of_keras(value)
        return hasattr(value, "python_function") or is_ours(value)

    function = vars(model).get("train_function")
    own = not is_of_keras(type(model).make_train_function)
    if own or function is None or is_original(function):
        return model, "train_function"
    place = held_by(function, is_original)
    if place is None:
        raise UnsupportedError(
            "A wrapper of `train_function` must hold what it wraps in its closure or "
            "in an attribute for gradients to be logged. Received: {!r}. Wrap it in "
            "`make_train_function` of the model's class.".format(function)
        )
    return place


def steps_are_hidden(model):
    """Whether `train_on_batch` of a model has a train function of its own.

    In eager mode of TF 2.0 and 2.1 it has.
    """
    eager = _executes_eagerly(tensorflow())
    return eager and training_loop(model) == CLOSURE


def strategy_of(model):
    """Returns the distribution strategy of a model, None where there is none."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy or getattr(model, "_distribution_strategy", None)


def replicas_of(model):
    """Returns how many replicas train a model, each with a part of every batch."""
    strategy = strategy_of(model)
    return 1 if strategy is None else strategy.num_replicas_in_sync


def replicas_here():
    """Returns how many replicas the present strategy has."""
    return tensorflow().distribute.get_strategy().num_replicas_in_sync


#: Strategies that can be logged wherever a model trains in compiled functions.
_ALWAYS = (
    "_DefaultDistributionStrategy",
    "OneDeviceStrategy",
    "MirroredStrategy",
)
#: What `MultiWorkerMirroredStrategy` has been called inside.
_SEVERAL_WORKERS = (
    "CollectiveAllReduceStrategy",
    "_CollectiveAllReduceStrategyExperimental",
)


def strategy_refusal(model, cadence):
    """Returns why nothing can be logged under a model's strategy, None where it can.

    Args:
        model: The model.
        cadence: The `schedule.Cadence` that is wanted.
    """
    strategy = strategy_of(model)
    name = type(strategy).__name__
    keras = "{0[0]} {1}".format(_keras_of(model), _version_text(_keras_of(model)[1]))
    if strategy is None or name in _ALWAYS:
        return None
    if training_loop(model) == ATTRIBUTE:
        if name == "CentralStorageStrategy":
            return None
        if name in _SEVERAL_WORKERS and not _is_keras_3(_keras_of(model)[1]):
            return None
        if name == "ParameterServerStrategyV2" and schedules_steps(model):
            return _scheduled_refusal(strategy, cadence)
        if name in _SEVERAL_WORKERS + ("ParameterServerStrategyV2",):
            return (
                "The strategy must be one that `fit` can train under for gradients to "
                "be logged. Received: {!r} with {}, which fails without any callback, "
                "too. Train with `MirroredStrategy`, or with `tf_keras`.".format(
                    name, keras
                )
            )
    return (
        "The model must train without a strategy, or under one whose gradients are "
        "known: `MirroredStrategy`, `OneDeviceStrategy`, and since TensorFlow 2.2 "
        "`CentralStorageStrategy` and `MultiWorkerMirroredStrategy`, since 2.8 "
        "`ParameterServerStrategy`. Received: {!r} with {} on TensorFlow {}.".format(
            name, keras, tensorflow().__version__
        )
    )


def _scheduled_refusal(strategy, cadence):
    if strategy.num_replicas_in_sync > 1:
        return (
            "Under `ParameterServerStrategy` each worker must have one device for its "
            "gradients to be logged. Received: {} devices a worker. Start more workers "
            "instead.".format(strategy.num_replicas_in_sync)
        )
    if cadence.every is not None:
        return (
            "Under `ParameterServerStrategy` gradients must be logged at epoch level: "
            "`fit` only schedules the steps, and workers make them in any order. "
            'Received: every {} updates. Log with "epoch".'.format(cadence.every)
        )
    if cadence.pool:
        return (
            "Under `ParameterServerStrategy` gradients cannot be pooled: workers that "
            'add to one histogram at the same time lose updates. Received: "pool". '
            'Take "last".'
        )
    return None


def shares_variables():
    """Whether the variables of the present strategy are not each replica's own.

    That of `CentralStorageStrategy` is one for all replicas. One that is made under
    `MultiWorkerMirroredStrategy` waits for all workers.
    """
    name = type(tensorflow().distribute.get_strategy()).__name__
    return name in ("CentralStorageStrategy",) + _SEVERAL_WORKERS


#: The second is what a variable is that is made while a function is traced.
_PLAIN_VARIABLES = {"ResourceVariable", "UninitializedVariable"}


def value_now(variable):
    """Returns the value of a variable, of all replicas together, as a NumPy array."""
    if type(variable).__name__ not in _PLAIN_VARIABLES:
        return variable.read_value().numpy()
    # The operation itself takes a quarter of the time.
    read = tensorflow().raw_ops.ReadVariableOp
    return read(resource=variable.handle, dtype=variable.dtype).numpy()


def plain_variable(value):
    """Returns a variable that no strategy knows of."""
    ops = importlib.import_module("tensorflow.python.ops.resource_variable_ops")
    return ops.ResourceVariable(value, trainable=False)


def in_replica():
    """Whether one replica of a strategy runs, or is traced, now."""
    distribute = tensorflow().distribute
    return distribute.has_strategy() and not distribute.in_cross_replica_context()


def trains_on_workers(model):
    """Whether several processes make each step together."""
    strategy = strategy_of(model)
    several = type(strategy).__name__ in _SEVERAL_WORKERS
    return several and strategy.extended._in_multi_worker_mode()


def schedules_steps(model):
    """Whether `fit` only schedules the steps, which workers make at their own pace."""
    return getattr(model, "_cluster_coordinator", None) is not None


def replica_number():
    """Returns which replica runs, or is traced, now; 0 where all run together."""
    context = tensorflow().distribute.get_replica_context()
    if context is None:
        return 0
    number = context.replica_id_in_sync_group
    if not isinstance(number, int):
        util = importlib.import_module("tensorflow.python.framework.tensor_util")
        number = util.constant_value(number)
    return int(number or 0)


def leaves_reduction_to_the_update(optimizer, replicas):
    """Whether the replicas' gradients are still apart where they are captured.

    Keras 3 sums them after clipping, within the update. Before TF 2.5 loss scaling
    looks for an overflow in the parts.
    """
    generation = optimizer_generation(optimizer)
    return replicas > 1 and generation in ("keras3", "scaled keras3", "scaled v2")


def is_model(target):
    """Whether something is a model, and not an optimizer."""
    return hasattr(target, "train_on_batch")


def optimizers_of(model):
    """Returns the optimizers that a model may train with, by the model's names.

    Those of a model with several, such as a GAN, are attributes of it.
    """
    found = {"optimizer": model.optimizer}
    for name, value in vars(model).items():
        items = {name.lstrip("_"): value}
        if not name.startswith("_"):
            # Keras keeps tables of its own with everything in them.
            if isinstance(value, (list, tuple)):
                items = {"{}_{}".format(name, i): item for i, item in enumerate(value)}
            elif isinstance(value, dict):
                items = {"{}_{}".format(name, key): value[key] for key in value}
        known = list(found.values())
        for key, item in items.items():
            if is_optimizer(item) and not any(item is other for other in known):
                found[key] = item
    return found


def is_optimizer(value):
    """Whether something is an optimizer of any Keras."""
    applies = hasattr(value, "apply_gradients") or hasattr(value, "get_updates")
    return applies and hasattr(value, "get_config")


def closure_cell(model):
    """Returns the cell that the loop of TF 2.0 and 2.1 takes the training step from."""
    utils = importlib.import_module(_ENGINE_PACKAGE + ".training_v2_utils")
    function = utils._get_or_make_execution_function(model, utils.ModeKeys.TRAIN)
    names = function.__code__.co_freevars
    return function.__closure__[names.index("distributed_function")]


def untraced(function):
    """Returns a compiled function like ``function`` that has not been traced yet."""
    if not hasattr(function, "python_function"):
        # With ``run_eagerly`` it is not compiled.
        return function
    return tensorflow().function(function.python_function, autograph=False)


def is_in_xla():
    """Whether what is traced now is compiled by XLA."""
    util = importlib.import_module("tensorflow.python.ops.control_flow_util")
    graph = compat_v1().get_default_graph()
    return util.GraphOrParentsInXlaContext(graph)


def outermost(graph):
    """Returns the graph of the function that is traced with all it calls."""
    while getattr(graph, "outer_graph", None) is not None and hasattr(
        graph.outer_graph, "outer_graph"
    ):
        graph = graph.outer_graph
    return graph


def holds_random_state(graph):
    """Whether some operation of a graph has random numbers of its own.

    All of those have a seed; what gets its state as an input has none.
    """
    definition = graph.as_graph_def()
    functions = [function.node_def for function in definition.library.function]
    return any(
        "seed" in node.attr for nodes in [definition.node] + functions for node in nodes
    )


def repeats_steps(model):
    """Whether two train functions of a model may make its updates in turn.

    Each call must be one update of every optimizer that is called, made when it
    returns and whatever the data.
    """
    return (
        steps_per_execution(model) == 1
        and not trains_on_workers(model)
        and not schedules_steps(model)
        and all(
            batches_per_update(optimizer) == 1
            and inner_optimizer(optimizer) is optimizer
            for optimizer in optimizers_of(model).values()
        )
    )


def is_compiled_by_xla(model):
    """Whether the training step is compiled by XLA."""
    value = getattr(model, "jit_compile", getattr(model, "_jit_compile", None))
    return value is True


def session_model(model):
    """Returns the model that holds the train function: early Sequential wraps one."""
    while "train_function" not in vars(model) and hasattr(model, "model"):
        model = model.model
    return model


def session_train_function(model, in_fit=True):
    """Returns the function object that trains a graph-mode model.

    The one that `fit` has bound, or without ``in_fit`` that of `train_on_batch`, which
    is another in TF 1.13.
    """
    model = session_model(model)
    function = getattr(model, "_fit_function", None)
    if function is None or not in_fit:
        model._make_train_function()
        function = model.train_function

    def is_made_by_backend(value):
        # Some wrappers take over all attributes of what they wrap.
        backend = hasattr(value, "updates_op") or hasattr(value, "_graph_fn")
        return backend and not isinstance(value, types.FunctionType)

    if is_made_by_backend(function):
        return function
    # A tool has wrapped it, and calls it from within.
    place = held_by(function, is_made_by_backend)
    return function if place is None else getattr(*place)


def remade_train_function(model):
    """Returns a function object made anew, as Keras makes ``model.train_function``."""
    present = model.train_function
    model.train_function = None
    try:
        model._make_train_function()
        return model.train_function
    finally:
        model.train_function = present


def backend_of(model):
    """Returns the Keras backend module of a graph-mode model."""
    flavour, keras = _keras_of(model)
    if flavour != "tf_keras" and Version(tensorflow().__version__) >= Version("2.0"):
        # Standalone Keras 2.3 trains in the session of `tf.keras`, and its own backend
        # reads no value there.
        return compat_v1().keras.backend
    return keras.backend


def update_count(model, optimizer):
    """Returns the number of updates that an optimizer of ``model`` has made."""
    # Before Keras 3.9 one for loss scaling has a counter of its own that stands still.
    inner = inner_optimizer(optimizer)
    # `OptimizerV2` makes its counter when it is asked. A saved model has the counter's
    # name, which is the one that it gets in the step.
    named = getattr(inner, "_iterations", inner) is None
    with tensorflow().name_scope(inner._name) if named else contextlib.ExitStack():
        iterations = getattr(inner, "iterations", None)
    if iterations is None:
        return 0
    if hasattr(iterations, "numpy") and _executes_eagerly(tensorflow()):
        return int(iterations.numpy())
    count = int(backend_of(model).get_value(iterations))
    return count // 2 if _counts_double(model) else count


def _counts_double(model):
    """Whether a wrapper of a TensorFlow optimizer counts each update twice.

    Both Keras and the optimizer count, in standalone Keras and in `tf.keras` up to
    TF 1.10.
    """
    if type(model.optimizer).__name__ != "TFOptimizer":
        return False
    old = Version(tensorflow().__version__) < Version("1.11")
    return old or _keras_of(model)[0] == "keras"


def optimizer_generation(optimizer, symbolic=False):
    """Returns how an eager-mode optimizer turns gradients into an update.

    One of "v2 of 2.0", "v2 of 2.2" and "v2" (`OptimizerV2` of TF 2.0 and 2.1, 2.2 and
    2.3, and since 2.4, later called legacy), "experimental" (the default of Keras 2.11
    to 2.15), "keras3"; with "scaled " before it where it is wrapped for loss scaling
    (what differs there is TF 2.5); "wrapped v2 of 2.2" where `apply_gradients` is not
    of Keras; "symbolic" where a step is made from symbolic updates; None for anything
    else.
    """
    inner = inner_optimizer(optimizer)
    if inner is not optimizer:
        return None if symbolic else _scaled_generation(inner)
    if symbolic:
        return "symbolic"
    if hasattr(optimizer, "_backend_update_step"):
        return "keras3"
    if hasattr(optimizer, "_internal_apply_gradients"):
        return "experimental"
    if hasattr(optimizer, "_transform_gradients"):
        return "v2"
    if hasattr(optimizer, "_aggregate_gradients"):
        own = is_of_keras(optimizer.apply_gradients)
        return "v2 of 2.2" if own else "wrapped v2 of 2.2"
    if hasattr(optimizer, "_distributed_apply"):
        return "v2 of 2.0"
    return None


def _scaled_generation(inner):
    generation = optimizer_generation(inner)
    if generation in ("experimental", "keras3"):
        # Keras 3 forms the mean of accumulated gradients where it is too late.
        accumulates = getattr(inner, "gradient_accumulation_steps", None)
        return None if accumulates else "scaled " + generation
    if generation is not None:
        # Since 2.5 the gradients are reduced before an overflow is looked for.
        old = Version(tensorflow().__version__) < Version("2.5")
        return "scaled v2" if old else "scaled v2 of 2.5"
    return None


def scaled_update_methods(optimizer):
    """Returns what turns an unscaled gradient into an update, after it was seen."""
    inner = inner_optimizer(optimizer)
    if inner is optimizer:
        return []
    generation = optimizer_generation(optimizer)
    if generation == "scaled keras3":
        return [optimizer.apply, inner.apply]
    if generation == "scaled v2":
        return [optimizer.apply_gradients, inner.apply_gradients]
    return [inner.apply_gradients]


def inner_optimizer(optimizer):
    """Returns the optimizer that one for loss scaling wraps, others as they are."""
    if hasattr(optimizer, "inner_optimizer"):
        return optimizer.inner_optimizer
    if hasattr(optimizer, "loss_scale"):
        # TF 2.0 to 2.3.
        return optimizer._optimizer
    return optimizer


def batches_per_update(optimizer):
    """Returns of how many batches an optimizer accumulates the gradients."""
    return getattr(optimizer, "gradient_accumulation_steps", None) or 1


def clips(optimizer):
    """Whether an optimizer clips its gradients."""
    names = ("clipnorm", "clipvalue", "global_clipnorm")
    return any(getattr(optimizer, name, None) for name in names)


def clipped(optimizer, pairs):
    """Returns ``(gradient, variable)`` after the clipping of an optimizer."""
    if hasattr(optimizer, "_transform_gradients"):
        return list(optimizer._transform_gradients(pairs))
    gradients, variables = zip(*pairs)
    return list(zip(optimizer._clip_gradients(list(gradients)), variables))


def divided(gradient, number):
    """Returns a gradient, dense, sparse or None, divided by a number."""
    tf = tensorflow()
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            divided(gradient.values, number), gradient.indices, gradient.dense_shape
        )
    return gradient / tf.cast(number, gradient.dtype)


def reduces_with_horovod(optimizer):
    """Whether Horovod's wrapper made an optimizer, or the one that Keras wraps."""
    classes = type(optimizer).__mro__
    # Keras holds an optimizer of TensorFlow in one of its own.
    classes += type(getattr(optimizer, "optimizer", None)).__mro__
    return any(cls.__module__.split(".")[0] == "horovod" for cls in classes)


def horovod_is_imported():
    """Whether the graph can hold operations of Horovod."""
    return "horovod.tensorflow" in sys.modules


def needs_equal_traces(model):
    """Whether workers that do not trace a step at the same times wait for ever.

    Since TF 2.5 the parts of a collective are matched by when they run.
    """
    if not trains_on_workers(model):
        return False
    utils = importlib.import_module("tensorflow.python.distribute.cross_device_utils")
    launcher = getattr(utils, "CollectiveReplicaLauncher", None)
    return not getattr(launcher, "_prefer_unique_instance_key", False)


def writes_logs(model):
    """Whether this process writes what is logged of a model (None if not known).

    Of several processes that train one model together, one does.
    """
    horovod = sys.modules.get("horovod.tensorflow")
    if horovod is not None:
        try:
            return horovod.rank() == 0
        except ValueError:
            # Imported, but `init` was not called: one process that trains alone.
            return True
    if model is None or not trains_on_workers(model):
        # TF 2.2: the strategies of one process do not answer.
        return True
    return strategy_of(model).extended.should_save_summary


def clips_in_get_gradients(optimizer):
    """Whether a graph-mode optimizer that clips does it in `get_gradients`.

    Since TF 2.4 that leaves the clipping to `apply_gradients`.
    """
    return not hasattr(optimizer, "_transform_gradients")


def makes_own_gradients(optimizer, loss, variables):
    """Whether a graph-mode optimizer has a `get_gradients` not of Keras.

    A user's class may do anything, and so may what wraps it; what only looks on adds
    nothing to the graph.
    """
    if is_of_keras(optimizer.get_gradients):
        return False
    graph = loss.graph

    def added(get_gradients):
        before = len(graph.get_operations())
        get_gradients(loss, variables)
        return len(graph.get_operations()) - before

    classes = (vars(cls) for cls in type(optimizer).__mro__)
    functions = (names.get("get_gradients") for names in classes)
    original = next(filter(is_of_keras, filter(None, functions)), None)
    if original is None:
        return True
    with graph.as_default():
        original = functools.partial(original, optimizer)
        return added(original) != added(optimizer.get_gradients)


def is_of_keras(function):
    """Whether Keras made a function or method, and nobody but us has wrapped it.

    A wrapper may have taken over the name of its module, but not its globals.
    """
    while True:
        function = getattr(function, "__func__", function)
        module = getattr(function, "__globals__", {}).get("__name__", "")
        package = module.split(".")[0]
        through = package == __package__ or module.endswith(".autograph.impl.api")
        if not through or not hasattr(function, "__wrapped__"):
            break
        function = function.__wrapped__
    packages = ("keras", "tf_keras", "tensorflow", "tensorflow_core", __package__)
    return package in packages


def clipped_gradients(optimizer, loss, variables):
    """Returns the gradients of a graph-mode optimizer, all of them, after clipping."""
    gradients = optimizer.get_gradients(loss, variables)
    if clips_in_get_gradients(optimizer):
        return gradients
    pairs = optimizer._transform_gradients(list(zip(gradients, variables)))
    return [gradient for gradient, _ in pairs]


def end_of_data_errors():
    """Returns what a train function raises when there is no batch left."""
    return (StopIteration, tensorflow().errors.OutOfRangeError)


# The stock callback and what it writes with.


def stock_callback_class(model):
    """Returns the stock `TensorBoard` callback of the Keras that a model belongs to."""
    flavour, keras = _keras_of(model)
    tf = tensorflow()
    if flavour == "tf.keras" and not _executes_eagerly(tf) and hasattr(tf, "compat"):
        if Version(tf.__version__) >= Version("2.0"):
            return tf.compat.v1.keras.callbacks.TensorBoard
    return keras.callbacks.TensorBoard


def stock_writer(stock):
    """Returns the writer that the stock callback writes training data with, or None."""
    for name in ("writer", "_train_writer"):
        writer = getattr(stock, name, None)
        if writer is not None:
            return writer
    if hasattr(stock, "_get_writer") and _executes_eagerly(tensorflow()):
        # TF 2.0 to 2.2: makes it if the callback has written nothing yet.
        return stock._get_writer(stock._train_run_name)
    return None


def stock_directory(stock):
    """Returns the directory that the stock callback writes training data into."""
    train = "" if hasattr(stock, "writer") else "train"
    return os.path.join(stock.log_dir, train)


def event_file(writer):
    """Returns the path of the file of a `FileWriter`, None for any other writer."""
    events = getattr(getattr(writer, "event_writer", None), "_ev_writer", None)
    if events is None:
        return None
    return tensorflow().compat.as_str(events.FileName())


def flush_each_event(writer):
    """Lets the thread of a `FileWriter` put each event on disk when it comes.

    Left alone it looks at the time when the next event comes, which may be hours later.
    """
    thread = getattr(getattr(writer, "event_writer", None), "_worker", None)
    if thread is not None:
        thread._flush_secs = -1
        thread._next_event_flush_time = 0


def write_summary(writer, summary, step):
    """Writes a serialized `Summary` with a writer of TensorFlow 2.

    Where its flush fails, `as_default` of TensorFlow 2.3 and later leaves the writer
    behind as the default one, and what others write after that goes there.
    """
    tf = tensorflow()
    with tf.device("CPU:0"):
        tf.raw_ops.WriteRawProtoSummary(
            writer=writer._resource, step=step, tensor=summary
        )


def stock_histograms_fail(model):
    """Whether the stock callback cannot read the weights for its histograms.

    Standalone Keras 2.3 on TF 2 with eager execution off: it calls ``numpy()`` on them.
    """
    tf = tensorflow()
    two = Version(tf.__version__) >= Version("2.0")
    return two and not _executes_eagerly(tf) and _keras_of(model)[0] == "keras"


def writes_with_session(stock):
    """Whether a stock callback is of the first family, made for sessions."""
    return hasattr(stock, "merged")


def histograms_need_arrays(stock):
    """Whether a stock callback stops the run where validation data is no arrays.

    Standalone Keras (since 2.0.7) and `tf.keras` before TF 1.10 do. Later ones of the
    first family take any validation data, and write nothing, or fail, without it.
    """
    if type(stock).__module__.startswith("tensorflow."):
        return Version(tensorflow().__version__) < Version("1.10")
    return writes_with_session(stock) and Version(tensorflow().__version__) < Version(
        "2.0"
    )


def values_of(model, variables):
    """Returns the values of variables as NumPy arrays."""
    if _executes_eagerly(tensorflow()):
        return [variable.numpy() for variable in variables]
    return backend_of(model).batch_get_value(variables)


def event_class():
    """Returns the `Event` message."""
    return compat_v1().Event


def summary_value_class():
    """Returns the `Summary.Value` message.

    TensorBoard's own, where it has one: it imports no TensorFlow.
    """
    try:
        home = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    except ImportError:
        home = compat_v1()
    return home.Summary.Value


# What commands need: the demo, which trains, and what runs or examines others.


def set_seed(keras, seed):
    """Seeds the random numbers of Python, NumPy, TensorFlow and ``keras``."""
    if hasattr(keras.utils, "set_random_seed"):
        keras.utils.set_random_seed(seed)
        return
    random.seed(seed)
    np.random.seed(seed)
    compat_v1().set_random_seed(seed)


def main_file(path):
    """Returns what Python has as ``__file__`` of the script that it runs."""
    return os.path.abspath(path) if sys.version_info >= (3, 9) else path


def installed(name):
    """Imports a package, whatever that raises.

    Returns:
        Its version, None where it cannot be used, and what is wrong, else None.
    """
    try:
        package = importlib.import_module(name)
        if not hasattr(package, "__version__"):
            # The first releases of tensorboard, and a folder of that name.
            return str(importlib.import_module(name + ".version").VERSION), None
        return str(package.__version__), None
    except Exception as error:
        if isinstance(error, ImportError) and error.name == name:
            return None, "not installed"
        return None, "cannot be used: {}: {}".format(type(error).__name__, error)


def find_keras(name):
    """Imports ``"keras"``, ``"tf.keras"`` or ``"tf_keras"``, whatever that raises.

    Returns:
        The package, None where it cannot be used; its version; and what is wrong.
    """
    if name == "tf.keras":
        version, problem = installed("tensorflow")
        if problem:
            return None, None, "there is no usable TensorFlow"
    else:
        version, problem = installed(name)
        if problem:
            return None, None, problem
    try:
        keras = tensorflow().keras if name == "tf.keras" else sys.modules[name]
        # What is loaded when it is asked for fails now.
        keras.models.Model, keras.layers.Dense
        return keras, _version_text(keras), None
    except Exception as error:
        problem = "cannot be used: {}: {}".format(type(error).__name__, error)
        return None, None, problem


def nearest_line():
    """Returns the tested line that is next to the TensorFlow that is here.

    Returns:
        Its name, the newest that is not newer, the oldest where all are, or None where
        there is no TensorFlow; and whether it is of this very TensorFlow.
    """
    version, problem = installed("tensorflow")
    if problem:
        return None, False
    horovod = importlib.util.find_spec("horovod") is not None
    lines = [line for line in LINES if line.name.endswith("horovod") == horovod]
    release = Version(version).release[:2]
    older = [line for line in lines if Version(line.tensorflow).release <= release]
    line = older[-1] if older else lines[0]
    return line.name, Version(line.tensorflow).release == release
