"""`list` and `info`."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from fmq.geometry import dtype_text
from fmq.inspection import QueueInfo, inspect, queues

if TYPE_CHECKING:
    import argparse

_BAR = 10  # characters


def show_all(options: argparse.Namespace) -> int:
    """`list`."""
    found = queues()
    if options.json:
        for info in found:
            print(json.dumps(plain(info)))
    elif found:
        rows = [_row(info) for info in found]
        heads = ("NAME", "DTYPE", "CAPACITY", "FLAVOUR", "UNREAD", "WRITER", "READER", "")
        widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
        for row in (heads, *rows):
            print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    else:
        print('no queues; a program makes one by fmq.MessageQueue.create(..., name="/like-this")', file=sys.stderr)
    return 0


def show_one(options: argparse.Namespace) -> int:
    """`info`."""
    info = inspect(options.name)
    if options.json:
        print(json.dumps(plain(info)))
        return 0
    for what, text in _lines(info):
        print(f"{what:<9} {text}")
    return 0


def meant(name: str) -> str:
    """Return what to add to the message that there is no queue of that name."""
    close = difflib.get_close_matches(name, [info.name for info in queues()], 1)
    return f"; did you mean {close[0]!r}?" if close else "; `python -m fmq list` shows what there is"


def plain(info: QueueInfo) -> dict[str, Any]:
    """Return it for JSON: the dtype as `numpy.lib.format.descr_to_dtype` takes it, in words; the mode in octal."""
    kept = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    return kept | {
        "dtype": None if info.dtype is None else dtype_text(info.dtype),
        "flavour": None if info.flavour is None else info.flavour.name.lower(),
        "mode": f"{info.mode:04o}",
        "stale": info.is_stale,
        "readers": [{"pid": r.pid, "position": r.position, "unread": r.unread} for r in info.readers],
    }


def _row(info: QueueInfo) -> tuple[str, ...]:
    if info.dtype is None or info.flavour is None:
        return (info.name, "?", "?", "?", "?", *info.who, "DAMAGED: see info")
    return (
        *(info.name, _short(str(info.dtype.name if info.dtype.names is None else ", ".join(info.dtype.names)))),
        *(str(info.capacity), info.flavour.name.lower(), _fill(info), *info.who),
        "STALE" if info.is_stale else "",
    )


def _fill(info: QueueInfo) -> str:
    if info.unread is None:
        return f"{info.written} written"
    full = -(-info.unread * _BAR // info.capacity)  # anything at all shows
    return f"[{'#' * full}{'-' * (_BAR - full)}] {info.unread}"


def _short(text: str, most: int = 24) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _lines(info: QueueInfo) -> list[tuple[str, str]]:
    assert info.dtype is not None, "inspect refuses what is damaged"
    assert info.flavour is not None, "as above"
    size, age = info.dtype.itemsize, max(0.0, time.time() - info.created)
    lines = [
        ("name", info.name),
        ("dtype", f"{info.dtype} ({human(size)})"),
        ("capacity", f"{info.capacity} elements, {human(info.capacity * size)}"),
        ("flavour", info.flavour.name.lower()),
        ("memory", f"{human(info.nbytes)}, mode {info.mode:04o}, owner uid {info.uid}"),
        ("created", f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(info.created))}, {_span(age)} ago"),
        ("written", f"{info.written} elements, {human(info.written * size)}"),
    ]
    if info.unread is None:
        lines.append(("read", "each reader has a position of its own"))
    else:
        lines += [("read", f"{info.read} elements"), ("unread", f"{_fill(info)} of {info.capacity}")]
    lines += [("writer", _LIVES[info.writer]), ("reader", _LIVES[info.reader])]
    lines += [("reader", f"process {r.pid}: {r.unread} unread") for r in info.readers]
    if info.is_stale:
        lines.append(("stale", f"open it to go on where it stopped, or remove it: python -m fmq unlink {info.name}"))
    return lines


_LIVES = {
    "alive": "alive",
    "nobody": "nobody",
    "released": "released: it left in good order",
    "dead": "dead: its process ended without releasing its role",
}


def human(nbytes: float) -> str:
    """Return bytes as people say them."""
    if nbytes == 1:
        return "1 byte"
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} bytes" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _span(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
