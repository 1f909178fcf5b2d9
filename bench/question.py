"""One question of a script, declared: its options, what runs, the columns of its table, budgets, JSON and picture.

Rows are the names in the `Runs` that come of it; a column is a function of these and a row's name. Those that many
scripts have are made by `median`, `interval`, `times` and `total`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from measure import HEAD, Report, arguments, cells, conditions, parse, pin_client, publish, spell, subject_rows

from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Collection, Mapping, Sequence

    from measure import Budget, Runs

    from driver.cli.timing import Estimate

    Cell = Callable[[Runs, str], str]
    Figure = Callable[[Runs, str], Estimate | None]
    Rows = list[dict[str, Any]]
    Table = tuple[Sequence[Sequence[str]], Sequence[str]]


def median(key: str, form: str = ".2f") -> Cell:
    """A column: the median of a figure over all rounds."""
    return lambda runs, name: f"{np.median(runs.values(name, key)):{form}}"


def interval(key: str, unit: str = "") -> Cell:
    """A column: the same with its interval."""
    return lambda runs, name: spell(estimate(runs.values(name, key)), unit)


def total(key: str) -> Cell:
    """A column: the sum of a count over all rounds."""
    return lambda runs, name: str(int(runs.values(name, key).sum()))


def against(reference: str, key: str) -> Figure:
    """The ratio of a row's figure to that of another row in the same round; None: one has none."""

    def found(runs: Runs, name: str) -> Estimate | None:
        return estimate(runs.values(name, key) / runs.values(reference, key)) if runs.has(name, reference) else None

    return found


def times(figure: Figure, *without: str) -> Cell:
    """A column: an estimate, but for the rows `without` it."""
    return lambda runs, name: "" if name in without else spell(figure(runs, name))


@dataclass(frozen=True)
class Asked:
    """A question, asked by the first line of `doc`, the rest of which explains how.

    Attributes:
        options: of the command line beside those that all scripts have: what argparse takes, by option.
        peers: which may stand beside ours; `args.peers` are those that --peers chooses.
        settle: changes the options that were given, as for --quick. Raises ValueError for those that cannot be.
        conditions: of the measurement, beside those of the machine.
        pairs: rounds, by default.
    """

    doc: str | None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, kw_only=True)
    peers: Collection[str] = field(default=(), kw_only=True)
    settle: Callable[[argparse.Namespace], object] = field(default=lambda _: None, kw_only=True)
    conditions: Callable[[argparse.Namespace], Mapping[str, Any]] = field(default=lambda _: {}, kw_only=True)
    pairs: int = field(default=9, kw_only=True)

    @property
    def text(self) -> str:
        """The question in one line."""
        return inspect.cleandoc(self.doc or "").partition("\n")[0]

    def parsed(self) -> argparse.Namespace:
        """The command line."""
        parser = arguments(self.doc, self.pairs)
        for name, how in self.options.items():
            parser.add_argument(name, **how)
        if self.peers:
            choices = ("all", "none", *self.peers)
            parser.add_argument("--peers", nargs="+", default=["all"], choices=choices, metavar="PEER")
        args = parse(parser)
        if self.peers:
            args.peers = [name for name in self.peers if name in args.peers or "all" in args.peers]
        try:
            self.settle(args)
        except ValueError as error:
            parser.error(str(error))
        return args


class Finding(NamedTuple):
    """What was found, where that is no row for each name in `Runs`: what `Report` has behind the conditions."""

    lines: Sequence[Sequence[str]]
    budgets: Sequence[Budget]
    body: dict[str, Any]
    head: Sequence[str]
    more: Sequence[Table] = ()


@dataclass(frozen=True)
class Inquiry(Asked):
    """A question whose answer `find` makes as a whole."""

    find: Callable[[argparse.Namespace], Finding]

    def answer(self) -> None:
        """Measure, print, write."""
        args = self.parsed()
        found = {**conditions(), **self.conditions(args)}
        publish(args, Report(self.text, found, *self.find(args)))


