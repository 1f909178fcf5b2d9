"""The ways in that the table of requests goes through, the sites where its models run, and its cells."""

import asyncio
import re
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import request_rows
from request_rows import Answer, Row
from waiting import PATIENCE

import driver
from burst import BurstError, Controller, ErrorStatus, StatusError
from burst.errors import Result
from driver import BufferDesc
from driver.client.executor import BurstParts
from driver.options import options_of
from driver.runtime.compiled import CompiledModel

_NUMBERS = re.compile(r"(late by|by) [\d.e+-]+ (ms|s)\b")
_NAMES = re.compile(r"\b(buffer|token) \d+")
_STEP = re.compile(r"^operations \[[\d, ]+\]: ")  # a model that is divided says which of them failed


class Way(NamedTuple):
    """A way in."""

    name: str
    takes: str  #: "request" or "arrays"
    open: Any  #: of a model and a row: a context of a function of what it takes and of options
    options: frozenset[str]
    says: str  #: a failure, by a "result" or an "exception"; "either" for a fenced execution


@contextmanager
def _execute(model, _):
    yield model.execute


def _future(method):
    @contextmanager
    def opened(model, _):
        yield lambda request, **options: getattr(model, method)(request, **options).result(PATIENCE)

    return opened


@contextmanager
def _run(model, _):
    yield lambda arrays, **options: model.run(*arrays, **options)


def _in_burst(depth, call):
    """`call`: of the burst, what it takes, and options."""

    @contextmanager
    def opened(model, row):
        with model.burst(depth=depth, input_shapes=_input_shapes(model, row)) as burst:
            yield partial(call, burst)

    return opened


def _input_shapes(model, row):
    """For the burst's own inputs, where they need some: those of arrays; a request on pools needs none."""
    graph = model.model.main
    arrays = [None] * len(graph.inputs) if row is None else row.arrays
    is_fixed = all(graph.operands[i].is_known for i in graph.inputs)
    if is_fixed and (row is None or row.misuse or not any(array is None for array in arrays)):
        return None
    return [None if array is None else array.shape for array in arrays]


def _burst_execute(burst, request, **options):
    return burst.execute(request, **options)


def _burst_run(burst, arrays, **options):
    return burst.run(*arrays, **options)


def _submit(burst, arrays, **options):
    return burst.submit(*arrays, **options).result(PATIENCE)


@contextmanager
def _awaited(model, _):
    yield partial(_run_async, model)


def _run_async(model, arrays, **options):
    async def main():
        return await model.run_async(*arrays, **options)

    return asyncio.run(main())


@contextmanager
def _in_version_1(model, _):
    """A burst as with a device that speaks only the first version of the wire."""

    def first(configure, options):
        return Controller(configure, options.memory, options.spin, versions=(1,))

    options = options_of(model.preference, input_shapes=_input_shapes(model, None))
    with model.executor.open_burst(options, BurstParts(open_controller=first)) as burst:
        yield burst.execute


def executes(prepared, burst):
    """The ways to execute a request on pools, by name; each returns the result."""

    def awaited(method):
        return lambda request, **options: getattr(prepared, method)(request, **options).result(PATIENCE)

    ways = {"plain": prepared.execute, "async": awaited("execute_async"), "fenced": awaited("execute_fenced")}
    return ways | {"burst": burst.execute}


ALL = frozenset({"measure", "timeout", "deadline", "loop_timeout"})
WAYS = (
    Way("execute", "request", _execute, ALL, "result"),
    Way("execute_async", "request", _future("execute_async"), ALL, "result"),
    Way("execute_fenced", "request", _future("execute_fenced"), ALL - {"timeout"}, "either"),
    Way("burst.execute", "request", _in_burst(1, _burst_execute), ALL, "result"),
    Way("burst.execute, depth 4", "request", _in_burst(4, _burst_execute), ALL, "result"),
    Way("burst.execute, wire version 1", "request", _in_version_1, frozenset({"measure"}), "result"),
    Way("run", "arrays", _run, frozenset({"timeout", "deadline"}), "exception"),
    Way("run_async", "arrays", _awaited, frozenset({"timeout", "deadline"}), "exception"),
    Way("burst.run", "arrays", _in_burst(1, _burst_run), frozenset({"timeout", "deadline"}), "exception"),
    Way("burst.submit, depth 4", "arrays", _in_burst(4, _submit), frozenset({"deadline"}), "exception"),
    Way("burst.run_async", "arrays", _in_burst(1, _run_async), frozenset({"timeout", "deadline"}), "exception"),
)


# ---- what is heard


class Heard(NamedTuple):
    """An answer, and how it was said: by a "result" or an "exception"."""

    answer: Answer
    how: str
    is_timed: bool = False


def hear(call):
    """The answer that `call()` returns or raises."""
    try:
        result = call()
    except StatusError as error:
        return Heard(_answer(error.as_result()), "exception")
    except (BurstError, driver.DriverError, ValueError, TypeError) as error:
        words = Answer(type(error).__name__, phase=getattr(error, "phase", None), text=_text(error))
        return Heard(words, "exception")
    if not isinstance(result, Result):
        result = Result(ErrorStatus.NONE, result)
    return Heard(_answer(result), "result", result.timing.time_on_device is not None)


def _answer(result):
    outputs = tuple(None if output is None else request_rows.plain(output) for output in result.outputs)
    is_short = result.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
    shapes = tuple((tuple(s.dimensions), s.is_sufficient) for s in result.output_shapes) if is_short else ()
    return Answer(result.status.name, outputs, shapes, result.cause.phase, _text(result.message))


