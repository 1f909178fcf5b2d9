"""docs/models.md lists the operations as the sources define them; run this file as a program to write it."""

import re
from pathlib import Path

from driver.nn import OPERATIONS

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
MARKED = re.compile(r"(?<=<!-- operations -->\n).*(?=<!-- /operations -->)", re.DOTALL)


def ranks(signature):
    low, high = min(signature.ranks), max(signature.ranks)
    return f"{low}-{high}" if high <= 4 and low != high else str(low) if low == high else f"{low} and more"


def row(kind):
    types = " ".join(dict.fromkeys(t for s in kind.signatures for t in s.types.split()))
    inputs = dict.fromkeys(" ".join([s.inputs, *(f"[{tail}]" for _, tail in s.tails)]) for s in kind.signatures)
    outputs = dict.fromkeys(s.outputs for s in kind.signatures)
    cells = (kind.code, kind.name, types, "; ".join(dict.fromkeys(map(ranks, kind.signatures))))
    return "| " + " | ".join(map(str, (*cells, "; ".join(inputs), "; ".join(outputs)))) + " |\n"


def table():
    head = "| code | operation | T | rank | inputs | outputs |\n|---|---|---|---|---|---|\n"
    return head + "".join(map(row, sorted(OPERATIONS.values(), key=lambda kind: kind.code)))


def test_the_page_lists_every_operation():
    """Name, types, ranks, inputs and outputs on the page are those of the table of operations."""
    assert MARKED.search(PAGE.read_text()).group() == table()


if __name__ == "__main__":
    PAGE.write_text(MARKED.sub(lambda _: table(), PAGE.read_text()))
