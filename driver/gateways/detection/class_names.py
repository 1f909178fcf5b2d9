"""The names of classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def label_of(labels: Sequence[str], label_id: int) -> str:
    """Return the name of a class, or its number where it has none."""
    return labels[label_id] if 0 <= label_id < len(labels) and labels[label_id] else f"class {label_id}"


def labels_of(text: str) -> list[str]:
    """Return the names in a file: one per line, in order, or all with their numbers ("17 cat", "17: cat")."""
    lines = [line.strip() for line in text.splitlines()]
    pairs = [line.replace(":", " ", 1).split(None, 1) for line in lines if line]
    if not pairs or not all(len(pair) == 2 and pair[0].isascii() and pair[0].isdigit() for pair in pairs):
        return lines
    numbered = {int(number): name for number, name in pairs if len(number) <= 5}
    return [numbered.get(n, "") for n in range(max(numbered, default=-1) + 1)]