def _text(words):
    """Without what differs from one request to the next."""
    return _NAMES.sub(r"\1 N", _NUMBERS.sub(r"\1 N \2", _STEP.sub("", str(words))))


# ---- sites


class Site:
    """Where models run: on a device, or compiled."""

    def __init__(self, name, prepare, devices=(), elsewhere=None, without=(), device=None):
        """`prepare`: of a model and a priority. `devices`: that have to support it. `elsewhere`: another connection.

        `without`: names of ways that models here do not have. `device`: that allocates, if it is not the model's own.
        """
        self.name, self._prepare, self._devices, self._elsewhere = name, prepare, devices, elsewhere
        self.without, self._device = without, device

    def can(self, row):
        """Whether the site has what the row needs."""
        return self._elsewhere is not None or not row.kind.endswith("of a device")

    def supports(self, model):
        """Whether its devices, where they are known, execute all of it."""
        return all(all(device.supported_operations(model)) for device in self._devices)

    @contextmanager
    def model(self, model, priority):
        """The model, made ready; `allocate` is for it meanwhile."""
        self._model = model
        with self._prepare(model, priority) as self._prepared, ExitStack() as self._stack:
            yield self._prepared

    def allocate(self, inputs, outputs):
        """A buffer for these roles."""
        if isinstance(prepared := self._prepared, CompiledModel):
            return self._stack.enter_context(prepared.allocate(BufferDesc(), inputs, outputs))
        return self._stack.enter_context(prepared.device.allocate(BufferDesc(), [prepared], inputs, outputs))

    def allocate_elsewhere(self, inputs, outputs):
        """The same, of another connection to the device."""
        prepared = self._stack.enter_context(self._elsewhere.prepare(self._model))
        return self._stack.enter_context(self._elsewhere.allocate(BufferDesc(), [prepared], inputs, outputs))


# ---- the table


class Cell(NamedTuple):
    """What one way said to one row at one site."""

    site: str
    way: Way
    row: Row
    heard: tuple[Heard, ...]  #: each time that it was asked

    @property
    def expected(self):
        if self.way.takes == "arrays" and self.row.misuse:
            return self.row.misuse
        return self.row.fenced if self.way.name == "execute_fenced" and self.row.fenced else self.row.answer

    @property
    def wrong(self):
        """What is wrong with it; empty if nothing is."""
        for heard in self.heard:
            is_other = (heard.answer.said, heard.answer.phase) in self.row.others
            if not is_other and self.row.others:
                is_other = heard.answer._replace(text="") == self.expected._replace(text="")
            if heard.answer != self.expected and not is_other:
                return f"says {heard.answer}"
            is_status = heard.answer.said in ErrorStatus.__members__
            how = "result" if heard.answer.said == "NONE" else self.way.says if is_status else "exception"
            if how not in (heard.how, "either"):
                return f"says it by a {heard.how}"
            if heard.is_timed != (heard.answer.said == "NONE" and "measure" in self.row.options):
                return "has times" if heard.is_timed else "has no times"
        return ""


TIMES = 3  # that each request is made: first it is bound, then it is recognised


def fill(site, rows, ways=WAYS):
    """All cells of these rows at that site."""
    for model, priority in dict.fromkeys((row.model, row.priority) for row in rows):
        built = (model or request_rows.add(1, 4))()
        if not site.supports(built):
            continue
        with site.model(built, priority) as prepared:
            for way in (way for way in ways if way.name not in site.without):
                its = [
                    r for r in rows if (r.model, r.priority) == (model, priority) and site.can(r) and can_say(way, r)
                ]
                yield from _fill_way(site, prepared, way, its)


def can_say(way, row):
    """Whether that way takes such requests."""
    what = row.request if way.takes == "request" else row.arrays
    return what is not None and row.options.keys() <= way.options


def _fill_way(site, prepared, way, rows):
    with ExitStack() as stack:
        calls = {}
        for row in rows:
            shapes = _burst_of(way, row)
            if shapes not in calls:
                calls[shapes] = stack.enter_context(way.open(prepared, None if way.takes == "request" else row))
            what = row.request(site) if way.takes == "request" else row.arrays
            yield Cell(site.name, way, row, tuple(hear(partial(_ask, calls[shapes], what, row)) for _ in range(TIMES)))


def _ask(call, what, row):
    return call(what, **{name: value() for name, value in row.options.items()})


def _burst_of(way, row):
    """What rows that the same burst serves have in common."""
    if way.takes == "request" or row.misuse:
        return None
    return tuple(None if array is None else array.shape for array in row.arrays)


def report(cells):
    """What is wrong, row by row."""
    lines, count = [], Counter(bool(cell.wrong) for cell in cells)
    for cell in cells:
        if cell.wrong:
            head = f"{cell.row.kind}: {cell.row.name}; {cell.way.name} at {cell.site}"
            lines.append(f"{head}\n    {cell.wrong}\n    not {cell.expected}")
    return "\n".join([f"{count[True]} of {len(cells)} cells are wrong", *lines])


def markdown(rows):
    """The rows as the page shows them."""
    lines = ["| kind | request | answer | words |", "|---|---|---|---|"]
    for row in rows:
        answers = [row.answer]
        answers += [row.fenced] if row.fenced else []
        words = "; fenced: ".join(f"`{a.text}`" if a.text else "-" for a in answers)
        said = "; fenced: ".join(" ".join(filter(None, (f"`{a.said}`", a.phase))) for a in answers)
        refused = f"; arrays: `{row.misuse.said}`" if row.misuse and row.request else ""
        told = f"; arrays: `{row.misuse.text}`" if refused else ""
        lines.append(f"| {row.kind} | {row.name} | {said}{refused} | {words}{told} |")
    return "\n".join(lines)
