"""The command line: ``python -m legacy_gradlog <command>``.

Knows the commands, their options, and how an error is told: one line on stderr and exit
code 2. What a command does is its own module's business.
"""

import argparse
import re
import sys

from . import audit, demo, show
from .errors import GradlogError

PROGRAM = "python -m legacy_gradlog"
FAILED = 2


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


def _parser():
    parser = _Parser(prog=PROGRAM, description="Per-weight gradients in TensorBoard.")
    commands = parser.add_subparsers(dest="command", metavar="command")
    # Python 3.6 has no argument for this.
    commands.required = True
    _add_demo(commands)
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
            "as -."
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


def main(argv=None):
    """Runs one command.

    Args:
        argv: The arguments, None for those of the process.

    Returns:
        The exit code: that of the command, or 2 after an error.
    """
    options = _parser().parse_args(argv)
    try:
        code = options.run(options)
    except GradlogError as error:
        sys.stderr.write("{} {}: error: {}\n".format(PROGRAM, options.command, error))
        return FAILED
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
