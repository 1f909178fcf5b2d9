"""Sizes of inputs that a model leaves open: from --shape, from what is fed to them, and from the names in the file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from driver.nn.errors import did_you_mean
from driver.nn.tensors import spellings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from driver.cli.ports import Port

Sizes = tuple[int, ...]
"""Of an input; 0 where it is open."""
_SHAPE = re.compile(r"(\?|[1-9]\d{0,8})(x(\?|[1-9]\d{0,8}))*", re.ASCII)


def shape_option(function: Callable[..., object]) -> Callable[..., object]:
    """Return the option --shape, as `shapes`."""
    return click.option(
        "--shape",
        "shapes",
        multiple=True,
        metavar="[NAME=]1x3x320x320",
        help="Sizes of an input that the model leaves open; repeatable. ? stays open.",
    )(function)


def by_input(ports: Sequence[Port], given: Iterable[str], option: str) -> dict[str, str]:
    """Return the values of an option by input name. Values without NAME= go to the remaining inputs, in order."""
    found: dict[str, str] = {}
    without, names = [], [port.name for port in ports]
    known = spellings(names)
    longest = sorted(known, key=len, reverse=True)  # "a=b" before "a"
    for word in given:
        spelling = next((name for name in longest if word.startswith(f"{name}=")), None)
        if spelling is None:
            without.append(word)
        elif (name := known[spelling]) in found:
            raise click.UsageError(f"{option} {word}: input {name!r} is given twice; remove one")
        else:
            found[name] = word[len(spelling) + 1 :]
    free = [name for name in names if name not in found]
    for word in without:
        _check_unnamed(word, names, option)
    for word in without[len(free) :]:
        count = f"{len(names)} input{'s' * (len(names) != 1)}"
        raise click.UsageError(f"{option} {word}: too many; the model has {count}: {', '.join(names)}")
    return {**found, **dict(zip(free, without, strict=False))}


def _check_unnamed(word: str, names: Sequence[str], option: str) -> None:
    """Refuse NAME=VALUE with a name that no input has."""
    from pathlib import Path

    name, is_named, _ = word.partition("=")
    if is_named and "://" not in name and not Path(word).exists():
        hint = did_you_mean(name, names)
        raise click.UsageError(f"{option} {word}: no input is named {name!r}; inputs: {', '.join(names)}{hint}")


def given_sizes(ports: Sequence[Port], words: Iterable[str]) -> dict[str, Sizes]:
    """Return the sizes in the values of --shape, by input. Raise UsageError for what an input cannot have."""
    named = by_input(ports, words, "--shape")
    return {port.name: _sizes(port, named[port.name]) for port in ports if port.name in named}


def _sizes(port: Port, word: str) -> Sizes:
    if not _SHAPE.fullmatch(word):
        raise click.UsageError(
            f"--shape {port.name}={word}: expected positive numbers, or ?, separated by x; for example 1x224x224x3"
        )
    own, given = port.operand.dimensions, tuple(0 if size == "?" else int(size) for size in word.split("x"))
    fits = len(given) == len(own) and all(d == g or 0 in (d, g) for d, g in zip(own, given, strict=True))
    if port.operand.type.is_scalar or (own and not fits):
        raise click.UsageError(f"--shape {port.name}={word}: the input is {port.words}; only a ? can be set")
    return tuple(d or g for d, g in zip(own, given, strict=True)) if own else given


class SizeTable:
    """A table of the known sizes of inputs. A size with a name in the file is the same wherever the name occurs."""

    def __init__(self, ports: Sequence[Port], given: Mapping[str, Sizes]) -> None:
        self._given, self._known, self._batch = given, dict[str, int](), 1
        for port in ports:
            if port.name in given:
                self.settle(port, given[port.name])

    def of(self, port: Port) -> Sizes:
        """Return the sizes of an input, as far as they are known."""
        own = self._given.get(port.name, port.operand.dimensions)
        symbols = port.symbols or ("",) * len(own)
        return tuple(size or self._known.get(symbol, 0) for size, symbol in zip(own, symbols, strict=True))

    def settle(self, port: Port, shape: Sequence[int]) -> None:
        """Note the shape that an input has now."""
        if len(shape) > 1 and port.operand.dimensions[:1] == (0,) and shape[0]:
            self._batch = shape[0]
        for symbol, size in zip(port.symbols, shape, strict=False):
            if symbol and size:
                self._known.setdefault(symbol, size)

    def without_file(self, port: Port, *, is_state: bool = False) -> Sizes:
        """Return the shape of an input for which no file is given: a batch is as large as others are, or 1; so is what
        is open in a state.

        Raise UsageError where other sizes are open.
        """
        shape = self.of(port)
        if not shape and not port.operand.type.is_scalar:
            raise click.UsageError(f"input {port.name!r} has no known rank; pass --shape {port.name}=1x…")
        symbols = port.symbols or ("",) * len(shape)
        chosen = tuple(
            size or (self._batch if is_state or "batch" in symbol.lower() or (axis == 0 and len(shape) > 1) else 0)
            for axis, (size, symbol) in enumerate(zip(shape, symbols, strict=True))
        )
        if 0 not in chosen:
            return chosen
        example = "x".join(str(size or (320 if len(chosen) == 4 else 512)) for size in chosen)
        raise click.UsageError(
            f"input {port.name!r} is {port.words}; give its open sizes, as in --shape {port.name}={example}, or a file "
            f"that has them: --input {port.name}=FILE"
        )
