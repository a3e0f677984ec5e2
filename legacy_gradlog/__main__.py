"""The command line: ``python -m legacy_gradlog <command>``.

Knows the commands, their options, and how an error is told: one line on stderr and exit
code 2. What a command does is its own module's business.
"""

import argparse
import sys

from . import demo
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


def main(argv=None):
    """Runs one command.

    Args:
        argv: The arguments, None for those of the process.

    Returns:
        The exit code: 0, or 2 after an error.
    """
    options = _parser().parse_args(argv)
    try:
        options.run(options)
    except GradlogError as error:
        sys.stderr.write("{} {}: error: {}\n".format(PROGRAM, options.command, error))
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
