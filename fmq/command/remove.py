"""`unlink`: removes names; of queues in use only with --force."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from fmq.command.show import meant
from fmq.errors import InvalidDescriptor, RoleTaken
from fmq.inspection import QueueInfo, inspect, queues
from fmq.region import Region, unlink
from fmq.role import READER, SEAT, SEATS, WRITER, LockFile

if TYPE_CHECKING:
    import argparse


def run(options: argparse.Namespace) -> int:
    """Remove all that it may. The status is 1 if one was refused."""
    if bool(options.name) == options.stale:
        print("fmq unlink: give names, or --stale, and not both; see python -m fmq unlink --help", file=sys.stderr)
        return 2
    names = [info.name for info in queues() if info.is_stale and not info.damage] if options.stale else options.name
    refused = [name for name in names if not _remove(name, options)]
    if not names:
        print("fmq unlink: nothing is stale", file=sys.stderr)
    return 1 if refused else 0


def _remove(name: str, options: argparse.Namespace) -> bool:
    try:
        info = _inspected(name) if options.force else _check(name, options.stale)
        if not options.dry_run:
            unlink(name) if options.force else _unlink_unused(name)
    except RoleTaken as error:
        remedy = "--force removes the name, and they keep their queue"
        print(f"fmq unlink: {name} is in use: {error}; {remedy}", file=sys.stderr)
        return False
    except FileNotFoundError as error:
        print(f"fmq unlink: {error.strerror}{meant(name)}", file=sys.stderr)
        return False
    except OSError as error:
        print(f"fmq unlink: {error.strerror or error}", file=sys.stderr)
        return False
    except InvalidDescriptor as error:
        print(f"fmq unlink: {name}: {error}; --force removes it all the same", file=sys.stderr)
        return False
    if options.json:
        unread = info.unread if info else None
        print(json.dumps({"name": name, "unlinked": not options.dry_run, "unread": unread}))
    else:
        print(f"{name} {'would be removed' if options.dry_run else 'removed'}{_lost(info)}")
    return True


def _lost(info: QueueInfo | None) -> str:
    """Say how many unread elements it had; "" where nothing knows: each reader would have begun somewhere else."""
    if info is None or info.unread is None:
        return ""
    return f", with {info.unread or 'no'} unread element{'' if info.unread == 1 else 's'}"


def _inspected(name: str) -> QueueInfo | None:
    """Return the state of what is removed by force; None: nothing knows it, as it is not a queue."""
    try:
        return inspect(name)
    except (InvalidDescriptor, PermissionError):
        return None


def _check(name: str, must_be_stale: bool) -> QueueInfo:
    """Raise RoleTaken, and InvalidDescriptor for what is not a queue."""
    info = inspect(name)
    if "alive" in info.who or (must_be_stale and not info.is_stale):
        alive = [
            f"its {role} is alive" for role, life in zip(("writer", "reader"), info.who, strict=True) if life == "alive"
        ]
        raise RoleTaken(" and ".join(alive) or "a process has just opened it")
    return info


def _unlink_unused(name: str) -> None:
    """Unlink while we hold both roles' locks, so that no process can begin to use the queue; checks the name again."""
    region = Region.open(name)
    locks = LockFile(region)
    try:
        locks.lock(WRITER, "writer")
        locks.lock(READER, "reader")
        for seat in range(SEAT, SEAT + SEATS):
            locks.lock(seat, "reader")
        if not os.path.samestat(os.fstat(region.fd), os.stat(f"/dev/shm{name}")):
            raise RoleTaken("another process has just made a new queue of that name")
        unlink(name)
    finally:
        locks.abandon()
        region.close()
