"""`tail`: shows the elements that pass through a queue."""

from __future__ import annotations

import json
import math
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from fmq.onlooker import Onlooker, Sight

if TYPE_CHECKING:
    import argparse


_MOST_SHOWN = 32  # elements of an array


def run(options: argparse.Namespace) -> int:
    """Show elements until none is left; with --follow until Ctrl-C, or until the queue and both its sides are gone."""
    missed = 0
    with Onlooker(options.name, with_taken=options.taken) as onlooker:
        onlooker.keep_latest(options.n)
        before = onlooker.position
        try:
            while True:
                was_over, sight = onlooker.is_over, onlooker.look()
                missed += sight.missed
                _show(sight, options.json)
                if len(sight.elements) or sight.missed:
                    sys.stdout.flush()
                elif not options.follow:
                    break
                elif was_over:
                    print(f"fmq tail: {options.name} was unlinked, and both sides are gone", file=sys.stderr)
                    break
                else:
                    time.sleep(options.interval)
        except KeyboardInterrupt:
            pass  # the way to end --follow
        if missed:
            print(f"fmq tail: {missed} elements came and went between two looks", file=sys.stderr)
        elif onlooker.position == before and not options.follow:
            taken = "" if options.taken or not before else "; --taken shows what its reader has taken"
            print(f"fmq tail: nothing is unread, {before} elements were written so far{taken}", file=sys.stderr)
    return 0


def _show(sight: Sight, as_json: bool) -> None:
    if sight.missed:
        print(json.dumps({"missed": sight.missed}) if as_json else f"... {sight.missed} missed ...")
    for i, element in enumerate(sight.elements):
        position, is_doubtful = sight.first + i, i < sight.doubtful
        if as_json:
            value = plain_value(element)
            print(json.dumps({"position": position, "value": value} | ({"doubtful": True} if is_doubtful else {})))
        else:
            print(f"{'~' if is_doubtful else ''}{position}  {_words(_in_brief(element))}")


def _in_brief(element: Any) -> Any:
    """Return an element for people: of long arrays the dtype, the shape and the ends."""
    if isinstance(element, np.void) and element.dtype.names is not None:
        return {name: _in_brief(element[name]) for name in element.dtype.names}
    if isinstance(element, np.ndarray) and element.size > _MOST_SHOWN:
        first, last = (plain_value(part) for part in (element.reshape(-1)[:3], element.reshape(-1)[-3:]))
        return f"{element.dtype}{list(element.shape)} [{', '.join(map(str, first))}, … {', '.join(map(str, last))}]"
    return plain_value(element)


def plain_value(element: Any) -> Any:
    """Return an element for JSON: records as objects, sub-arrays as lists, raw bytes in hexadecimal."""
    if isinstance(element, np.ndarray):
        return [plain_value(part) for part in element]
    if isinstance(element, np.void) and element.dtype.names is not None:
        return {name: plain_value(element[name]) for name in element.dtype.names}
    return _plain_scalar(element)


def _plain_scalar(element: Any) -> bool | int | float | str:
    if isinstance(element, np.void):
        return element.tobytes().hex()
    if isinstance(element, np.datetime64 | np.timedelta64):
        return str(element)  # item() would give an int for some units
    value = element.item()
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)  # JSON has no nan and no complex numbers


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={_words(part)}" for name, part in value.items())
    return repr(value) if isinstance(value, str) and not value.isprintable() else str(value)