@dataclass(frozen=True)
class Question(Asked):
    """A question about rows, which are measured in rounds.

    Attributes:
        run: measures.
        columns: what stands in each, by its head. The first one is the row's name.
        budgets: of what was found.
        figures: whose medians the JSON has for each row.
        estimates: which the JSON has, too.
        group: the table in which a row stands, by the head of its first column; tables come in the order of rows.
        label: what stands for a name in a table.
        ours: the rows that pictures and the JSON mark.
        kept: the options that the JSON has.
        rows: for the JSON and the picture, where they are others than the names in `Runs`.
        tables: lines and heads, where they are others than `columns` say.
        more: further tables.
        body: what the JSON has besides.
        bars: the figure of a row that a picture shows, None for rows that have none, and its unit. Or `draw`, which
            makes the picture.
    """

    run: Callable[[argparse.Namespace], Runs]
    columns: Mapping[str, Cell] = field(default_factory=dict)
    budgets: Callable[[Runs, argparse.Namespace], Sequence[Budget]] = lambda *_: ()
    figures: Sequence[str] = ()
    estimates: Mapping[str, Figure] = field(default_factory=dict)
    group: Callable[[str], str] = lambda _: ""
    label: Callable[[str], str] = str
    ours: Collection[str] = ()
    kept: Sequence[str] = ()
    rows: Callable[[Runs, argparse.Namespace], Rows] | None = None
    tables: Callable[[Runs, argparse.Namespace], Sequence[Table]] | None = None
    more: Callable[[Runs, argparse.Namespace], Sequence[Table]] = lambda *_: ()
    body: Callable[[Runs, argparse.Namespace], Mapping[str, Any]] = lambda *_: {}
    bars: tuple[str | Callable[[dict[str, Any]], float | None], str] | None = None
    draw: Callable[[argparse.Namespace, Runs, Rows], None] | None = None
    is_pinned: bool = True  #: the client stays on its CPU

    def answer(self) -> None:
        """Measure, print, write."""
        args = self.parsed()
        if self.is_pinned:
            pin_client()
        found = {**conditions(), **self.conditions(args)}
        runs = self.run(args)
        rows = self.rows(runs, args) if self.rows else [self._row(runs, name) for name in (*runs.blocks, *runs.errors)]
        body = {"subjects": rows, **{name: vars(args)[name] for name in self.kept}, **self.body(runs, args)}
        (lines, head), *more = self.tables(runs, args) if self.tables else self._tables(runs)
        further = [*more, *self.more(runs, args)]
        publish(args, Report(self.text, found, lines, self.budgets(runs, args), body, head, further))
        if args.plot or vars(args).get("cdf"):
            self._picture(args, runs, rows)

    def _row(self, runs: Runs, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {"name": name, "ours": name in self.ours}
        if name in runs.errors:
            return {**row, "error": runs.errors[name]}
        found = {key: figure(runs, name) for key, figure in self.estimates.items()}
        row |= runs.medians(name, *self.figures)
        return {**row, **{key: one and one._asdict() for key, one in found.items()}, "rounds": runs.blocks[name]}

    def _tables(self, runs: Runs) -> list[Table]:
        tables: dict[str, list[tuple[str, ...]]] = {}
        for name in (*runs.blocks, *runs.errors):
            tables.setdefault(self.group(name), []).append(self._line(runs, name))
        return [(lines, (head, *self.columns)) for head, lines in tables.items()]

    def _line(self, runs: Runs, name: str) -> tuple[str, ...]:
        if name in runs.errors:
            return self.label(name), runs.errors[name][:60], *[""] * (len(self.columns) - 1)
        return self.label(name), *(cell(runs, name) for cell in self.columns.values())

    def _picture(self, args: argparse.Namespace, runs: Runs, rows: Rows) -> None:
        import plots

        if self.bars:
            key, unit = self.bars
            found = {row["name"]: key(row) if callable(key) else row.get(key) for row in rows}
            plots.bars(args.plot, {name: value for name, value in found.items() if value is not None}, unit, self.text)
        elif self.draw:
            self.draw(args, runs, rows)


def dots(title: str, *in_full: str) -> Callable[[argparse.Namespace, Runs, Rows], None]:
    """A picture: p50 and p99 of each row; and the distributions of some."""

    def draw(args: argparse.Namespace, _: Runs, rows: Rows) -> None:
        import plots

        plots.latencies(args.plot, rows, in_full, title)

    return draw


def floor_tables(runs: Runs, args: argparse.Namespace) -> Sequence[Table]:
    """The table of `args.subjects` beside their floors."""
    return (([cells(row) for row in subject_rows(runs, args.subjects)], HEAD),)


def beside_floors(doc: str | None, run: Callable[[argparse.Namespace], Runs], **how: Any) -> Question:
    """A question about subjects, `args.subjects` once it has run, each of which stands beside its floor."""
    usual = {"rows": lambda runs, args: subject_rows(runs, args.subjects), "tables": floor_tables}
    return Question(doc, run, **{**usual, **how})
