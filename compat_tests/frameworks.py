"""What the tests need of a Keras, whatever it is, and the models that they train.

Shares no code with the package.
"""

import inspect
import os
import subprocess
import sys
import textwrap
import traceback

import numpy as np
from packaging.version import Version

LEARNING_RATE = 0.25
BATCH = 8

_TWO_REPLICAS = """
import sys
import numpy as np
import tensorflow as tf
from compat_tests import conftest, frameworks, oracle
from legacy_gradlog import GradientLogger, errors

errors.strict = True
config = tf.config.experimental
(cpu,) = config.list_physical_devices("CPU")
config.set_virtual_device_configuration(cpu, [config.VirtualDeviceConfiguration()] * 2)
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
(fw,) = conftest.available(sys.argv[2])
strategy = {
    "mirrored": lambda: tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]),
    "central storage": lambda: tf.distribute.experimental.CentralStorageStrategy(
        ["/cpu:0", "/cpu:1"], "/cpu:0"
    ),
    "one device": lambda: tf.distribute.OneDeviceStrategy("/cpu:1"),
}[sys.argv[3]]()
"""


class Framework:
    """One Keras of one environment."""

    def __init__(self, name, keras, tf):
        self.name = name
        self.keras = keras
        self.tf = tf
        self.layers = keras.layers
        text = getattr(keras, "__version__", None) or tf.__version__
        self.version = Version(text.replace("-tf", ""))
        self.tf_version = Version(tf.__version__)
        self.eager = hasattr(tf, "executing_eagerly") and tf.executing_eagerly()
        self.is_keras_3 = self.version >= Version("3.0") and name != "tf_keras"
        #: What a whole model is saved as. Keras 3.15 does not read its own HDF5 files.
        self.file_name = "model.keras" if self.is_keras_3 else "model.h5"
        self.v1 = getattr(getattr(tf, "compat", None), "v1", tf)

    def clear(self):
        """Starts over with an empty graph and known seeds."""
        self.keras.backend.clear_session()
        self.begin()

    def begin(self):
        """Seeds everything and makes a session of one thread.

        The first session of a process decides how many threads all of them have, and
        two runs of one model agree in one thread only.
        """
        if hasattr(self.keras.utils, "set_random_seed"):
            self.keras.utils.set_random_seed(1)
        elif hasattr(self.tf, "set_random_seed"):
            self.tf.set_random_seed(1)
        else:
            self.tf.random.set_seed(1)
        if not self.eager:
            config = self.v1.ConfigProto(
                intra_op_parallelism_threads=1, inter_op_parallelism_threads=1
            )
            backend = self.keras.backend
            if self.tf_version >= Version("2.0"):
                backend = self.v1.keras.backend
            backend.set_session(self.v1.Session(config=config))

    @property
    def reproducible(self):
        """Whether two plain runs of a deeper model agree: not with ref variables."""
        return self.tf_version >= Version("1.15")

    @property
    def saves_objects(self):
        """Whether TensorFlow itself can save a model and its optimizer."""
        return self.eager and (self.name != "keras" or self.is_keras_3)

    @property
    def keeps_random_state_in_functions(self):
        """Whether a train function that is traced anew draws its numbers anew."""
        return self.eager and not self.is_keras_3

    @property
    def trains_symbolically(self):
        """Whether the train function is made from the optimizer's symbolic updates."""
        return not self.eager or self.name == "keras" and not self.is_keras_3

    def optimizer_state(self, optimizer):
        """Returns the optimizer's variables as NumPy arrays."""
        if hasattr(optimizer, "get_weights"):
            return optimizer.get_weights()
        variables = optimizer.variables
        variables = variables() if callable(variables) else variables
        return [np.array(variable) for variable in variables]

    def optimizer_class(self, name="SGD"):
        """Returns the class of an optimizer that this mode can train with."""
        optimizers = self.keras.optimizers
        if not self.eager:
            # Keras 2.11 and later: only the legacy ones have `get_updates`.
            optimizers = getattr(optimizers, "legacy", optimizers)
        return getattr(optimizers, name)

    def optimizer(self, name="SGD", **kwargs):
        """Returns an optimizer that this mode can train with."""
        cls = self.optimizer_class(name)
        rate = kwargs.pop("rate", LEARNING_RATE)
        names = inspect.signature(cls.__init__).parameters
        kwargs["learning_rate" if "learning_rate" in names else "lr"] = rate
        return cls(**kwargs)

    def small_model(self, optimizer=None, **kwargs):
        """Dense, Dropout, BatchNormalization, Dense: a Sequential model."""
        layers = self.layers
        d1, bn, d2 = (
            layers.Dense(5, activation="tanh", name="d1", **self._input(4)),
            layers.BatchNormalization(name="bn"),
            layers.Dense(1, name="d2"),
        )
        stack = [d1, layers.Dropout(0.5, name="drop"), bn, d2]
        if self.is_keras_3:
            stack.insert(0, layers.Input((4,)))
        model = self.keras.models.Sequential(stack)
        model.compile(optimizer or self.optimizer(), "mse", **kwargs)
        return Trained(model, _dense(d1) + _norm(bn) + _dense(d2))

    def linear_model(
        self, optimizer=None, inputs=4, loss="mse", kernel_constraint=None, **kwargs
    ):
        """One Dense layer without bias."""
        dense = self.layers.Dense(
            1,
            use_bias=False,
            name="d",
            kernel_initializer="ones",
            kernel_constraint=kernel_constraint,
            **self._input(inputs),
        )
        stack = [dense]
        if self.is_keras_3:
            stack.insert(0, self.layers.Input((inputs,)))
        model = self.keras.models.Sequential(stack)
        model.compile(optimizer or self.optimizer(), loss, **kwargs)
        return Trained(model, [("d/kernel", dense, 0)])

    def rich_model(self, optimizer=None):
        """Nested model, shared layer, embedding, two inputs and two outputs."""
        layers, make = self.layers, self.keras.models.Model
        d1 = layers.Dense(3, activation="tanh", name="d1")
        bn = layers.BatchNormalization(name="bn")
        inner = layers.Input((4,), name="inner")
        encoder = make(inner, bn(d1(inner)), name="encoder")
        ids = layers.Input((3,), name="ids", dtype="int32")
        features = layers.Input((4,), name="features")
        shared = layers.Dense(4, activation="tanh", name="shared")
        embedding = layers.Embedding(10, 2, name="embedding")
        hidden = layers.Concatenate(name="both")(
            [
                encoder(shared(shared(features))),
                layers.Flatten(name="flat")(embedding(ids)),
            ]
        )
        hidden = layers.Dropout(0.25, name="drop")(hidden)
        out1, out2 = layers.Dense(1, name="out1"), layers.Dense(2, name="out2")
        model = make([ids, features], [out1(hidden), out2(hidden)], name="rich")
        losses = ["mse", "mse"]
        # Small enough not to explode where TensorFlow 1 applies an update before it has
        # read all that the gradient is made of.
        model.compile(optimizer or self.optimizer(), losses, loss_weights=[0.5, 0.25])
        probes = [("embedding/embeddings", embedding, 0)]
        probes += _dense(shared) + _dense(d1, "encoder/") + _norm(bn, "encoder/")
        return Trained(model, probes + _dense(out1) + _dense(out2))

    def _input(self, inputs):
        return {} if self.is_keras_3 else {"input_shape": (inputs,)}

    def fit(self, model, x, y, **kwargs):
        """`fit` on arrays, in their order."""
        kwargs.setdefault("batch_size", BATCH)
        kwargs.setdefault("epochs", 1)
        return model.fit(x, y, shuffle=False, verbose=0, **kwargs)

    def sequence(self, *arrays):
        """Returns a `keras.utils.Sequence` over tuples of arrays or lists of them."""

        class Batches(self.keras.utils.Sequence):
            def __len__(self):
                return -(-len(_first(arrays)) // BATCH)

            def __getitem__(self, index):
                here = slice(index * BATCH, (index + 1) * BATCH)
                return tuple(_map(arrays, lambda array: array[here]))

            def on_epoch_end(self):
                # The first Kerases wait for ever where this is missing.
                pass

        return Batches()

    def fit_stream(self, model, stream, **kwargs):
        """Trains on a `Sequence` or generator, whose batches Keras may shuffle."""
        kwargs.setdefault("epochs", 1)
        generators = self.version >= Version("2.3")  # `fit` takes them.
        if self.name == "tf.keras":
            generators = self.tf_version >= Version("1.14")
        if not generators:
            if "steps_per_epoch" not in kwargs:
                kwargs["steps_per_epoch"] = len(stream)
            return model.fit_generator(stream, verbose=0, **kwargs)
        return model.fit(stream, verbose=0, **kwargs)

    def recorder(self, trained, after_update=None):
        """Returns a callback that keeps the weights before and after every update."""

        class Weights(self.keras.callbacks.Callback):
            def __init__(self):
                super(Weights, self).__init__()
                self.values = []
                self.epochs = []

            def on_train_begin(self, logs=None):
                if not self.values:
                    self.values.append(trained.weights())

            def on_epoch_begin(self, epoch, logs=None):
                self.epochs.append(len(self.values) - 1)

            def on_batch_end(self, batch, logs=None):
                self.values.append(trained.weights())
                if after_update is not None:
                    after_update()

        return Weights()


def stock_class(fw):
    """Returns the `TensorBoard` callback that a user of this Keras takes."""
    if not fw.eager and hasattr(fw.v1, "keras") and fw.name == "tf.keras":
        return fw.v1.keras.callbacks.TensorBoard
    return fw.keras.callbacks.TensorBoard


def argument_names(cls):
    """Returns what ``cls`` takes itself, or hands on to a base by ``**kwargs``."""
    parameters = inspect.signature(cls.__init__).parameters
    names = set(parameters)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        names |= argument_names(cls.__mro__[1])
    return names


def no_profile(fw):
    """Returns the argument that keeps two callbacks from the one profiler."""
    known = argument_names(stock_class(fw))
    return {"profile_batch": 0} if "profile_batch" in known else {}


def _dense(layer, prefix=""):
    path = prefix + layer.name
    return [(path + "/kernel", layer, 0), (path + "/bias", layer, 1)]


def _norm(layer, prefix=""):
    path = prefix + layer.name
    return [(path + "/gamma", layer, 0), (path + "/beta", layer, 1)]


def _map(arrays, function):
    if isinstance(arrays, (list, tuple)):
        items = [_map(item, function) for item in arrays]
        return type(arrays)(items)
    return function(arrays)


def _first(arrays):
    while isinstance(arrays, (list, tuple)):
        arrays = arrays[0]
    return arrays


class Trained:
    """A model and where its trained weights are: ``(path, layer, index)``."""

    def __init__(self, model, probes):
        self.model = model
        self._probes = probes
        self.paths = [path for path, _, _ in probes]

    def weights(self):
        """Returns path -> NumPy array."""
        return {path: layer.get_weights()[i] for path, layer, i in self._probes}


def small_data(rows=40, seed=0):
    """Returns inputs ``(rows, 4)`` and targets ``(rows, 1)``."""
    random = np.random.RandomState(seed)
    x = random.randn(rows, 4).astype("float32")
    return x, random.randn(rows, 1).astype("float32")


def rich_data(rows=40, seed=0):
    """Returns ``[ids, features]``, two targets and two sample weights."""
    random = np.random.RandomState(seed)
    ids = random.randint(0, 10, (rows, 3)).astype("int32")
    ids[:, 2] = ids[:, 0]
    features = random.randn(rows, 4).astype("float32")
    y = [random.randn(rows, width).astype("float32") for width in (1, 2)]
    weights = [random.uniform(0.5, 1.5, rows).astype("float32") for _ in range(2)]
    return [ids, features], y, weights


def files_below(log_dir):
    """Returns the event files below a directory, as run -> paths."""
    found = {}
    for folder, _, names in os.walk(str(log_dir)):
        for name in sorted(names):
            if "tfevents" in name and not name.endswith("profile-empty"):
                run = os.path.relpath(folder, str(log_dir)).replace(os.sep, "/")
                found.setdefault(run, []).append(os.path.join(folder, name))
    return found


def start_script(script, log_dir, *arguments):
    """Starts a script in a process of its own, which some settings hold for.

    Its working directory, and its first argument, is ``log_dir``.

    Returns:
        The `Popen`, with a pipe for what it prints.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", textwrap.dedent(script), str(log_dir)]
    return subprocess.Popen(
        command + list(arguments),
        cwd=str(log_dir),
        env=dict(os.environ, PYTHONPATH=path),
        stdout=subprocess.PIPE,
    )


def run_script(script, log_dir, *arguments, timeout=None):
    """Runs a script as `start_script` does, and kills it after ``timeout`` seconds.

    Returns:
        What it printed.
    """
    child = start_script(script, log_dir, *arguments)
    try:
        output = child.communicate(timeout=timeout)[0].decode()
    finally:
        child.kill()
        child.wait()
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, child.args, output)
    return output


def fork(function, *args):
    """Starts a child of a process that has imported TensorFlow and done nothing more.

    Returns:
        Its process id. Its exit status is 0 if ``function`` returned.
    """
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        function(*args)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def run_replicas(script, fw, log_dir, *arguments, strategy="mirrored"):
    """Runs a script on two logical devices, in a process of its own.

    It finds ``fw``, its framework, ``strategy``, and what else its tests need. The
    devices are divided before anything runs.

    Returns:
        What it printed.
    """
    return run_script(_TWO_REPLICAS + script, log_dir, fw.name, strategy, *arguments)
