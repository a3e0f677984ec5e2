"""Replace one attribute of one object, and put it back exactly.

Nothing here knows what is patched. Attributes are set past the object's own
``__setattr__``, so that Keras and TensorFlow do not track the replacement.
"""

import ctypes
import sys
import types
import weakref

__all__ = ["Patch", "called_from", "calling_frame", "held_by", "when_frame_ends"]

_MISSING = object()
#: Attributes that every object of some class has of its own, outside its ``__dict__``.
_FIXED = ("__class__", "cell_contents")
#: A wrapper that leads to more objects is none.
_MOST_HOLDERS = 1000


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


def held_by(wrapper, is_wanted):
    """Returns where a wrapper holds what it wraps, at any depth: ``(object, name)``.

    Args:
        wrapper: A function, or an object that can be called.
        is_wanted: Called with a value, returns whether that is what is looked for.

    Returns:
        None where it is in no closure and no attribute.
    """
    waiting, seen = [wrapper], set()
    while waiting and len(seen) < _MOST_HOLDERS:
        holder = waiting.pop(0)
        if id(holder) in seen or isinstance(holder, type):
            continue
        seen.add(id(holder))
        if isinstance(holder, types.MethodType):
            waiting += [holder.__func__, holder.__self__]
            continue
        if isinstance(holder, types.FunctionType):
            # What `functools.wraps` copies into its attributes it does not call.
            places = [(cell, "cell_contents") for cell in holder.__closure__ or ()]
        elif hasattr(holder, "get_weights"):
            # A model or layer holds everything, and calls something else.
            continue
        else:
            places = [(holder, name) for name in getattr(holder, "__dict__", ())]
        for place, name in places:
            value = getattr(place, name, None)
            if is_wanted(value):
                return place, name
            waiting.append(value)
    return None


class _Sentinel:
    """Dies with the frame that holds it."""


def called_from(module):
    """Whether a function of ``module`` is running now, in this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


def calling_frame(names):
    """Returns the nearest frame above the caller of a function of one of ``names``."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name not in names:
        frame = frame.f_back
    return frame


def when_frame_ends(frame, function):
    """Calls ``function`` once ``frame`` is gone.

    Keras calls no hook when `fit` ends by an exception. A value that is added to the
    locals of its frame dies with the frame: when `fit` has returned, or when nobody
    holds the traceback any more.

    Returns:
        The `weakref.finalize`.
    """
    sentinel = _Sentinel()
    frame.f_locals["_legacy_gradlog_{}".format(id(sentinel))] = sentinel
    finalizer = weakref.finalize(sentinel, function)
    finalizer.atexit = False
    return finalizer
