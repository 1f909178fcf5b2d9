"""How long does a newcomer wait: for the installation, for a picture, for the first result of a model?

    python bench/newcomer.py [--wheel FILE] [--json FILE]

Copies the lines of docs/install.md, "From a wheel", into a shell, in a temporary folder with an empty environment and
an empty home: nothing is cached, and a C compiler is out of reach. The picture is seen in a Chromium that runs already;
the model is MobileNetV1 as an .onnx file. What pip needs comes from the package index that this machine uses.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import browser
from gpu_models import mobilenet
from measure import Budget, NotMeasured, Runs, progress
from question import Question, interval

from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from driver.cli.timing import Estimate

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/install.md"
INSTALL, ADDRESS, PICTURE, RESULT = "installed", "address of the page", "picture in the browser", "result of a model"
LIMITS = {INSTALL: 20.0, PICTURE: 10.0, RESULT: 5.0}
TIMEOUT = 120.0
# The canvas shows something: it differs from one that nothing was drawn on.
DRAWN = """() => {
    const shown = document.querySelector('#picture'), blank = document.createElement('canvas');
    [blank.width, blank.height] = [shown.width, shown.height];
    return shown.toDataURL() !== blank.toDataURL();
}"""


def lines() -> list[str]:
    """What the page tells a newcomer to copy: make an environment, enter it, install, see the demo, run a model."""
    section = PAGE.read_text().partition("## From a wheel")[2]
    found = re.search(r"^```sh\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    copied = found[1].splitlines() if found else []
    if len(copied) != 5:
        sys.exit(f"bench: {PAGE}: 'From a wheel' has {len(copied)} lines to copy, and five are timed here")
    return copied


def build(folder: Path) -> Path:
    """A wheel of this checkout."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (wheel,) = folder.glob("*.whl")
    return wheel


class Newcomer:
    """Someone with a wheel, a model file and a shell in a folder."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        (folder / "dist").mkdir()
        shutil.copy(wheel, folder / "dist")
        mobilenet(folder / "model.onnx")
        self.environment, self.enter, self.install, self.demo, self.model = lines()
        paths = f"{Path(sys._base_executable).parent}:/usr/bin:/bin"  # type: ignore[attr-defined]
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        empty = {"PATH": paths, "HOME": str(folder), "BURST_RUNTIME_DIR": str(folder / "run"), "CC": "false"}
        self._variables = {**pip, **empty, "PYTHONUNBUFFERED": "1"}

    def type(self, line: str, **how: Any) -> subprocess.Popen[str]:
        """Begins a line in the folder, in the environment if there is one."""
        enter = f"{self.enter} && " if (self.folder / "venv").exists() else ""
        whole = ["bash", "-c", f"{enter}exec {line}"]
        return subprocess.Popen(whole, cwd=self.folder, env=self._variables, text=True, **how)

    def wait_for(self, line: str) -> float:
        """Seconds until a line has ended. Ends the script when it fails."""
        begin = time.monotonic()
        with self.type(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            said = end_of(process)
        if process.returncode:
            sys.exit(f"{said}\nbench: {line!r} failed in {self.folder}")
        return time.monotonic() - begin

    def look(self, chromium: Any) -> tuple[float, float | None]:
        """Seconds until the demo has printed its address, and until that page shows a picture."""
        begin = time.monotonic()
        with self.type(self.demo, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                address = process.stdout.readline().split()[-1]
                printed, seen = time.monotonic() - begin, None
                if chromium is not None:
                    page = chromium.new_page()
                    page.goto(address)
                    page.wait_for_function(DRAWN, timeout=TIMEOUT * 1e3)
                    seen = time.monotonic() - begin
                    page.close()
            finally:
                process.send_signal(signal.SIGINT)
                end_of(process)
        return printed, seen


def end_of(process: subprocess.Popen[str]) -> str:
    """What it prints until its end, which comes after TIMEOUT at the latest."""
    try:
        return process.communicate(timeout=TIMEOUT)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise


@contextmanager
def running_chromium() -> Iterator[Any]:
    """A browser that is started. Raises NotMeasured."""
    path = browser.program()
    if path is None:
        raise NotMeasured(browser.REMEDY)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise NotMeasured("no playwright: pip install playwright") from error
    with sync_playwright() as leading:
        started = leading.chromium.launch(executable_path=path, args=browser.FLAGS)
        yield started
        started.close()


def ten_minutes(wheel: Path, chromium: Any) -> dict[str, float | None]:
    """Seconds of each wait, once."""
    with tempfile.TemporaryDirectory(prefix="burst-newcomer-") as name:
        newcomer = Newcomer(Path(name), wheel)
        newcomer.wait_for(newcomer.environment)
        installed = newcomer.wait_for(newcomer.install)
        printed, seen = newcomer.look(chromium)
        return {INSTALL: installed, ADDRESS: printed, PICTURE: seen, RESULT: newcomer.wait_for(newcomer.model)}


def waited(args: argparse.Namespace) -> Runs:
    """All rounds."""
    runs, why = Runs(), ""
    with ExitStack() as stack:
        wheel = args.wheel or build(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        try:
            chromium = stack.enter_context(running_chromium())
        except NotMeasured as error:
            chromium, why = None, str(error)
        for number in range(args.pairs):
            progress(f"round {number + 1} of {args.pairs}")
            for name, seconds in ten_minutes(wheel, chromium).items():
                if seconds is None:
                    runs.drop(name, why)
                else:
                    runs.add(name, {"s": seconds})
    return runs


def seconds(runs: Runs, name: str) -> Estimate | None:
    """Of a wait, where it was measured."""
    return estimate(runs.values(name, "s")) if runs.has(name) else None


NEWCOMER = Question(
    __doc__,
    waited,
    {"s": interval("s")},
    options={"--wheel": {"type": Path, "metavar": "FILE", "help": "default: one of this checkout, built first"}},
    budgets=lambda runs, _: [
        Budget(f"{name} <= {limit:.0f} s", seconds(runs, name), limit, "s") for name, limit in LIMITS.items()
    ],
    estimates={"seconds": seconds},
    figures=("s",),
    group=lambda _: "until there is",
    bars=("s", "s"),
    pairs=3,
    is_pinned=False,
)

if __name__ == "__main__":
    NEWCOMER.answer()
