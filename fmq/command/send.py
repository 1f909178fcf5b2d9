"""`send`: writes elements to a queue, for which it takes the writer's role."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from fmq.queue import MessageQueue

if TYPE_CHECKING:
    import argparse

    import numpy as np


def run(options: argparse.Namespace) -> int:
    """Write the values, or without any the lines of standard input, each as it comes."""
    queue, sent = MessageQueue.open(options.name), 0
    with queue.writer() as writer:
        for text in options.values or (line.rstrip("\n") for line in sys.stdin):
            writer.write([parsed(text, queue.dtype)], timeout=options.timeout)
            sent += 1
    if options.json:
        print(json.dumps({"name": options.name, "sent": sent}))
    return 0


def parsed(text: str, dtype: np.dtype[Any]) -> Any:
    """Return an element out of the text in which `tail --json` shows its value. Raise ValueError."""
    if dtype.kind in "SU":
        return _element(text, dtype)
    try:
        value = json.loads(text)
    except ValueError:
        raise ValueError(f"VALUE {text!r}: write an element of {dtype} as JSON") from None
    return _element(value, dtype)


def _element(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a value of JSON as `write` takes it."""
    if dtype.subdtype:
        return _each(value, dtype.base)
    if dtype.names:
        if isinstance(value, dict):
            if value.keys() != set(dtype.names):
                raise ValueError(f"VALUE {value!r}: the queue's fields are {', '.join(dtype.names)}")
            value = [value[name] for name in dtype.names]
        if not isinstance(value, list) or len(value) != len(dtype.names):
            raise ValueError(f"VALUE {value!r}: a record has the fields {', '.join(dtype.names)}")
        return tuple(_element(part, dtype[name]) for part, name in zip(value, dtype.names, strict=True))
    if isinstance(value, str) and dtype.kind in "SV":
        return value.encode("latin-1") if dtype.kind == "S" else bytes.fromhex(value)
    return value


def _each(value: Any, dtype: np.dtype[Any]) -> Any:
    return [_each(part, dtype) for part in value] if isinstance(value, list) else _element(value, dtype)
