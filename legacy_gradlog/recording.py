"""One logger at work: engine -> record -> writer, through one `fit` and the next.

Everything that may go wrong in our own code while training runs is contained here.
"""

import warnings

from . import errors, runtime, sketch, tags, writers
from .engines.base import Request
from .errors import GradlogWarning, InvalidArgumentError, UnsupportedError
from .schedule import EpochSteps

__all__ = ["Recorder"]


def _make_engine(name, optimizer, in_fit, *args, **kwargs):
    if name == runtime.GRAPH:
        from .engines.graph import GraphEngine

        return GraphEngine(*args, in_fit=in_fit, **kwargs)
    if name == runtime.LOOP:
        from .engines.loop import LoopEngine

        return LoopEngine(optimizer, *args, **kwargs)
    from .engines.function import FunctionEngine

    return FunctionEngine(*args, **kwargs)


class Recorder:
    """Logs the gradients of one model after another, one `fit` at a time.

    Attributes:
        latest: Weight path -> `sketch.Record` of the newest logged gradients.
    """

    def __init__(self, settings):
        self._settings = settings
        self._engine = None
        self._writer = None
        self._steps_per_epoch = None
        self._epoch_steps = EpochSteps()
        self._next_updates = {}
        self._told_missing = False
        self._told_nonfinite = False
        self._switched_off = False
        self.latest = {}

    @property
    def running(self):
        """Whether gradients are being logged now."""
        return self._engine is not None and self._engine.active

    def start(self, model, make_writer, in_fit=True):
        """Enters the training step of ``model``. Before its first step.

        Args:
            model: The compiled model.
            make_writer: Returns where records go.
            in_fit: False where `train_on_batch` is called instead of `fit`.

        Raises:
            GradlogError: What is asked for cannot be done here.
        """
        self.finish()
        detection = runtime.detect(model)
        if getattr(model, "optimizer", None) is None:
            raise InvalidArgumentError(
                "The model must be compiled before its gradients can be logged. "
                "Received: a model without optimizer. Call `model.compile` first."
            )
        if not in_fit and runtime.steps_are_hidden(model):
            detection = detection._replace(engine=runtime.LOOP)
        select = self._selector(model)
        if detection.engine is not None and runtime.trained_weights(model) is not None:
            select([])
        self._enter(detection, model, model.optimizer, select, make_writer, in_fit)

    def watch(self, target, make_writer):
        """Enters the updates of a model, or of an optimizer, that no `fit` makes.

        Args:
            target: The compiled model or the Keras optimizer.
            make_writer: Returns where records go.

        Raises:
            GradlogError: What is asked for cannot be done here.
        """
        if self._settings.cadence.every is None:
            raise InvalidArgumentError(
                'Outside of `fit` there are no epochs, so `freq` must be "batch" or '
                'an integer >= 1. Received: "epoch".'
            )
        model, optimizer = None, target
        if runtime.is_model(target):
            self.start(target, make_writer, in_fit=False)
            model, optimizer = target, target.optimizer
        elif runtime.is_optimizer(target):
            self.finish()
            detection = runtime.detect_loop()
            select = self._selector_of_variables()
            self._enter(detection, None, target, select, make_writer, in_fit=False)
        else:
            raise InvalidArgumentError(
                "`watch` must get a compiled model or a Keras optimizer. Received: an "
                "instance of {!r}.".format(type(target))
            )

        def counts():
            return runtime.update_count(model, optimizer), self._engine.next_updates()

        self._counts, self._before = counts, counts()

    def end_watch(self):
        """Leaves the updates; warns where there were some and none was seen."""
        if self.running:
            with errors.contain(self.switch_off):
                (made, seen), (made_before, seen_before) = self._counts(), self._before
                if made > made_before and seen == seen_before:
                    errors.warn(
                        "No gradient is logged: the updates within `watch` were made "
                        "by a function that had been traced before, or not by what is "
                        "watched. Make and call the `tf.function` within the block; "
                        "watch the optimizer of a hand-written loop, not its model."
                    )
        self.finish()

    def _enter(self, detection, model, optimizer, select, make_writer, in_fit):
        runtime.warn_if_untested(detection)
        if detection.engine is None:
            raise UnsupportedError(
                "Gradients can be logged in graph mode of TensorFlow 1.4 or later and "
                "in eager mode of TensorFlow 2.0 or later{1}. Received: {0.flavour} "
                "{0.keras_version} on TensorFlow {0.tensorflow_version}, {0.mode} mode "
                "({0.reason}).".format(
                    detection,
                    "" if model else ", an optimizer without its model in eager mode",
                )
            )
        settings = self._settings
        self._epoch_steps.begin_fit()
        engine = _make_engine(
            detection.engine,
            optimizer,
            in_fit,
            model,
            Request(settings.cadence, settings.clipped, settings.layers),
            select,
            deliver=lambda capture: self._write(capture, capture.update),
            fail=self.switch_off,
            first_updates=self._next_updates,
        )
        engine.length.announce(self._steps_per_epoch)
        self._engine = engine
        try:
            engine.attach()
            # The others take part in what it takes to know a gradient, and write none.
            writes = runtime.writes_logs(model)
            self._writer = make_writer() if writes else writers.NoWriter()
        except BaseException:
            self.finish()
            raise

    def announce(self, steps_per_epoch):
        """Takes the number of batches per epoch, None where it is not known."""
        self._steps_per_epoch = steps_per_epoch
        if self._engine is not None:
            self._engine.length.announce(steps_per_epoch)

    def begin_epoch(self, epoch):
        """Starts the epoch of index ``epoch``."""
        if self.running:
            with errors.contain(self._engine.fail):
                self._engine.begin_epoch(self._settings.cadence.logs_epoch(epoch))

    def end_epoch(self, epoch):
        """Ends the epoch of index ``epoch`` and writes its gradients."""
        if not self.running:
            return
        with errors.contain(self._engine.fail):
            captures = self._engine.end_epoch()
            if captures is not None:
                step = self._epoch_steps.step(epoch)
                for capture in captures:
                    self._write(capture, step)
            elif self._settings.cadence.logs_epoch(epoch):
                errors.warn(
                    "No gradient is logged for epoch {}: it ended on another batch "
                    "than was announced, so its last update was not captured. With "
                    'freq="batch" every update is logged.'.format(epoch)
                )
            self._writer.flush()

    def finish(self):
        """Leaves the training step; every record is on disk. Harmless twice."""
        engine, self._engine = self._engine, None
        writer, self._writer = self._writer, None
        if engine is not None:
            with errors.contain(self.switch_off):
                self._next_updates.update(engine.next_updates())
            engine.detach()
        if writer is not None:
            with errors.contain(self.switch_off):
                try:
                    writer.flush()
                finally:
                    writer.close()
        self._switched_off = False

    def _selector(self, model):
        settings = self._settings

        def select(variables):
            trained = {id(variable) for variable in runtime.trained_weights(model)}
            weights = tags.name_weights(model)
            weights = [w for w in weights if id(w.variable) in trained]
            return tags.select(weights, settings.layers, settings.prefix + "layers")

        return select

    def _selector_of_variables(self):
        settings = self._settings
        seen = []

        def select(variables):
            known = {id(variable) for variable in seen}
            seen.extend(v for v in variables if id(v) not in known)
            weights = tags.name_variables(seen)
            return tags.select(weights, settings.layers, settings.prefix + "layers")

        return select

    def _write(self, capture, step):
        self._tell_missing()
        weights = capture.weights
        records = sketch.decode(step, capture.counts, capture.moments)
        settings = self._settings
        several = len(self._engine.optimizers()) > 1
        event = writers.event_of(
            step,
            weights,
            records,
            capture.counts,
            settings.scalars,
            settings.histograms,
            capture.optimizer if several else None,
        )
        self._writer.write(event)
        found = [(weight.path, record) for weight, record in zip(weights, records)]
        self.latest.update(found)
        self._tell_nonfinite(found)

    def _tell_nonfinite(self, records):
        bad = [found for found in records if found[1].nonfinite]
        if bad and not self._told_nonfinite:
            self._told_nonfinite = True
            path, record = bad[0]
            errors.warn(
                "A gradient is not finite: {} of {} values of {} at step {}. Such "
                "values are counted in `grad_nonfinite/...` and left out of everything "
                "else. This is told once.".format(
                    record.nonfinite,
                    record.nonfinite + record.count,
                    path,
                    record.step,
                )
            )

    def _tell_missing(self):
        if self._told_missing:
            return
        self._told_missing = True
        weights = self._engine.missing()
        if weights:
            errors.warn(
                "No gradient reaches these trainable weights, so none is logged for "
                "them: {}.".format(", ".join(weight.path for weight in weights))
            )

    def switch_off(self, error):
        """Warns, once a run, that a failure of ours ended its logging."""
        if self._switched_off:
            return
        self._switched_off = True
        warnings.warn(
            "Gradient logging is switched off for this run, and training goes on. "
            "Cause: {}: {}".format(type(error).__name__, error),
            GradlogWarning,
        )
