"""States: outputs of a model that are inputs of its next execution."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from driver.nn.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from driver.cli.ports import Port

States = dict[int, int]
"""Number of an output -> number of the input that takes it next time."""
NONE = "none"
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_BEFORE = {"in", "input", "prev", "previous", "past", "old", "initial", "init"}
_AFTER = {"out", "output", "next", "new", "n", "present", "updated", "final"}
_WORDS = {"state", "states", "h", "c", "hidden", "cell", "cache", "memory", "mem", "rnn", "lstm", "gru", "context"}


def states_of(inputs: Sequence[Port], outputs: Sequence[Port], given: Sequence[str]) -> States:
    """Return the states among the inputs and outputs. Raise UsageError.

    `given`: values of --state, OUTPUT=INPUT, which are taken besides those that are recognised; or "none" alone.
    """
    if NONE in given:
        if len(given) > 1:
            raise click.UsageError(f"--state {NONE}: pass it alone, or leave it out")
        return {}
    told = dict(_told(word, inputs, outputs) for word in given)
    if len(set(told.values())) < len(given):
        raise click.UsageError(f"--state {given[-1]}: an input or output is given twice; remove one")
    found = {o: i for o, i in recognised(inputs, outputs).items() if o not in told and i not in told.values()}
    return told | found


def recognised(inputs: Sequence[Port], outputs: Sequence[Port]) -> States:
    """Return the states that names and shapes leave no doubt about: h and hn, state and stateN, cache_in and cache_out.

    There are none in a model of which every input would be a state.
    """
    pairs = [(o, i) for o, out in enumerate(outputs) for i, its in enumerate(inputs) if _belongs(its, out)]
    ends, begins = [o for o, _ in pairs], [i for _, i in pairs]
    found = {o: i for o, i in pairs if ends.count(o) == begins.count(i) == 1}
    return found if len(found) < len(inputs) else {}


def _belongs(its: Port, out: Port) -> bool:
    """Return True if an output is the next value of an input, by their names and shapes."""
    if its.is_state or out.is_state:
        same = ((port.operand.extra or {}).get("state") for port in (its, out))
        return its.is_state and out.is_state and next(same) == next(same)
    return _fits(its, out) and bool(its.operand.dimensions) and _is_next(_parts(its.name), _parts(out.name))


def _is_next(before: list[str], after: list[str]) -> bool:
    """Return True if the second name is that of the next value: without words for before and after they are the
    same.
    """
    stem = [word for word in before if word not in _BEFORE]
    if stem[-1:] == ["0"] and after[-1:] == ["n"]:  # h0 and hn
        stem.pop()
    is_told = len(stem) < len(before) or len([word for word in after if word not in _AFTER]) < len(after)
    return is_told and bool({*stem} & _WORDS) and stem == [word for word in after if word not in _AFTER]


def _parts(name: str) -> list[str]:
    """Return the words in a name, in small letters: stateN is state, n; hn is h, n."""
    words = [word.lower() for word in _PART.findall(name)]
    return [part for word in words for part in (list(word) if word in ("hn", "cn") else [word])]


def _fits(its: Port, out: Port) -> bool:
    """Return True if the values of an output can be those of an input."""
    a, b = its.operand.dimensions, out.operand.dimensions
    is_open = not a or not b
    sizes = is_open or (len(a) == len(b) and all(x == y or 0 in (x, y) for x, y in zip(a, b, strict=True)))
    return its.dtype == out.dtype and sizes


def _told(word: str, inputs: Sequence[Port], outputs: Sequence[Port]) -> tuple[int, int]:
    """Return the output and the input that a value of --state names. Raise UsageError."""
    ins, outs = [port.name for port in inputs], [port.name for port in outputs]
    for o, i in _halves(word):
        if o in outs and i in ins:
            found = outs.index(o), ins.index(i)
            if not _fits(inputs[found[1]], outputs[found[0]]):
                raise click.UsageError(
                    f"--state {word}: output {o!r} is {outputs[found[0]].words}, and input {i!r} is "
                    f"{inputs[found[1]].words}; a state has one type and shape"
                )
            return found
    o, _, i = word.partition("=")
    hint = did_you_mean(o, outs) if o not in outs else did_you_mean(i, ins)
    raise click.UsageError(
        f"--state {word}: pass OUTPUT=INPUT; outputs: {', '.join(outs)}; inputs: {', '.join(ins)}{hint}"
    )


def _halves(word: str) -> Iterator[tuple[str, str]]:
    """Return all ways to cut it at a =; names may have one."""
    for at, letter in enumerate(word):
        if letter == "=":
            yield word[:at], word[at + 1 :]
