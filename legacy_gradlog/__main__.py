"""The command line: ``legacy-gradlog``, or ``python -m legacy_gradlog``.

Knows the commands, their options, and how an error is told: one line on stderr and exit
code 2. What a command does is its own module's business.
"""

import argparse
import contextlib
import os
import re
import signal
import sys

from . import audit, demo, doctor, runner, show
from .callbacks import TensorBoard
from .errors import GradlogError

PROGRAM = "python -m legacy_gradlog"
FAILED = 2
#: What shells say of a program that Ctrl-C has ended,
INTERRUPTED = 130
#: and of one that wrote to ``head``, which has seen enough.
CLOSED = 141

EXIT_CODES = """\
exit codes, but for those that the --help of a command tells:
  0    done
  2    an error, told in one line on stderr
  130  interrupted by Ctrl-C
  141  nobody reads what it prints any more, as in "show LOGDIR | head"
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all others of the program are."""

    def error(self, message):
        self.exit(FAILED, "{}: error: {}\n".format(self.prog, message))


def _integer(lowest, highest=None):
    """Returns an argument type: an integer from ``lowest`` up to ``highest``."""
    rule = "must be an integer >= {}".format(lowest)
    if highest is not None:
        rule = "must be an integer from {} to {}".format(lowest, highest)

    def parse(text):
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < lowest or (highest is not None and value > highest):
            raise argparse.ArgumentTypeError("{}. Received: {}.".format(rule, text))
        return value

    return parse


def _program():
    """Returns what was typed to start this process."""
    name = os.path.basename(sys.argv[0])
    name = name[:-4] if name.lower().endswith(".exe") else name
    return name if name.startswith("legacy-gradlog") else PROGRAM


