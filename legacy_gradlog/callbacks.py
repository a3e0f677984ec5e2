"""The callbacks: arguments, hooks, and the stock callback that one of them holds.

Plain classes, no Keras subclasses: which Keras they belong to is decided by the model.
"""

import contextlib
import os
import tempfile

from . import arguments, errors, patching, runtime, sketch, tags, writers
from .arguments import parse_settings
from .errors import UnknownArgumentError
from .recording import Recorder

__all__ = ["GradientLogger", "TensorBoard"]


def _default(hook):
    """Marks a hook that does nothing, as Keras 3 marks its own."""
    hook._is_default = True
    return hook


class _Callback:
    """Every hook and flag that a callback list of any generation asks for."""

    # Keras 3 may call batch hooks from another thread; ours do nothing there.
    async_safe = True
    # TF 2.3 and later: logs may stay tensors, so that no batch waits for the host.
    _supports_tf_logs = True

    def __init__(self):
        self.model = None
        self.params = {}
        self.validation_data = None

    def set_params(self, params):
        self.params = params or {}

    def set_model(self, model):
        self.model = model

    def on_train_begin(self, logs=None):
        """Called before the first epoch."""

    def on_train_end(self, logs=None):
        """Called after the last epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        """Called before each epoch."""

    def on_epoch_end(self, epoch, logs=None):
        """Called after each epoch and its validation."""

    def _implements_train_batch_hooks(self):
        return False

    def _implements_test_batch_hooks(self):
        return False

    def _implements_predict_batch_hooks(self):
        return False


_BATCH_HOOKS = [
    "on_{}batch_{}".format(kind, moment)
    for kind in ("", "train_", "test_", "predict_")
    for moment in ("begin", "end")
]
_PHASE_HOOKS = [
    "on_{}_{}".format(kind, moment)
    for kind in ("test", "predict")
    for moment in ("begin", "end")
]


def _add_hooks():
    def no_batch(self, batch, logs=None):
        """Does nothing."""

    def no_phase(self, logs=None):
        """Does nothing."""

    for name in _BATCH_HOOKS:
        setattr(_Callback, name, _default(no_batch))
    for name in _PHASE_HOOKS:
        setattr(_Callback, name, _default(no_phase))


_add_hooks()


#: Names of the methods of a model that train, and of those that do not.
_TRAINING = ("fit", "fit_generator")
_NO_TRAINING = ("evaluate", "evaluate_generator", "predict", "predict_generator")


class _GradientCallback(_Callback):
    """A callback that owns a `Recorder`, as ``_recorder``."""

    def __init__(self):
        super().__init__()
        self._finalizer = None

    def set_params(self, params):
        super().set_params(params)
        self._recorder.announce(_batches_per_epoch(self.params))

    def _start(self, model, make_writer):
        """Starts logging, unless it is `evaluate` or `predict` that calls."""
        frame = patching.calling_frame(_TRAINING + _NO_TRAINING)
        if frame is not None and frame.f_code.co_name in _NO_TRAINING:
            return
        with errors.contain(self._recorder.switch_off):
            self._recorder.start(model, make_writer)
        if frame is not None:
            self._finalizer = patching.when_frame_ends(frame, self._recorder.finish)

    def _finish(self):
        self._recorder.finish()
        if self._finalizer is not None:
            self._finalizer.detach()

    @property
    def latest(self):
        """Newest logged gradients: dict of weight path -> `sketch.Record`.

        The path is made of layer names, ``encoder/dense_1/kernel``. Empty before the
        first logged step.
        """
        return self._recorder.latest


def _batches_per_epoch(params):
    steps = params.get("steps")
    if steps is None and params.get("samples") and params.get("batch_size"):
        steps = -(-params["samples"] // params["batch_size"])
    return steps


class GradientLogger(_GradientCallback):
    """Logs the gradients that the optimizer uses, beside any other callbacks.

    The logged gradient is the one that `fit` computed for the batch it trained on and
    that the optimizer used. A sparse gradient has its duplicate rows summed, and only
    the touched rows are logged.

    Args:
        log_dir: Directory of the event files; they are written into exactly this one.
        freq: ``"epoch"``, ``"batch"`` (every optimizer update), or an integer N >= 1:
            the updates whose number is a multiple of N. The step of a record is the
            epoch index, or `optimizer.iterations` before the update.
        layers: None for all, or a list of names and shell patterns, matched against
            layer names and weight paths: ``["embedding", "encoder/*"]``.
        reduce: At epoch level, ``"last"``: the last update of the epoch; ``"pool"``:
            one histogram over all of its updates.
        clipped: False for the gradient before the optimizer's clipping, True for the
            one after it.
        scalars: Any of ``"mean_abs"``, ``"norm"``, ``"max_abs"``: one scalar a weight.
            ``"norm"`` also writes the norm over all logged weights together.
        histograms: Whether histograms are written.

    Attributes:
        latest: Dict of weight path -> record of the newest logged gradients.

    Raises:
        InvalidArgumentError: An argument has a wrong value. Layer patterns are checked
            before the first training step.
    """

    def __init__(
        self,
        log_dir,
        freq="epoch",
        layers=None,
        reduce="last",
        clipped=False,
        scalars=("mean_abs", "norm"),
        histograms=True,
    ):
        super().__init__()
        arguments.check_path(log_dir, "log_dir")
        self._arguments = (log_dir, freq, layers, reduce, clipped, scalars, histograms)
        self.log_dir = log_dir
        self._recorder = Recorder(
            parse_settings(freq, layers, reduce, clipped, scalars, histograms)
        )

    def __reduce__(self):
        # What belongs to a running fit is not copied and not pickled.
        return type(self), (self.log_dir,) + self._arguments[1:]

    def set_model(self, model):
        super().set_model(model)
        self._start(model, lambda: writers.OwnWriter(self.log_dir))

    @contextlib.contextmanager
    def watch(self, target):
        """Logs where no `fit` runs callbacks, at step level, within a `with` block.

        The gradient is the one that each update uses, as in `fit`: of `train_on_batch`
        for a model, of every call of the optimizer for an optimizer, eagerly or inside
        a `tf.function` that is traced within the block. The step is the number of the
        update.

        Args:
            target: A compiled model, or a Keras optimizer. Of an optimizer the weights
                have the names that TensorFlow or Keras gave them.

        Yields:
            This logger.

        Raises:
            InvalidArgumentError: ``freq`` is ``"epoch"``, or the target is neither.
            UnsupportedError: An optimizer in graph mode, where no update is visible.
        """
        self._recorder.watch(target, lambda: writers.OwnWriter(self.log_dir))
        try:
            yield self
        finally:
            self._recorder.end_watch()

    def on_epoch_begin(self, epoch, logs=None):
        self._recorder.begin_epoch(epoch)

    def on_epoch_end(self, epoch, logs=None):
        self._recorder.end_epoch(epoch)

    def on_train_end(self, logs=None):
        self._finish()


class TensorBoard(_GradientCallback):
    """Stands in for `keras.callbacks.TensorBoard` of any generation, with gradients.

    Everything that the stock callback of the model's own Keras does is done by it. With
    ``write_grads`` the gradients that the optimizer used are logged beside it, in the
    same run and through the same writer. They never depend on validation data.

    Args:
        log_dir: Directory of the event files.
        histogram_freq: Epochs between weight histograms, 0 for none; with
            ``write_grads`` also between epoch-level gradients, where 0 means 1.
        write_grads: Whether gradients are logged.
        grads_freq: As `GradientLogger`'s ``freq``.
        grads_layers: As `GradientLogger`'s ``layers``.
        grads_reduce: As `GradientLogger`'s ``reduce``.
        grads_clipped: As `GradientLogger`'s ``clipped``.
        grads_scalars: As `GradientLogger`'s ``scalars``.
        **native: Any other argument that a stock callback ever had. One that the
            running generation lacks is warned about.

    Attributes:
        log_dir: May be assigned until training starts.
        latest: Dict of weight path -> record of the newest logged gradients.

    Raises:
        InvalidArgumentError: An argument has a wrong value.
        UnknownArgumentError: No generation has an argument of that name, or one was
            passed by position after ``histogram_freq``.
    """

    async_safe = False

    def __new__(cls, *args, **kwargs):
        if len(args) > 2:
            raise UnknownArgumentError(
                "`TensorBoard` must get all arguments but `log_dir` and "
                "`histogram_freq` by keyword. Received: {!r} in third position, which "
                "is `batch_size` in some generations and `write_graph` in others. "
                "Write `batch_size=...` or `write_graph=...`.".format(args[2])
            )
        return super().__new__(cls)

    def __init__(
        self,
        log_dir="./logs",
        histogram_freq=0,
        *,
        write_grads=False,
        grads_freq="epoch",
        grads_layers=None,
        grads_reduce="last",
        grads_clipped=False,
        grads_scalars=("mean_abs", "norm"),
        **native,
    ):
        self._stock = None
        self._scratch = None
        self._validation_data = None
        self._told_left_out = False
        super().__init__()
        arguments.check_native(native)
        arguments.check_path(log_dir, "log_dir")
        arguments.check_period(histogram_freq, "histogram_freq")
        self.log_dir = log_dir
        self.histogram_freq = histogram_freq
        self.write_grads = write_grads
        self._gradient_arguments = dict(
            grads_freq=grads_freq,
            grads_layers=grads_layers,
            grads_reduce=grads_reduce,
            grads_clipped=grads_clipped,
            grads_scalars=grads_scalars,
        )
        self._native = native
        self._recorder = Recorder(
            parse_settings(
                grads_freq,
                grads_layers,
                grads_reduce,
                grads_clipped,
                grads_scalars,
                epochs=histogram_freq or 1,
                prefix="grads_",
            )
        )

    def __reduce__(self):
        # What belongs to a running fit is not copied and not pickled.
        kwargs = dict(self._gradient_arguments, write_grads=self.write_grads)
        kwargs.update(self._native)
        return _rebuild, (type(self), self.log_dir, self.histogram_freq, kwargs)

    def __getattr__(self, name):
        # What else the stock callback has, for code that looks into it.
        stock = self.__dict__.get("_stock")
        if stock is None or name.startswith("__"):
            raise AttributeError(
                "{!r} object has no attribute {!r}".format(type(self).__name__, name)
            )
        return getattr(stock, name)

    @property
    def validation_data(self):
        """The arrays that Keras 2 hands to every callback after `on_train_begin`."""
        return self._validation_data

    @validation_data.setter
    def validation_data(self, value):
        self._validation_data = value
        if self._stock is not None:
            self._stock.validation_data = value

    def set_params(self, params):
        super().set_params(params)
        if self._stock is not None:
            self._stock.set_params(params)

    def set_model(self, model):
        super().set_model(model)
        if runtime.writes_logs(model):
            writers.check_directory(self.log_dir)
        self._make_stock(model)
        if self.write_grads:
            self._start(model, self._make_writer)

    def _make_writer(self):
        writer = runtime.stock_writer(self._stock)
        if writer is not None:
            log_dir = runtime.stock_directory(self._stock)
            return writers.StockWriter(writer, log_dir)
        return writers.OwnWriter(os.path.join(os.fspath(self.log_dir), "gradients"))

    def _make_stock(self, model):
        stock_class = runtime.stock_callback_class(model)
        if self.histogram_freq and runtime.stock_histograms_fail(model):
            raise errors.UnsupportedError(
                "`histogram_freq` must be 0 for a model of standalone Keras 2.3 on "
                "TensorFlow 2 with eager execution off, where the stock callback fails "
                "at its first histogram. Received: {}. Leave eager execution on, or "
                "take 0; gradients are logged all the same.".format(self.histogram_freq)
            )
        if type(self._stock) is not stock_class or self._stock_dir != self.log_dir:
            kwargs = arguments.stock_kwargs(stock_class, self._native)
            log_dir = os.fspath(self.log_dir)
            if not runtime.writes_logs(model):
                # To read a variable may take all workers: the stock callback must do
                # here what it does where the log is written.
                self._scratch = tempfile.TemporaryDirectory()
                log_dir = self._scratch.name
            self._stock = stock_class(
                log_dir=log_dir, histogram_freq=self.histogram_freq, **kwargs
            )
            self._stock_dir = self.log_dir
        self._stock.histogram_freq = self.histogram_freq
        self._histograms_left_out = False
        self._stock.set_params(self.params)
        if not runtime.writes_with_session(self._stock):
            self._stock.set_model(model)
            return
        with writers.exclusive_second(self._stock.log_dir):
            self._stock.set_model(model)
            self._stock.writer.flush()

    def _leave_out_histograms(self):
        """Keeps the stock callback from stopping a run that has no validation arrays.

        Its histograms walk the validation data, though those of the weights need none.
        """
        self._histograms_left_out = True
        self._stock.histogram_freq = 0
        if not self._told_left_out:
            self._told_left_out = True
            errors.warn(
                "The TensorBoard callback of this Keras writes histograms from "
                "validation arrays only, and there are none. Histograms of weights "
                "(and gradients) are written without them; those of layer outputs are "
                "left out."
            )

    def on_train_begin(self, logs=None):
        if self._stock.histogram_freq and runtime.writes_with_session(self._stock):
            if not self.params.get("do_validation"):
                self._leave_out_histograms()
        self._stock.on_train_begin(logs)

    def on_epoch_begin(self, epoch, logs=None):
        # Keras assigns the validation arrays after `on_train_begin`.
        if self._stock.histogram_freq and not self.validation_data:
            if runtime.histograms_need_arrays(self._stock):
                self._leave_out_histograms()
        self._stock.on_epoch_begin(epoch, logs)
        self._recorder.begin_epoch(epoch)

    def on_epoch_end(self, epoch, logs=None):
        self._stock.on_epoch_end(epoch, logs)
        if self._histograms_left_out and epoch % self.histogram_freq == 0:
            with errors.contain(self._recorder.switch_off):
                self._write_weights(epoch)
        self._recorder.end_epoch(epoch)

    def _write_weights(self, epoch):
        weights = tags.name_weights(self.model)
        values = runtime.values_of(self.model, [w.variable for w in weights])
        event = writers.new_event(epoch)
        for weight, value in zip(weights, values):
            counts, moments = sketch.from_values(value)
            counts = counts[None]
            records = sketch.decode(epoch, counts, moments[None])
            writers.add_histograms(event.summary, [weight.tag], records, counts)
        writer = self._make_writer()
        writer.write(event)
        writer.flush()

    def on_train_end(self, logs=None):
        self._finish()
        self._stock.on_train_end(logs)
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = self._stock_dir = None

    def _implements_train_batch_hooks(self):
        return self._stock is None or self._stock._implements_train_batch_hooks()

    def _implements_test_batch_hooks(self):
        return self._stock is None or self._stock._implements_test_batch_hooks()

    def _implements_predict_batch_hooks(self):
        return self._stock is None or self._stock._implements_predict_batch_hooks()


def _rebuild(cls, log_dir, histogram_freq, kwargs):
    return cls(log_dir, histogram_freq, **kwargs)


def _add_forwarded_hooks():
    def forward(name):
        def hook(self, *args, **kwargs):
            stock_hook = getattr(self._stock, name, None)
            if stock_hook is not None:
                return stock_hook(*args, **kwargs)

        hook.__name__ = name
        hook.__doc__ = "Does what the stock callback does."
        return hook

    for name in _BATCH_HOOKS + _PHASE_HOOKS:
        setattr(TensorBoard, name, forward(name))


_add_forwarded_hooks()
