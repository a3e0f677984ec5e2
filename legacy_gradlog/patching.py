"""Replace one attribute of one object, and put it back exactly.

Nothing here knows what is patched. Attributes are set past the object's own
``__setattr__``, so that Keras and TensorFlow do not track the replacement.
"""

import ctypes
import sys
import weakref

__all__ = ["Patch", "called_from", "caller_self", "when_released"]

_MISSING = object()
#: Attributes that every object of some class has of its own, outside its ``__dict__``.
_FIXED = ("__class__", "cell_contents")


class Patch:
    """One attribute of one object, replaced while the patch is in place.

    An attribute that the object did not have of its own is deleted again. If somebody
    else has replaced ours meanwhile, theirs stays.

    Args:
        target: The object.
        name: The attribute's name.
        wrap: Called with the present value, returns the replacement. Called anew only
            when the value is another than the time before.
    """

    def __init__(self, target, name, wrap):
        self._target = target
        self._name = name
        self._wrap = wrap
        self._own = self._replacement = None
        self._active = False

    def apply(self):
        """Puts the replacement in place. Doing it twice is harmless."""
        if self._active:
            return
        own = _own(self._target, self._name)
        if self._replacement is None or own is not self._own:
            self._own = own
            self._replacement = self._wrap(getattr(self._target, self._name))
        _set(self._target, self._name, self._replacement)
        self._active = True

    def undo(self):
        """Puts the original back. Doing it twice is harmless."""
        if not self._active:
            return
        self._active = False
        if _own(self._target, self._name) is not self._replacement:
            return
        if self._own is _MISSING:
            object.__delattr__(self._target, self._name)
        else:
            _set(self._target, self._name, self._own)


def _own(target, name):
    if name in _FIXED:
        return getattr(target, name)
    return vars(target).get(name, _MISSING)


def _set(target, name, value):
    try:
        object.__setattr__(target, name, value)
    except AttributeError:
        if name != "cell_contents":
            raise
        # Python 3.6 lets only its C interface assign to the cell of a closure.
        ctypes.pythonapi.PyCell_Set(ctypes.py_object(target), ctypes.py_object(value))


def caller_self(depth):
    """Returns the ``self`` of the method ``depth`` calls above the caller, or None."""
    try:
        return sys._getframe(depth + 1).f_locals.get("self")
    except ValueError:
        return None


def called_from(module):
    """Whether a function of ``module`` is running now, in this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


def when_released(owner, function):
    """Calls ``function`` once nothing holds ``owner`` any more.

    Keras calls no hook when `fit` ends by an exception; its callback list dies with it.

    Returns:
        The `weakref.finalize`, or None if ``owner`` cannot be watched.
    """
    try:
        finalizer = weakref.finalize(owner, function)
    except TypeError:
        return None
    finalizer.atexit = False
    return finalizer
