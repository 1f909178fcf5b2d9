"""Checks the running devices of this account: what they have inherited from the client that started them."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from burst import BurstError
from driver.client import served_sockets
from driver.client.cells import cells_of
from driver.client.connection import Connection
from driver.client.discovery import Place, files_there, find
from driver.client.hardening import confinement
from driver.client.launch import ENOUGH
from driver.client.moving import await_change
from driver.engine.limits import or_raise
from driver.errors import DriverError
from driver.finding import Finding, size
from driver.monitor import accounts_of
from driver.service import engine_group

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.monitor import AccountFigures

_NEARLY = 0.8  # of a limit
SERVED = Path("/run/burst")
"""Where `burst serve` puts its sockets by default."""

_WITHIN = 2.0  # seconds for an answer
_SHARE = "its clients are held to that; such a device is started for programs with the same limits alone"
_END = "the first client's: when that ends (as a systemd service that stops) or has no memory left, the device ends"


def devices() -> Iterator[Finding]:
    """Return limits, priority and control group of each device that runs."""
    for path in files_there("*.sock"):
        try:
            channel = find(Place(path.parent, path.stem))
            if channel is None:
                continue
            with channel:
                connection = Connection(channel, timeout=_WITHIN)
                pid = connection.engine_pid
                yield _kept(path.stem, pid)
                yield _group(path.stem, pid)
                yield _confined(path.stem, connection)
                yield _held(path.stem, list(accounts_of(connection.call)))
                yield from _renewed(path.stem, connection)
        except (BurstError, DriverError) as error:
            yield Finding(
                f"{path.stem}, running", "warning", f"does not answer: {error}", "it may hang", remedy="kill it"
            )
    yield from _served()


def _served() -> Iterator[Finding]:
    """Report what each served device of this machine has given up, and what it holds: of the engines that we see."""
    for path in sorted([*SERVED.glob("*.sock"), *SERVED.glob("*/*.sock")]):
        with (
            suppress(BurstError, DriverError, FileNotFoundError),  # it may not be for this account, or end meanwhile
            served_sockets.connect(str(path)) as channel,
            cells_of(Connection(channel, timeout=_WITHIN), _WITHIN) as cells,
        ):
            yield _apart(str(path), [connection.engine_pid for _, connection in cells.connected])
            for uid, connection in cells.connected:
                name = str(path) if uid is None else f"{path}, uid {uid}"
                yield _confined(name, connection)
                yield _held(name, list(accounts_of(connection.call)))
                yield _bounded(name, connection.engine_pid)
                yield from _renewed(name, connection)


def _bounded(name: str, pid: int) -> Finding:
    """Return whether the kernel holds an engine to its memory, in a control group of its own."""
    subject, most = f"{name}, memory of its engine", engine_group.most_of(pid)
    if most is not None:
        return Finding(subject, "ok", f"its control group may have {size(most)}")
    why = "the service looks at it after every 20 ms of processor time, and the kernel does not stop it meanwhile"
    remedy = "the unit of `burst serve --unit` (Delegate=memory), with control groups of version 2"
    return Finding(subject, "note", "its control group is not its own", why, remedy=remedy)


def _apart(name: str, engines: list[int]) -> Finding:
    """Return under which uids the engines of a device's accounts run."""
    subject, uids = f"{name}, engines", sorted({Path(f"/proc/{pid}").stat().st_uid for pid in engines})
    found = f"{len(engines)}, under uid {', '.join(map(str, uids))}"
    if len(uids) == len(engines):
        return Finding(subject, "ok", found)
    why = "their sandboxes keep them apart, but they share the kernel's counts of a uid: processes, pipes, signals"
    remedy = "`burst serve --uids`, which `burst serve --unit --uids FIRST-LAST` prints a systemd unit for"
    return Finding(subject, "note", found, why, remedy=remedy)


def _kept(name: str, pid: int) -> Finding:
    found = []
    for number, (limit, enough) in ENOUGH.items():
        soft = resource.prlimit(pid, number)[0]
        if soft != resource.RLIM_INFINITY and not 0 <= enough <= soft:
            found.append(f"{limit} {soft}")
    if nice := os.getpriority(os.PRIO_PROCESS, pid):
        found.append(f"nice {nice}")
    if (scheduler := os.sched_getscheduler(pid)) != os.SCHED_OTHER:
        found.append(f"scheduling class {scheduler}")
    if adjusted := int(Path(f"/proc/{pid}/oom_score_adj").read_text()):
        found.append(f"oom_score_adj {adjusted}")
    subject = f"{name}, process {pid}"
    if not found:
        return Finding(subject, "ok", "no limits, nice 0, oom_score_adj 0")
    remedy = "end it, and start it from a program without these; or use `burst serve`"
    return Finding(subject, "note", f"has inherited {', '.join(found)}", _SHARE, remedy=remedy)


def _group(name: str, pid: int) -> Finding:
    own, its = (Path(f"/proc/{of}/cgroup").read_text().splitlines() for of in ("self", pid))
    subject, group = f"{name}, control group", its[-1].split(":", 2)[2]
    if own == its:
        return Finding(subject, "ok", f"{group}, as this process")
    remedy = "start it by `systemd-run --user`, or serve it by `burst serve`, if it must outlive that"
    return Finding(subject, "note", group, _END, remedy=remedy)


def _held(name: str, found: list[AccountFigures]) -> Finding:
    """Return the account or application that is nearest to a limit."""
    rows = [(holding.held / holding.most, row, figure) for row in found for figure, holding in row.holdings.items()]
    share, row, figure = max(rows, key=lambda each: each[0])
    subject, held = f"{name}, what accounts hold", row.holdings[figure]
    whose = f"uid {row.uid}" if row.application is None else f"uid {row.uid}, {row.application or 'no application'}"
    text = f"at most {share:.0%} of a limit: {whose} has {held.held} of {held.most} {figure.replace('_', ' ')}"
    if share < _NEARLY:
        return Finding(subject, "ok", text)
    remedy = f"`burst top --accounts`; close what is not needed{or_raise(f'account_{figure}')}"
    return Finding(subject, "note", text, "what exceeds the limit is refused", remedy=remedy)


def _renewed(name: str, connection: Connection) -> Iterator[Finding]:
    """Report how the last renewal stands, if there was one."""
    state = await_change(connection, 0.0)
    if state.is_going_on:
        yield Finding(f"{name}, renewal", "note", f"clients go over to another engine: {state.words}")
    if state.stage == "stayed":
        why = "its engine goes on with what it has, and with the code that it began with"
        yield Finding(
            f"{name}, renewal", "warning", state.words, why, remedy=f"correct that, then `burst renew {name}`"
        )


def _confined(name: str, connection: Connection) -> Finding:
    processes, subject = confinement(connection.call("sandbox", timeout=_WITHIN)[0]), f"{name}, sandbox"
    layers = {layer: all(found[layer] for found in processes.values()) for layer in processes["engine"]}
    words = ", ".join(f"{layer.replace('_', ' ')} {'active' if on else 'not active'}" for layer, on in layers.items())
    if all(layers.values()):
        return Finding(subject, "ok", words)
    why = "code that takes a device over can do what that layer would refuse"
    remedy = "Linux 6.12 with Landlock (lsm=landlock,…) and seccomp filters, on x86-64 or aarch64; the device's log"
    return Finding(subject, "note", words, why, remedy=remedy)
