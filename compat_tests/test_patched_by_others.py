"""Another tool wraps the optimizer or the train function: both work, both stay."""

import functools

import pytest
import tensorflow as tf
from packaging.version import Version

from legacy_gradlog import GradientLogger, UnsupportedError

from .frameworks import run_replicas, small_data
from .oracle import assert_fit, assert_step_level, expected_keys, keys, read_events

TENSORFLOW = Version(tf.__version__)

needs_train_function = pytest.mark.skipif(
    Version("2.0") <= TENSORFLOW < Version("2.2"),
    reason="these loops have their train function in a closure that nobody patches",
)


class Tool:
    """Wraps one attribute of one object, as tools do, and counts the calls.

    Args:
        before: Called with the arguments of a call, returns those that are handed on.
    """

    def __init__(self, target, name, before=lambda *args: args):
        self.target, self.name, self.calls = target, name, 0
        self._before = before

    def wrap(self):
        self.original = getattr(self.target, self.name)

        @functools.wraps(self.original)
        def wrapper(*args, **kwargs):
            self.calls += 1
            return self.original(*self._before(*args), **kwargs)

        self.wrapper = wrapper
        object.__setattr__(self.target, self.name, wrapper)

    def unwrap(self):
        object.__setattr__(self.target, self.name, self.original)

    @property
    def in_place(self):
        return vars(self.target).get(self.name) is self.wrapper


def tool_callback(fw, tool, begin, end):
    """Returns a callback that wraps in one of its hooks, and unwraps in another."""

    class Other(fw.keras.callbacks.Callback):
        def set_model(self, model):
            if begin == "set_model":
                tool.wrap()

        def on_train_begin(self, logs=None):
            if begin == "on_train_begin":
                tool.wrap()

        def on_train_end(self, logs=None):
            if end:
                tool.unwrap()

    return Other()


def doubled(pairs, *args):
    """The arguments of `apply_gradients`, with every gradient doubled."""
    return ([(2 * gradient, variable) for gradient, variable in pairs],) + args


def optimizer_tool(fw, optimizer):
    if fw.trains_symbolically:
        return Tool(optimizer, "get_gradients")
    return Tool(optimizer, "apply_gradients", doubled)


def test_the_optimizer_is_wrapped_before(fw, tmp_path):
    """What is logged is what the wrapped optimizer applied."""
    trained = fw.linear_model()
    tool = optimizer_tool(fw, trained.model.optimizer)
    tool.wrap()
    for number in range(2):
        logger = GradientLogger(str(tmp_path / str(number)), freq="batch")
        x, y = small_data()
        weights = fw.recorder(trained)
        fw.fit(trained.model, x, y, callbacks=[logger, weights])
        events = read_events(fw, logger.log_dir)
        steps = range(5 * number, 5 * number + 5)
        assert keys(events) == expected_keys(trained.paths, steps)
        assert_step_level(events, weights, trained.paths, steps, first=5 * number)
        assert tool.in_place
    assert tool.calls


@pytest.mark.skipif(
    not Version("2.2") <= TENSORFLOW < Version("2.4") or not tf.executing_eagerly(),
    reason="elsewhere the gradients are summed below `apply_gradients`",
)
def test_the_optimizer_of_two_replicas_is_wrapped(fw, tmp_path):
    """What a wrapper does to each replica's part is not known; refused."""
    script = """
with strategy.scope():
    trained = fw.linear_model()
optimizer = trained.model.optimizer
original = optimizer.apply_gradients
optimizer.apply_gradients = lambda *args, **kwargs: original(*args, **kwargs)
try:
    logger = GradientLogger(sys.argv[1] + "/logs")
    fw.fit(trained.model, *frameworks.small_data(), callbacks=[logger])
except errors.UnsupportedError as error:
    print(str(error).split(" must")[0], optimizer.iterations.numpy())
"""
    output = run_replicas(script, fw, tmp_path)
    assert output == "`apply_gradients` of an optimizer 0\n"


