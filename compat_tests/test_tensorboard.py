"""The newest TensorBoard: what its pages show, and what it reads while it is written.

On the newest line only, which has `selenium`. The browser and its driver are Debian's
``chromium`` and ``chromium-driver``: where they are missing, the pages are not looked
at, unless ``GRADLOG_BROWSER=required`` says that this is a failure. Screenshots go into
the directory that ``GRADLOG_ARTIFACTS`` names, else into pytest's own.

The last test needs a log of every line of the matrix, which no line can write alone::

    for line in ...: .tox/LINE/bin/python -m compat_tests.write_log LOGS/LINE
    python -m pytest compat_tests/test_tensorboard.py --lines LOGS
"""

import configparser
import contextlib
import os
import shutil
import urllib.parse
from pathlib import Path

import pytest
from selenium import webdriver

from . import write_log
from .frameworks import files_below, start_script
from .tensorboards import Server, eventually
from .test_demo import WEIGHTS, run_demo

ROOT = Path(__file__).resolve().parent.parent
#: With the data server, which is the default where there is one, and without.
LOADERS = {"fast": [], "classic": ["--load_fast=false"]}

GRADIENT_TAGS = {weight + "_0_grad" for weight in WEIGHTS}
NORM_TAGS = {"grad_norm/" + weight for weight in WEIGHTS}
#: The updates that the demo's two epochs log: 0, 10, ..., 80.
RECORDS = 9
#: Dashboard -> the tags to look for, a pattern of them, the element that is one chart,
#: what it draws, and how often: a curve a record; the bands between nine percentiles; a
#: line and its smoothed one.
DASHBOARDS = {
    "histograms": (
        (GRADIENT_TAGS, "_grad$", "tf-histogram-loader"),
        (".histogram path.outline", RECORDS),
    ),
    "distributions": (
        (GRADIENT_TAGS, "_grad$", "tf-distribution-loader"),
        ("path.area", 8),
    ),
    "scalars": ((NORM_TAGS, "^grad_norm/", "tf-scalar-card"), ("path.line", 2)),
}