def _parser():
    parser = _Parser(
        prog=_program(),
        description="Per-weight gradients in TensorBoard.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    # Python 3.6 has no argument for this.
    commands.required = True
    _add_demo(commands)
    _add_doctor(commands)
    _add_run(commands)
    _add_audit(commands)
    _add_show(commands)
    return parser


def _add_demo(commands):
    command = commands.add_parser(
        "demo",
        help="train a small network on real digits and log its gradients",
        description=(
            "Trains a small convolutional network, with BatchNormalization and "
            "Dropout, on 1,797 real handwritten digits that come with the package, and "
            "logs the gradients of every weight for TensorBoard: once an epoch, and "
            "every {} updates. Needs no network and less than a minute.".format(
                demo.FREQ
            )
        ),
    )
    command.add_argument(
        "--logdir",
        default=demo.LOG_DIR,
        metavar="DIR",
        help=(
            "where logs go; every run makes its own directory in it: run-1, run-2, ... "
            "(default: %(default)s)"
        ),
    )
    command.add_argument(
        "--epochs",
        type=_integer(1),
        default=demo.EPOCHS,
        metavar="N",
        help="passes over the training images (default: %(default)s)",
    )
    command.add_argument(
        "--seed",
        # The seeds that NumPy takes.
        type=_integer(0, 2**32 - 1),
        metavar="N",
        help="makes the run repeatable, as far as TensorFlow itself is",
    )
    command.set_defaults(
        run=lambda options: demo.run(options.logdir, options.epochs, options.seed)
    )


def _add_doctor(commands):
    command = commands.add_parser(
        "doctor",
        help="tell what is installed, and whether gradients are right here",
        description=(
            "Tells which Python, TensorFlow, Keras, TensorBoard and NumPy there are, "
            "which engine will log gradients and why, and what is known of these "
            "versions. Then trains each Keras for ten steps of plain SGD, and compares "
            "the logged gradients with (weights before - after) / learning rate."
        ),
        epilog=doctor.EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--json", action="store_true", help="print one JSON object for scripts"
    )
    command.set_defaults(run=lambda options: doctor.run(options.json))


def _add_run(commands):
    command = commands.add_parser(
        "run",
        usage="%(prog)s [options] SCRIPT [ARGS...]\n       "
        "%(prog)s [options] -m MODULE [ARGS...]",
        help="run an unedited training script with gradients in its TensorBoard log",
        description=(
            "Runs a Python script as `python SCRIPT ARGS...` does. In this process "
            "every Keras gives it the TensorBoard callback of this package, with "
            "write_grads=True, in place of its own. Options come before SCRIPT; what "
            "comes after it is the script's. Exit codes, tracebacks and Ctrl-C are the "
            "script's own; the code is 2 if it cannot be started."
        ),
        # What begins like one of our options is the script's.
        allow_abbrev=False,
    )
    command.add_argument(
        "-m",
        action="store_true",
        dest="is_module",
        help="SCRIPT is the name of a module, as for `python -m`",
    )
    group = command.add_argument_group(
        "gradients", "As the arguments of legacy_gradlog.TensorBoard."
    )
    group.add_argument(
        "--grads-freq",
        type=lambda text: int(text) if text.lstrip("-").isdigit() else text,
        metavar="FREQ",
        help="epoch, batch (every update), or N for the updates 0, N, 2N, ...",
    )
    group.add_argument(
        "--grads-layers",
        action="append",
        metavar="PATTERN",
        help="a name or shell pattern of layers or weights; may be given several times",
    )
    group.add_argument(
        "--grads-reduce",
        metavar="HOW",
        help="last: the last update of an epoch; pool: all of them in one histogram",
    )
    group.add_argument(
        "--grads-clipped",
        action="store_const",
        const=True,
        help="the gradient after the optimizer's clipping, not before it",
    )
    group.add_argument(
        "--grads-scalars",
        type=lambda text: [name for name in text.split(",") if name],
        metavar="NAMES",
        help="any of mean_abs,norm,max_abs; an empty text for none",
    )
    command.add_argument("script", nargs=argparse.PARSER, metavar="SCRIPT")
    command.set_defaults(run=_run_script)


def _run_script(options):
    names = "freq layers reduce clipped scalars".split()
    given = {"grads_" + name: getattr(options, "grads_" + name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    # A wrong one is told now, not by the script's traceback.
    TensorBoard(write_grads=True, **given)
    runner.replace_stock_callbacks(**given)
    return runner.load(options.script[0], options.script[1:], options.is_module)


def _add_audit(commands):
    command = commands.add_parser(
        "audit",
        help="tell whether gradient histograms are to be trusted",
        description=(
            "Reads the event files below a directory, whoever wrote them, and tells of "
            "each run what makes its histograms of gradients wrong or misleading: "
            "several records at a step, periodic spikes, steps that go back, values "
            "that are not finite, and slices of validation data that stock Keras "
            "logged as gradients."
        ),
        epilog=(
            "Exit code: 0 all runs are clean, 1 there are findings, 2 nothing could be "
            "read. A note explains what is real, and is no finding."
        ),
    )
    _add_log_dir(command)
    command.set_defaults(run=lambda options: audit.run(options.logdir, options.json))


def _add_show(commands):
    command = commands.add_parser(
        "show",
        help="show the gradients in a log directory, a row for each weight",
        description=(
            "Prints a row for each weight: the last, median and largest norm of its "
            "gradient, the share of exact zeros, how many values were NaN or infinite, "
            "and a line of the norm over the steps. What a file does not tell is shown "
            "as -: histograms of TensorFlow 2's own writer have no norm."
        ),
        epilog="Exit code: 0, or 2 where nothing could be read or drawn.",
    )
    _add_log_dir(command)
    command.add_argument(
        "--run",
        dest="pattern",
        metavar="PATTERN",
        help="runs to show, such as 'train' or '*/steps'",
    )
    command.add_argument(
        "--tag",
        metavar="PATTERN",
        help="tags or weights to show, such as 'dense_1/*' (default: all gradients)",
    )
    command.add_argument(
        "--steps",
        type=_steps,
        default=(None, None),
        metavar="A:B",
        help="first and last step to show; either may be left out",
    )
    command.add_argument(
        "--png",
        metavar="FILE",
        help="draw percentiles over the steps; needs legacy_gradlog[plot]",
    )
    command.set_defaults(
        run=lambda options: show.run(
            options.logdir,
            run=options.pattern,
            tag=options.tag,
            steps=options.steps,
            as_json=options.json,
            png=options.png,
        )
    )


def _add_log_dir(command):
    command.add_argument("logdir", metavar="LOGDIR", help="where the logs are")
    command.add_argument("--json", action="store_true", help="print JSON")


def _steps(text):
    """Returns the first and last step of ``A:B``, None where one is left out."""
    match = re.match(r"(-?\d+)?:(-?\d+)?$", text)
    steps = [part and int(part) for part in match.groups()] if match else [1, 0]
    if None not in steps and steps[0] > steps[1]:
        raise argparse.ArgumentTypeError(
            "must be two steps, the first not above the last: 100:200, 100: or :200. "
            "Received: {}.".format(text)
        )
    return tuple(steps)


@contextlib.contextmanager
def _noted_interrupts():
    """Yields a list that is no longer empty when Ctrl-C has been pressed.

    TensorFlow takes an interrupt for an error of what it was just converting.
    """
    seen = []

    def note(number, frame):
        seen.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        # Ignored, as in the background, or somebody else's.
        yield seen
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main(argv=None):
    """Runs one command.

    Args:
        argv: The arguments, None for those of the process.

    Returns:
        The exit code: what the command returns, 2 after an error, 130 after Ctrl-C,
        141 where stdout is a pipe that has been closed.
    """
    options = _parser().parse_args(argv)
    interrupted = False
    try:
        with _noted_interrupts() as interrupts:
            result = options.run(options)
    except GradlogError as error:
        sys.stderr.write(
            "{} {}: error: {}\n".format(_program(), options.command, error)
        )
        return FAILED
    except BrokenPipeError:
        # What is left in the buffer must not fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except (Exception, KeyboardInterrupt) as error:
        interrupted = interrupts or isinstance(error, KeyboardInterrupt)
        if not interrupted:
            raise
    if interrupted:
        # Whoever presses it again while threads are waited for wants no traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.stderr.write("\n{} {}: interrupted\n".format(_program(), options.command))
        return INTERRUPTED
    # What a script raises is nobody's error but its own.
    return result() if callable(result) else result


if __name__ == "__main__":
    sys.exit(main())