@pytest.mark.parametrize("ours_first", [True, False], ids=["above", "below"])
@pytest.mark.parametrize("begin", ["set_model", "on_train_begin"])
@pytest.mark.parametrize("end", [True, False], ids=["unwraps", "stays"])
def test_the_optimizer_is_wrapped_in_a_callback(fw, tmp_path, ours_first, begin, end):
    plain, trained = fw.linear_model(), fw.linear_model()
    fw.fit(plain.model, *small_data())
    optimizer = trained.model.optimizer
    tool = optimizer_tool(fw, optimizer)
    weights = fw.recorder(trained)
    logger = GradientLogger(str(tmp_path), freq="batch")
    callbacks = [logger, tool_callback(fw, tool, begin, end)]
    if not ours_first:
        callbacks.reverse()
    fw.fit(trained.model, *small_data(), callbacks=callbacks + [weights])
    events = read_events(fw, tmp_path)
    assert keys(events) == expected_keys(trained.paths, range(5))
    assert_step_level(events, weights, trained.paths, range(5))
    assert tool.in_place is not end
    assert set(vars(optimizer)) - {tool.name} == set(vars(plain.model.optimizer))


def test_a_wrapper_that_changes_symbolic_gradients(fw, tmp_path):
    """What it makes of them is known after clipping only."""
    if not fw.trains_symbolically:
        pytest.skip("the gradients of this train function are no symbolic ones")
    trained = fw.linear_model()
    optimizer = trained.model.optimizer
    original = optimizer.get_gradients
    optimizer.get_gradients = lambda loss, params: [
        2 * gradient for gradient in original(loss, params)
    ]
    with pytest.raises(UnsupportedError, match="With `clipped=True`"):
        logger = GradientLogger(str(tmp_path / "a"))
        fw.fit(trained.model, *small_data(), callbacks=[logger])
    logger = GradientLogger(str(tmp_path / "b"), freq="batch", clipped=True)
    assert_fit(fw, trained, logger, range(5), *small_data())


def train_function_holder(fw, model):
    """Returns what holds the function that `fit` calls, made now, and its name."""
    if fw.trains_symbolically:
        while "train_function" not in vars(model) and hasattr(model, "model"):
            model = model.model
        if hasattr(model, "_make_fit_function"):
            # TF 1.13 has another for `fit`.
            model._make_fit_function()
            return model, "_fit_function"
        model._make_train_function()
    else:
        model.make_train_function()
    return model, "train_function"


@needs_train_function
@pytest.mark.parametrize("begin", ["before", "set_model"])
@pytest.mark.parametrize("ours_first", [True, False], ids=["above", "below"])
def test_the_train_function_is_wrapped(fw, tmp_path, begin, ours_first):
    """It is called for every batch, and is there to the end; so are our records."""
    trained = fw.linear_model()
    model = trained.model
    holder, name = train_function_holder(fw, model)
    tool = Tool(holder, name)
    if begin == "before":
        tool.wrap()
    logger = GradientLogger(str(tmp_path / "a"), freq="batch")
    other = tool_callback(fw, tool, begin, end=False)
    callbacks = [logger, other] if ours_first else [other, logger]
    weights = fw.recorder(trained)
    fw.fit(model, *small_data(), callbacks=callbacks + [weights])
    # In graph mode `fit` has taken the function before it calls a callback.
    calls = 0 if fw.trains_symbolically and begin != "before" else 5
    assert (tool.calls, tool.in_place) == (calls, True)
    again = GradientLogger(str(tmp_path / "b"), freq="batch")
    fw.fit(model, *small_data(), callbacks=[again, weights])
    assert (tool.calls, tool.in_place) == (calls + 5, True)
    for log_dir, first in (("a", 0), ("b", 5)):
        events = read_events(fw, tmp_path / log_dir)
        steps = range(first, first + 5)
        assert keys(events) == expected_keys(trained.paths, steps)
        assert_step_level(events, weights, trained.paths, steps)


@needs_train_function
@pytest.mark.parametrize("ours_first", [True, False], ids=["above", "below"])
def test_the_train_function_is_unwrapped(fw, tmp_path, ours_first):
    """At the end of the training, before ours is or after: the next fit is plain."""
    trained = fw.linear_model()
    model = trained.model
    holder, name = train_function_holder(fw, model)
    tool = Tool(holder, name)
    before = getattr(holder, name)
    logger = GradientLogger(str(tmp_path), freq="batch")
    callbacks = [logger, tool_callback(fw, tool, "set_model", end=True)]
    if not ours_first:
        callbacks.reverse()
    fw.fit(model, *small_data(), callbacks=callbacks)
    fw.fit(model, *small_data())
    assert getattr(holder, name) is before
    events = read_events(fw, tmp_path)
    assert keys(events) == expected_keys(trained.paths, range(5))
