"""Processes that train one model together, on this machine, for a bounded time.

Shares no code with the package.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: An import of TensorFlow takes seconds, and AutoGraph reads all of `tf_keras`.
SECONDS = 400


def free_addresses(count):
    """Returns addresses of this machine that nobody listened at a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return ["127.0.0.1:{}".format(item.getsockname()[1]) for item in sockets]


def run_workers(script, log_dir, *arguments):
    """Runs one script in two processes that ``TF_CONFIG`` makes workers of one job.

    A script gets its number, ``log_dir``, its working directory, and ``arguments``.

    Returns:
        The exit status and the output of each; the status of one that had to be killed
        is negative.
    """
    workers = free_addresses(2)
    children = []
    for index in range(2):
        config = {
            "cluster": {"worker": workers},
            "task": {"type": "worker", "index": index},
        }
        path = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
        environment = dict(os.environ, PYTHONPATH=path, TF_CONFIG=json.dumps(config))
        command = [sys.executable, "-c", textwrap.dedent(script), str(index)]
        children.append(
            subprocess.Popen(
                command + [str(log_dir)] + list(arguments),
                cwd=str(log_dir),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    outputs = []
    try:
        for child in children:
            outputs.append(child.communicate(timeout=SECONDS)[0].decode())
    except subprocess.TimeoutExpired:
        for child in children:
            child.kill()
        outputs = [child.communicate()[0].decode() for child in children]
        raise AssertionError("The workers wait for each other:\n" + "\n".join(outputs))
    finally:
        for child in children:
            child.kill()
            child.wait()
    return [(child.returncode, text) for child, text in zip(children, outputs)]
