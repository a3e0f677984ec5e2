"""Variables of which every replica has its own, without its strategy's doing.

A strategy's own variables cannot be used everywhere: `CentralStorageStrategy` has one
for all replicas, which no branch may assign, and `MultiWorkerMirroredStrategy` waits
for every worker when one is made. A worker that logs must not wait for one that does
not.
"""

from .. import runtime

__all__ = ["ReplicaVariable"]


class ReplicaVariable:
    """One variable for each replica of this process.

    Within a replica it is that replica's. Outside, it is assigned for all of them, and
    read as the first one's, or with ``parts`` as their sum.

    Args:
        value: What it starts with, for every replica.
        parts: Each replica has a part of the value, and their sum is meant.
    """

    _convertible = False

    def __init__(self, value, parts=False):
        tf = runtime.tensorflow()
        self._parts = parts
        self._first = tf.convert_to_tensor(value)
        self._variables = {}
        self.shape, self.dtype = self._first.shape, self._first.dtype
        if not ReplicaVariable._convertible:
            tf.register_tensor_conversion_function(ReplicaVariable, _as_tensor)
            ReplicaVariable._convertible = True

    def assign(self, value):
        """Assigns this replica's, outside of any all of them."""
        if runtime.in_replica():
            return self._here().assign(value)
        self._first = runtime.tensorflow().convert_to_tensor(value)
        for variable in self._variables.values():
            variable.assign(value)

    def assign_add(self, value):
        """Adds to this replica's."""
        return self._here().assign_add(value)

    def read_value(self):
        """Returns this replica's, outside of any what they are together."""
        if runtime.in_replica():
            return self._here().read_value()
        values = [variable.read_value() for variable in self._variables.values()]
        if not values:
            return self._first
        return runtime.tensorflow().add_n(values) if self._parts else values[0]

    def __getitem__(self, index):
        return self.read_value()[index]

    def _here(self):
        number = runtime.replica_number()
        if number not in self._variables:
            with runtime.tensorflow().init_scope():
                self._variables[number] = runtime.plain_variable(self._first)
        return self._variables[number]


def _as_tensor(variable, dtype=None, name=None, as_ref=False):
    return runtime.tensorflow().convert_to_tensor(variable.read_value(), dtype)
