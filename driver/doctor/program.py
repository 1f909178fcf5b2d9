"""What of a program runs where: `burst doctor -- COMMAND` runs it once, as `burst exec --report` does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from driver.dropin.environment import RUNTIMES, environment_of_program
from driver.dropin.report import TABLE
from driver.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def examine_program(command: Sequence[str]) -> list[Finding]:
    """Run a program to its end, or until Ctrl-C, and return what ran where, by model. Its output goes to standard
    error. Raise OSError for a command that cannot be run.
    """
    with TemporaryDirectory(prefix="burst-doctor-") as folder:
        report = Path(folder) / "report.json"
        report.write_text(json.dumps({"processes": []}))
        environment = environment_of_program(report=report) | {TABLE: "0"}
        with subprocess.Popen(command, env=environment, stdout=sys.stderr) as program:
            try:
                status = program.wait()
            except KeyboardInterrupt:  # the program has it, too
                status = program.wait()
        processes = json.loads(report.read_text())["processes"]
    return [*of_processes(processes), *of_end(status, is_silent=not processes)]


def of_processes(processes: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Yield what the processes of a report ran: each model, and each reason for what did not run in a device."""
    models: dict[tuple[str, str], Counter[str]] = {}
    reasons: Counter[tuple[str, str, str]] = Counter()
    for process in processes:
        for row in process["models"]:
            counts = models.setdefault((row["model"], row.get("device", "")), Counter())
            counts.update({name: value for name, value in row.items() if isinstance(value, int)}, processes=1)
        reasons.update({(row["model"], row["reason"], row["remedy"]): row["times"] for row in process["in_process"]})
    for (model, device), counts in sorted(models.items()):
        where = f"{counts['device_runs']} runs in the device {device}, " if device else ""
        found = f"{where}{counts['process_runs']} runs in the program; {counts['sessions']} sessions"
        many = f" of {counts['processes']} processes" if counts["processes"] > 1 else ""
        is_in = device and (counts["device_runs"] or not counts["process_runs"])
        yield Finding(model, "ok" if is_in else "note", found + many, "" if is_in else "no run of it is in a device")
    for (model, reason, remedy), times in sorted(reasons.items()):
        yield Finding(model, "note", f"in the program, {times} times: {reason}", remedy=remedy)


def of_end(status: int, *, is_silent: bool) -> Iterator[Finding]:
    """Yield what the end of a program says. `is_silent`: no process of it has reported anything."""
    if status:
        how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
        yield Finding("the program", "note", f"ended {how}", "what it would have done later is not known")
    if is_silent:
        yield Finding(
            "the program",
            "note",
            "no process of it has made a session and told of it",
            f"what is replaced is {' and '.join(RUNTIMES)}; a process that is killed or ends by os._exit tells nothing",
            remedy="give the command that runs a model, end it by Ctrl-C, and leave out python's -I, -E and -S",
        )