# Pages are made of elements that hide their content in shadow roots.
_LOOK = """
const within = (root, found) => {
  for (const element of root.querySelectorAll("*")) {
    found.push(element);
    if (element.shadowRoot) within(element.shadowRoot, found);
  }
  return found;
};
const isSeen = element => {
  const {width, height} = element.getBoundingClientRect();
  return width > 0 && height > 0;
};
const textOf = element => [...element.childNodes]
  .filter(node => node.nodeType == Node.TEXT_NODE)
  .map(node => node.data.trim()).join("");
const [card, mark] = arguments;
const elements = within(document, []);
return {
  banners: elements.filter(
    element => /snack-?bar-container|^paper-toast$/.test(element.localName)
  ).map(element => element.textContent.trim()),
  cards: elements.filter(
    element => element.localName == card && isSeen(element)
  ).map(element => {
    const parts = within(element.shadowRoot || element, []);
    return {
      texts: parts.filter(isSeen).map(textOf).filter(text => text),
      marks: parts.filter(
        part => part.matches(mark) && /L.*L/.test(part.getAttribute("d"))
          && isSeen(part)
      ).length,
    };
  }),
};
"""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """The directory for what somebody may want to look at afterwards."""
    named = os.environ.get("GRADLOG_ARTIFACTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("artifacts")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def browser():
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs and os.environ.get("GRADLOG_BROWSER") != "required":
        pytest.skip("needs Debian's chromium and chromium-driver")
    assert None not in programs, "chromium or chromedriver is missing"
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for name in (
        "--headless=new",
        "--window-size=1600,1400",
        "--no-proxy-server",
        # As root, and where /dev/shm is small, as both are in a container.
        "--no-sandbox",
        "--disable-dev-shm-usage",
    ):
        options.add_argument(name)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Given both paths, selenium looks for nothing on the network.
    service = webdriver.ChromeService(programs[1])
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def demo_served(tmp_path_factory):
    """A TensorBoard on what the demo wrote, as the demo says to start it."""
    home = tmp_path_factory.mktemp("demo")
    code, _, err = run_demo(home, "demo", "--epochs", "2", "--logdir", "logs")
    assert code == 0, err
    with Server(home / "logs" / "run-1", home / "messages") as server:
        yield server


def marks_of(cards, tags):
    """Returns tag -> how many marks are drawn in each of its cards."""
    return {
        tag: {card["marks"] for card in cards if tag in card["texts"]} for tag in tags
    }


@pytest.mark.parametrize("name", list(DASHBOARDS))
def test_pages_show_the_named_weights(browser, demo_served, artifacts, name):
    (tags, pattern, card), (mark, number) = DASHBOARDS[name]
    place = {"tagFilter": pattern, "regexInput": "^steps$"}
    # Only the part after # changes from page to page, which alone loads nothing anew.
    browser.get("about:blank")
    browser.get(
        "{}#{}&{}".format(
            demo_served.url,
            name,
            urllib.parse.urlencode(place, quote_via=urllib.parse.quote),
        )
    )
    expected = {tag: {number} for tag in tags}
    page = eventually(
        lambda: browser.execute_script(_LOOK, card, mark),
        lambda page: marks_of(page["cards"], tags) == expected,
    )
    browser.save_screenshot(str(artifacts / (name + ".png")))
    assert marks_of(page["cards"], tags) == expected
    assert page["banners"] == []
    told = browser.get_log("browser")
    assert [entry for entry in told if entry["level"] == "SEVERE"] == []


EPOCHS = 3
TRAINING = """
import os, sys, time
from compat_tests import conftest, frameworks
from legacy_gradlog import TensorBoard

(fw,) = conftest.available()


class Wait(fw.keras.callbacks.Callback):
    "Goes on with the next epoch when a file of its number comes."

    def on_epoch_end(self, epoch, logs=None):
        while not os.path.exists(str(epoch + 1)):
            time.sleep(0.1)


trained = fw.small_model()
callback = TensorBoard("logs", histogram_freq=1, write_grads=True)
fw.fit(
    trained.model,
    *frameworks.small_data(),
    epochs=int(sys.argv[2]),
    callbacks=[callback, Wait()]
)
"""
GROWING = [
    ("scalars", "epoch_loss"),
    ("scalars", "grad_norm/d1/kernel"),
    ("histograms", "d1/kernel_0_grad"),
]


def test_loss_and_gradients_of_one_run_both_go_on(tmp_path):
    """While the model still trains: two files in one run would freeze the first."""
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(start_script(TRAINING, tmp_path, str(EPOCHS)))
        stack.callback(child.kill)
        servers = {
            loader: stack.enter_context(
                Server(tmp_path / "logs", tmp_path / loader, *options)
            )
            for loader, options in LOADERS.items()
        }

        def read():
            return {
                (loader, tag): sorted(server.records(plugin, "train", tag))
                for loader, server in servers.items()
                for plugin, tag in GROWING
            }

        for epoch in range(EPOCHS):
            steps = list(range(epoch + 1))
            expected = {
                (loader, tag): steps for loader in LOADERS for _, tag in GROWING
            }
            assert eventually(read, expected.__eq__) == expected
            (tmp_path / str(epoch + 1)).touch()
        assert child.wait() == 0
    assert [len(paths) for paths in files_below(tmp_path / "logs").values()] == [1]


def lines_of_the_matrix():
    config = configparser.ConfigParser()
    config.read(str(ROOT / "tox.ini"))
    return set(config["tox"]["env_list"].split())


def counts_of(buckets, values):
    """Returns value -> count of the buckets that can hold nothing far from it.

    Values that are not found, and other counts, are under None.
    """
    found = dict.fromkeys(values, 0)
    found[None] = 0
    for left, right, count in buckets:
        held = [
            value
            for value in values
            if left <= value <= right and right - left <= abs(value) / 8 + 1e-17
        ]
        found[held[0] if held else None] += count
    return found


@pytest.fixture(params=list(LOADERS))
def lines_server(request, tmp_path):
    log_dir = request.config.getoption("--lines")
    if log_dir is None:
        pytest.skip("needs --lines, the logs of all lines of the matrix")
    with Server(log_dir, tmp_path / "messages", *LOADERS[request.param]) as server:
        yield server


def test_logs_of_every_line_are_read(lines_server):
    """Of every Keras there: the loss and the gradient, in the same run."""
    tag = "d/kernel_0_grad"

    def read_run(run, scalars):
        losses = {
            loss: lines_server.records("scalars", run, loss)
            for loss in scalars & {"loss", "epoch_loss"}
        }
        found = lines_server.records("histograms", run, tag)
        values = write_log.GRADIENTS
        gradients = {step: counts_of(found[step], values[step]) for step in found}
        return list(losses.values()), gradients

    def read():
        scalars = lines_server.tags("scalars")
        histograms = lines_server.tags("histograms")
        return {
            run: read_run(run, scalars.get(run, set()))
            for run in histograms
            if tag in histograms[run]
        }

    def lines_in(logs):
        return {run.split("/")[0] for run in logs}

    gradients = {
        step: {**values, None: 0} for step, values in write_log.GRADIENTS.items()
    }
    expected = [write_log.LOSSES], gradients
    lines = lines_of_the_matrix()
    logs = eventually(
        read,
        lambda logs: lines_in(logs) == lines and logs == dict.fromkeys(logs, expected),
    )
    assert lines_in(logs) == lines
    assert logs == dict.fromkeys(logs, expected)
