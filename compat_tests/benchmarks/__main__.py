"""The command line of the benchmark."""

import argparse
import fnmatch
import json
import sys
import tempfile
import time

from .. import conftest
from . import cases, figures, quick, timing


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m compat_tests.benchmarks",
        description="What logging costs: the median ratio of epoch times, with its "
        "quartiles, to the same training without a callback.",
    )
    parser.add_argument("--pairs", type=int, default=15, help="of alternating runs")
    parser.add_argument("--keras", help="its name, where there are several")
    parser.add_argument(
        "--only", default="*", help='a pattern of cases, such as "mlp/every*"'
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="processor time instead of time: it varies less beside other work",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few cases, and what can be counted; fails on a regression",
    )
    parser.add_argument(
        "--figures",
        action="store_true",
        help="bytes, memory, growth and the sketch alone, in place of the cases",
    )
    parser.add_argument(
        "--mirrored",
        action="store_true",
        help="the cases of two replicas of `MirroredStrategy`, on two logical devices",
    )
    parser.add_argument("--peak", metavar="LOG_DIR", help=argparse.SUPPRESS)
    parser.add_argument("--json", help="a file for all figures")
    options = parser.parse_args(arguments)

    if options.cpu:
        timing.Run.clock = staticmethod(time.process_time)
    fw = conftest.available(options.keras)[0]
    if options.peak is not None:
        print(figures.peak_memory_here(fw, options.peak))
        return
    print("TensorFlow {}, {} {}".format(fw.tf.__version__, fw.name, fw.version))
    if options.quick:
        sys.exit(run_quick(fw))
    if options.figures:
        for what, measure in figures.FIGURES:
            print(what)
            for name, text in measure(fw, options.pairs):
                print("    {:20} {}".format(name, text))
                sys.stdout.flush()
        return
    strategy = two_replicas(fw.tf) if options.mirrored else None
    found = [
        case
        for case in cases.cases_of(fw, strategy)
        if fnmatch.fnmatch("{}/{}".format(case.workload, case.what), options.only)
    ]
    results = list(run(fw, found, options.pairs))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


def two_replicas(tf):
    """Returns a strategy over two logical devices. Before anything has run."""
    config = tf.config.experimental
    (cpu,) = config.list_physical_devices("CPU")
    config.set_virtual_device_configuration(
        cpu, [config.VirtualDeviceConfiguration()] * 2
    )
    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])


def run_quick(fw):
    """Counts and times; returns the exit code."""
    failed = 0
    with tempfile.TemporaryDirectory() as log_dir:
        for what, counted, allowed in quick.counts(fw, log_dir):
            failed |= counted > allowed
            print("{}: {}, allowed: {}".format(what, counted, allowed))
    found, bounds = zip(*quick.bounds(fw))
    for result, bound in zip(run(fw, found, pairs=3), bounds):
        failed |= result["ratio"] > bound
        print("allowed: {}".format(bound))
    return int(failed)


def run(fw, found, pairs):
    """Measures cases; prints and yields their figures."""
    print(ROW.format("", "", "ratio", "quartiles", "target", "epoch s", "set-up s", ""))
    for case in found:
        fw.keras.backend.clear_session()
        result = measured(case, pairs)
        print(row_of(result))
        sys.stdout.flush()
        yield result


ROW = "{:10} {:40} {:>6} {:>13} {:>6} {:>8} {:>8} {:>8}"


def measured(case, pairs):
    """Returns the figures of one case as a dictionary."""
    with tempfile.TemporaryDirectory() as log_dir:
        run, other = case.runs(log_dir)
        ratio = timing.ratio_of(run, other, pairs)
    scale = 1.0
    if case.whole is not None:
        data, steps = case.whole()
        scale = ratio.seconds / (other.of(data).seconds() * cases.HUNDRED / steps)
    low, median, high = (
        1 + scale * (value - 1) for value in (ratio.low, ratio.median, ratio.high)
    )
    return dict(
        workload=case.workload,
        what=case.what,
        target=case.target,
        ratio=median,
        quartiles=[low, high],
        scale=scale,
        pairs=ratio.pairs,
        epoch_seconds=ratio.seconds,
        set_up_seconds=run.first_fit - ratio.seconds * ratio.median,
        next_fit_seconds=run.next_fit - other.next_fit,
    )


def row_of(result):
    return ROW.format(
        result["workload"],
        result["what"],
        "{:.3f}".format(result["ratio"]),
        "{:.3f}-{:.3f}".format(*result["quartiles"]),
        result["target"] or "",
        "{:.3f}".format(result["epoch_seconds"]),
        "{:.2f}".format(result["set_up_seconds"]),
        "{:.2f}".format(result["next_fit_seconds"]),
    )


if __name__ == "__main__":
    main()
