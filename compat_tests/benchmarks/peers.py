"""What else people use to see gradients, written as its users write it."""

import os

from ..frameworks import stock_class

__all__ = [
    "caching_model",
    "recomputing_callback",
    "stock_callback",
    "summarizing_model",
    "write_cached",
]


def stock_callback(fw, log_dir, batch):
    """The stock callback of TensorFlow 1; wants validation data."""
    return stock_class(fw)(
        log_dir, histogram_freq=1, write_grads=True, write_graph=False, batch_size=batch
    )


def _gradient_model(fw, use_gradients):
    """Returns a model class whose step hands its gradients to ``use_gradients``."""
    tf = fw.tf
    loss_of = fw.keras.losses.MeanSquaredError()

    class GradientModel(fw.keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = loss_of(y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            use_gradients(self, gradients)
            pairs = zip(gradients, self.trainable_variables)
            self.optimizer.apply_gradients(pairs)
            return {"loss": loss}

    return GradientModel


def caching_model(fw, cache):
    """Every step's gradients are assigned to variables, which ``cache`` gets."""
    tf = fw.tf

    def use_gradients(model, gradients):
        if not cache:
            with tf.init_scope():
                for variable in model.trainable_variables:
                    cache.append(tf.Variable(tf.zeros(variable.shape)))
        for variable, gradient in zip(cache, gradients):
            variable.assign(tf.convert_to_tensor(gradient))

    return _gradient_model(fw, use_gradients)


def write_cached(fw, log_dir, cache):
    """The callback that writes what ``caching_model`` has kept, at epoch end."""
    tf = fw.tf
    writer = tf.summary.create_file_writer(log_dir)

    class WriteCached(fw.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with writer.as_default():
                for number, variable in enumerate(cache):
                    tf.summary.histogram("grad_%d" % number, variable, step=epoch)
            writer.flush()

    return WriteCached()


def summarizing_model(fw, log_dir):
    """``tf.summary.histogram`` inside the step, of every weight at every step."""
    tf = fw.tf
    writer = tf.summary.create_file_writer(os.path.join(log_dir, "train"))

    def use_gradients(model, gradients):
        step = tf.cast(tf.convert_to_tensor(model.optimizer.iterations), tf.int64)
        with writer.as_default():
            for number, gradient in enumerate(gradients):
                gradient = tf.convert_to_tensor(gradient)
                tf.summary.histogram("grad_%d" % number, gradient, step=step)

    return _gradient_model(fw, use_gradients)


def recomputing_callback(fw, log_dir, x, y):
    """Computes gradients of one stored batch anew at the end of every epoch."""
    tf = fw.tf
    writer = tf.summary.create_file_writer(log_dir)
    loss_of = fw.keras.losses.MeanSquaredError()

    class Recompute(fw.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            weights = self.model.trainable_variables
            with tf.GradientTape() as tape:
                loss = loss_of(y, self.model(x, training=True))
            with writer.as_default():
                for number, gradient in enumerate(tape.gradient(loss, weights)):
                    gradient = tf.convert_to_tensor(gradient)
                    tf.summary.histogram("grad_%d" % number, gradient, step=epoch)
            writer.flush()

    return Recompute()
