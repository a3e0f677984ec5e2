"""A TensorBoard process on a log directory, and what it serves over HTTP.

Knows nothing of how the logs were written, and shares no code with the package.
"""

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

__all__ = ["Server", "eventually"]

#: Seconds after which something that should have happened is taken not to happen.
PATIENCE = 120

# A proxy is none of the loopback interface's business.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """A `tensorboard` that looks at a directory every second, until a `with` ends.

    Args:
        log_dir: The directory that it reads.
        messages: The file that takes what it prints.
        *options: More options of its command line.
    """

    def __init__(self, log_dir, messages, *options):
        self._command = [sys.executable, "-m", "tensorboard.main"]
        self._command += ["--logdir", str(log_dir), "--reload_interval", "1"]
        self._command += ["--host", "127.0.0.1", "--port", "0"] + list(options)
        self._messages = messages
        self._process = None

    def __enter__(self):
        # A file, since nobody would empty a pipe.
        with open(str(self._messages), "wb") as file:
            self._process = subprocess.Popen(
                self._command, stdout=file, stderr=subprocess.STDOUT
            )
        return self

    def __exit__(self, *exception):
        self._process.terminate()
        self._process.wait()

    @property
    def url(self):
        """Where its pages are, with a slash at the end; waits until it tells that."""
        match = eventually(
            lambda: re.search(r"http://127\.0\.0\.1:\d+/", self._messages.read_text()),
            lambda match: match or self._process.poll() is not None,
        )
        assert match, self._messages.read_text()
        return match.group()

    def get(self, path, **query):
        """Returns the parsed answer to a request; None where there is no such thing."""
        url = "{}data/{}?{}".format(self.url, path, urllib.parse.urlencode(query))
        try:
            with _OPENER.open(url, timeout=PATIENCE) as answer:
                return json.loads(answer.read().decode())
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None

    def tags(self, plugin):
        """Returns run -> set of the tags that a plugin shows of it."""
        return {
            run: set(tags)
            for run, tags in self.get("plugin/{}/tags".format(plugin)).items()
        }

    def records(self, plugin, run, tag):
        """Returns step -> value of one tag: a number, or buckets.

        A bucket is ``[left edge, right edge, count]``. Several records of a step are
        an error.
        """
        path = "plugin/{0}/{0}".format(plugin)
        records = self.get(path, run=run, tag=tag) or []
        found = {step: value for _, step, value in records}
        assert len(found) == len(records), records
        return found


def eventually(read, is_done, patience=PATIENCE):
    """Reads again and again until ``is_done`` of it, or until patience ends.

    Returns:
        What was read last, for the caller to look at.
    """
    end = time.time() + patience
    while True:
        value = read()
        if is_done(value) or time.time() > end:
            return value
        time.sleep(0.1)
