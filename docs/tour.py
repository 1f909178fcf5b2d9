"""Records the tour: runs its commands in a terminal of its own and writes docs/tour.cast, which `asciinema play` shows,
and what it shows as text into docs/tour.md.

    python docs/tour.py

The commands and what they print are real. Keys are typed at an even pace, and no pause is longer than two seconds.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import sys
import tempfile
import time
from pathlib import Path

DOCS = Path(__file__).parent
WIDTH, HEIGHT = 100, 30
KEY, PAUSE, LONGEST = 0.035, 1.5, 2.0  # seconds: for a key, after a command, without output
SURVIVE = """\
import os, signal, time
import driver
from driver.demos import EDGES

with driver.compile(EDGES, devices=["onnxruntime"]) as compiled, compiled.burst(recover=True) as burst:
    for frame in range(300):
        if frame == 150:
            os.kill(driver.connect("onnxruntime").engine_pid, signal.SIGKILL)
        began = time.perf_counter()
        burst.run(timeout=10)
        if frame in (10, 150, 290):
            print(f"frame {frame}: {1000 * (time.perf_counter() - began):.1f} ms")
    print(burst.stats()["recoveries"], "recovery, no frame lost")
"""
COMMANDS = (
    "# A machine that can run it?",
    "burst doctor | tail -1",
    "# A model that comes with Burst: what does it need, and what does it compute?",
    'cp "$(python -c "import driver.demos; print(driver.demos.EDGES)")" edges.onnx',
    "burst check edges.onnx",
    "burst run edges.onnx",
    "# It ran in another process. What if that is killed, in the middle of a stream?",
    "cat survive.py",
    "python survive.py",
    "# The queue below it works alone, too.",
    """python -c 'import fmq; fmq.MessageQueue.create("f8", 16, name="/tour")'""",
    "python -m fmq send /tour 0.5 0.25",
    "python -m fmq tail /tour",
    "python -m fmq list",
    "python -m fmq unlink /tour",
    "# More: burst --help",
)
MARKS = re.compile(r"(?s)(?<=<!-- tour -->\n).*?(?=<!-- end -->)")


class Recording:
    """The output of a terminal, with times."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str, str]] = []
        self.now = 0.0

    def show(self, text: str, after: float) -> None:
        """Add what is shown `after` seconds."""
        self.now += min(after, LONGEST)
        self.events.append((round(self.now, 3), "o", text))

    def type(self, words: str) -> None:
        """Add a prompt, and keys."""
        self.show("$ ", PAUSE)
        for key in words:
            self.show(key, KEY)
        self.show("\r\n", 5 * KEY)


def run(words: str, folder: Path, recording: Recording) -> None:
    """Run a command in a terminal, and record what it prints."""
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(folder)
        size = {"COLUMNS": str(WIDTH), "LINES": str(HEIGHT), "TERM": "dumb", "BURST_RUNTIME_DIR": str(folder / "run")}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        os.execve("/bin/sh", ["sh", "-c", words], os.environ | size | {"PATH": path})  # noqa: S606 (a shell it is)
    last = time.monotonic()
    while select.select([terminal], [], [], 120)[0]:
        try:
            text = os.read(terminal, 65536)
        except OSError:  # it has ended
            break
        now = time.monotonic()
        recording.show(text.decode(errors="replace"), now - last)
        last = now
    os.waitpid(pid, 0)
    os.close(terminal)


def main() -> None:
    """Record, and write both files."""
    recording = Recording()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "run").mkdir(0o700)
        (folder / "survive.py").write_text(SURVIVE)
        for words in COMMANDS:
            recording.type(words)
            if not words.startswith("#"):
                run(words, folder, recording)
    head = {"version": 2, "width": WIDTH, "height": HEIGHT, "title": "Burst in two minutes"}
    lines = [json.dumps(each, ensure_ascii=False) for each in (head, *recording.events)]
    (DOCS / "tour.cast").write_text("\n".join(lines) + "\n")
    page = DOCS / "tour.md"
    text = shown("".join(text for _, _, text in recording.events))
    page.write_text(MARKS.sub(lambda _: f"\n```text\n{text}\n```\n\n", page.read_text()))


def shown(output: str) -> str:
    """Return what stays on the terminal, as lines."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output).replace("\r\n", "\n")
    return "\n".join(line.rpartition("\r")[2].rstrip() for line in plain.split("\n")).strip()


if __name__ == "__main__":
    main()
