"""Runs a training script as ``python SCRIPT`` does, with our `TensorBoard` in it.

Whoever asks a module of a Keras for its `TensorBoard` gets ours; the frameworks
themselves, which derive from it and call it by name, get the stock one, and so does
this package. Nothing but this process is changed, and no file. Must not know how
gradients are captured, nor import a framework: the script does, when it wants to.
"""

import functools
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import types

from . import callbacks, runtime
from .errors import InvalidArgumentError

__all__ = ["load", "replace_stock_callbacks"]

#: Packages that hold a Keras.
FRAMEWORKS = frozenset(["keras", "tensorflow", "tensorflow_core", "tf_keras"])
#: Whose modules get the stock callback when they ask for it.
INSIDERS = FRAMEWORKS | {__package__}

#: The module that was the main one before the script.
_held = []


def load(path, arguments, is_module=False):
    """Loads a script, or a module, to be the main program of this process.

    From here on `sys.path` and `sys.argv` are the script's.

    Args:
        path: The script's path, or the module's name.
        arguments: The script's own arguments, a list of strings.
        is_module: Whether ``path`` names a module, as for ``python -m``.

    Returns:
        A callable that runs it and returns 0. What that raises is the script's own,
        `SystemExit` included. A traceback that nobody catches shows the frames of the
        script only, as it would without us.

    Raises:
        InvalidArgumentError: There is no such file or module.
    """
    if is_module:
        _set_first_path(os.getcwd())
        source, main = _find(path)
        path = main.__file__
    else:
        source = _read(path)
        _set_first_path(os.path.dirname(os.path.realpath(path)))
        main = _main_module(runtime.main_file(path))
    sys.argv = [path] + arguments
    return functools.partial(_run, source, main)


def _run(source, main):
    # Pickles and spawned processes look there. Whoever called us still needs ours.
    _held.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    code = source
    try:
        if isinstance(source, bytes):
            code = compile(source, main.__file__, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook = _without_our_frames(sys.excepthook, code)
        raise
    return 0


def _read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise InvalidArgumentError(
            "The script must be a file that can be read. Received: {!r} ({}). For a "
            "module, write -m before its name.".format(path, error.strerror)
        ) from error


def _set_first_path(folder):
    """Puts the script's folder where Python has put ours."""
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = folder


def _main_module(path):
    main = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    return main


def _find(name):
    """Returns the code of a module, or of a package's ``__main__``, and its module."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(name + ".__main__")
        code = spec.loader.get_code(spec.name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgumentError(
            "The module must be one that Python finds. Received: {!r} ({}). For a "
            "file, leave -m out.".format(name, error)
        ) from error
    main = _main_module(spec.origin)
    main.__dict__.update(
        __spec__=spec,
        __package__=spec.parent,
        __loader__=spec.loader,
        __cached__=spec.cached,
    )
    return code, main


def _without_our_frames(hook, code):
    """Returns an exception hook that shows a traceback from the script's frame on."""

    def excepthook(kind, error, traceback):
        while traceback is not None and traceback.tb_frame.f_code is not code:
            traceback = traceback.tb_next
        hook(kind, error.with_traceback(traceback), traceback)

    return excepthook


def replace_stock_callbacks(**options):
    """Makes every Keras of this process, imported or not yet, give our `TensorBoard`.

    Args:
        **options: Gradient arguments of `TensorBoard`: what the script cannot say.
    """
    replacements = {}

    def replacement(stock):
        if stock not in replacements:
            replacements[stock] = _make_class(stock, options)
        return replacements[stock]

    sys.meta_path.insert(0, _Finder(replacement))
    for name, module in list(sys.modules.items()):
        if _may_hold_callbacks(name) and module is not None:
            _give_away(module, replacement)


def _make_class(stock, options):
    """Returns our `TensorBoard` with the options, called as a stock class is."""
    names = list(inspect.signature(stock.__init__).parameters)[1:]

    class TensorBoard(callbacks.TensorBoard):
        __doc__ = callbacks.TensorBoard.__doc__

        def __new__(cls, *args, **kwargs):
            # The arguments of a script's subclass are its own.
            return object.__new__(cls)

        def __init__(self, *args, **kwargs):
            # The script was written for what this Keras takes by position.
            given = dict(zip(names, args[: len(names)]), **kwargs)
            given.update(options, write_grads=True)
            super().__init__(*args[len(names) :], **given)

        def __reduce__(self):
            make, (cls, *values) = super().__reduce__()
            # Another process finds the class that has a name.
            return make, (callbacks.TensorBoard if cls is TensorBoard else cls, *values)

    TensorBoard.__qualname__ = "TensorBoard"
    return TensorBoard


def _may_hold_callbacks(name):
    parts = name.split(".")
    return parts[0] in FRAMEWORKS and parts[-1] == "callbacks"


def _give_away(module, replacement):
    """Lets a module give others our class in place of its `TensorBoard`.

    Its own functions find the stock class as they did, among their globals, and so do
    those frameworks that ask it for an attribute.
    """
    kind = type(module)

    class Module(kind):
        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            if name != "TensorBoard" or not inspect.isclass(value):
                return value
            asking = sys._getframe(1).f_globals.get("__name__", "")
            if asking.split(".")[0] in INSIDERS:
                return value
            return replacement(value)

    Module.__name__, Module.__qualname__ = kind.__name__, kind.__qualname__
    Module.__module__ = kind.__module__
    # TensorFlow's wrappers would hand it on to what they wrap.
    super(kind, module).__setattr__("__class__", Module)


class _Finder:
    """Looks at the modules of callbacks when they have been imported."""

    def __init__(self, replacement):
        self._replacement = replacement

    def find_spec(self, name, path=None, target=None):
        if not _may_hold_callbacks(name):
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                self._follow(spec)
                return spec
        return None

    def _follow(self, spec):
        execute = spec.loader.exec_module

        def exec_module(module):
            del spec.loader.exec_module
            execute(module)
            # TensorFlow puts wrappers in the place of some of its modules.
            for module in {module, sys.modules.get(spec.name, module)}:
                _give_away(module, self._replacement)

        spec.loader.exec_module = exec_module
