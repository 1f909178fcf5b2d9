"""One version of one model on the device: each request on a lane, in the thread that has it; those that may be joined
by way of `compiled.serve`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from burst import DeviceUnavailable
from driver.gateways.oip.classification import classified
from driver.gateways.oip.decoupled import DEPTH
from driver.gateways.oip.inference import AnsweredTensor, InferAnswer, ModelPorts
from driver.gateways.oip.lanes import InPlaceCall, Lanes
from driver.gateways.oip.model_config import CONFIG_FILE
from driver.gateways.oip.regions import NO_REGIONS
from driver.gateways.refusal import Refusal, RefusalCode, invalid
from driver.importers import load
from driver.options import MOST_ROWS, Batch
from driver.runtime.compilation import compile as compile_model

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from driver.gateways.oip.inference import InferCall, WantedTensor
    from driver.gateways.oip.model_config import FolderConfig
    from driver.gateways.oip.regions import RegionTable
    from driver.nn import Model
    from driver.options import Preference, Priority
    from driver.replicas.blocking import BlockingServer

_QUEUE = 256
_STAGES = "queue", "compute_input", "compute_infer", "compute_output"


class ModelGone(DeviceUnavailable):
    """A version was unloaded, or another file has taken its place. Nothing was executed for the request."""


class AnsweredElsewhere(NamedTuple):
    """The figures of requests to a model that another process has answered. last: milliseconds since 1970."""

    requests: int = 0
    rows: int = 0
    last: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    late: int = 0
    late_ns: int = 0

    def plus(self, other: AnsweredElsewhere) -> AnsweredElsewhere:
        """Return both together."""
        summed = map(sum, zip(self, other, strict=True))
        return AnsweredElsewhere(*summed)._replace(last=max(self.last, other.last))


NOTHING_ELSEWHERE = AnsweredElsewhere()


class CountsElsewhere(Protocol):
    """A process that answers requests, too."""

    def counts(self, served: ServedModel) -> AnsweredElsewhere:
        """Return the figures of those to that model."""


class PriorityLane:
    """The model, compiled for one priority."""

    def __init__(
        self, model: Model, device: str, config: FolderConfig, ports: ModelPorts, name: str, priority: Priority
    ):
        with ExitStack() as stack:
            speed: Preference = "sustained_speed" if config.instances > 1 else "fast_single_answer"
            batch = Batch(min(config.batch, MOST_ROWS)) if config.batch > 1 else None  # also with other programs
            self.compiled = compile_model(
                model, device=device, preference=speed, priority=priority, progress=False, batch=batch
            )
            stack.callback(self.compiled.close)
            self.joins = self._joining(config, name, stack) if config.batch > 1 else None
            self.lanes = Lanes(self.compiled, ports, config.instances)
            stack.callback(self.lanes.close)
            self._stack = stack.pop_all()

    def _joining(self, config: FolderConfig, name: str, stack: ExitStack) -> BlockingServer:
        serving = self.compiled.serve(
            replicas=config.instances,
            queue=_QUEUE,
            batch=config.batch,
            batch_window=config.window,
            name=name,
        )
        return stack.enter_context(serving)

    def close(self) -> None:
        """Finish the requests that it has."""
        self._stack.close()


class ServedModel:
    """A version of a model that is ready. Any thread."""

    def __init__(self, name: str, version: str, path: Path, config: FolderConfig, device: str) -> None:
        """Load the file. Raise what `driver.load` and `driver.compile` raise, and Refusal."""
        self.name, self.version, self.config, self.device = name, version, config, device
        self.kind = path.suffix.lower().removeprefix(".")
        self.model = load(path, optional=False).named(name)
        self.ports = ModelPorts(self.model)
        config.check(self.model)
        self._labels = config.labels(path.parent.parent)
        self._lock, self._engines = threading.Lock(), dict[str, PriorityLane]()
        self._statistics = InferenceCounts()
        self.elsewhere: list[CountsElsewhere] = []  #: which answers requests to it, too
        self._is_closed = False
        self._engine("medium")

    def _engine(self, priority: Any) -> PriorityLane:
        """Made when it is first asked for: equal models are one model to the device."""
        found = self._engines.get(priority)
        if found is not None:
            return found
        with self._lock:
            if self._is_closed:
                raise ModelGone(f"model {self.name!r} is being unloaded")
            if priority not in self._engines:
                label = f"{self.name}/{self.version}"
                self._engines[priority] = PriorityLane(
                    self.model, self.device, self.config, self.ports, name=label, priority=priority
                )
            return self._engines[priority]

    def infer(self, call: InferCall, table: RegionTable | None) -> InferAnswer:
        """Answer a request. Raise Refusal, ModelGone, and what `Lanes.execute` and `ModelServer.run` raise."""
        begin, rows = time.monotonic_ns(), 1
        if self.is_decoupled:
            raise Refusal(
                RefusalCode.UNIMPLEMENTED, f"model {self.name!r} answers a request many times: use ModelStreamInfer"
            )
        try:
            given = self.ports.ordered(call.given, self.config.max_batch_size)
            wanted = self.ports.wanted(call.wanted)
            if given and given[0].shape and self.config.max_batch_size:
                rows = given[0].shape[0]
            in_order = [wanted.get(port.name) for port in self.ports.outputs]
            engine = self._engine(call.priority)
            slices = call.slices
            if engine.joins and not slices:
                inputs = [port.array(each) for port, each in zip(self.ports.inputs, given, strict=True)]
                times = [begin, time.monotonic_ns()]
                arrays = list(engine.joins.run(*inputs, deadline=call.deadline))
                shapes = [array.shape for array in arrays]
            else:
                values = [port.values(each) for port, each in zip(self.ports.inputs, given, strict=True)]
                with table.take(slices) if table and slices else NO_REGIONS as regions:
                    times = [begin, time.monotonic_ns()]
                    its = InPlaceCall(given, values, in_order, regions, deadline=call.deadline)
                    result, arrays = engine.lanes.execute(its)
                    shapes = [shape.dimensions for shape in result.output_shapes]
            times.append(time.monotonic_ns())
            answer = self._answer(call, in_order, arrays, shapes)
        except BaseException as error:
            self._statistics.note_failure(time.monotonic_ns() - begin)
            if self._is_closed and isinstance(error, DeviceUnavailable):
                raise ModelGone(f"model {self.name!r} is being unloaded") from error
            raise
        times.append(time.monotonic_ns())
        self._statistics.note(rows, times)
        return answer._replace(times=times)

    @property
    def is_decoupled(self) -> bool:
        """True if it answers a request many times, on ModelStreamInfer alone."""
        return self.config.stream is not None

    def answers(self, call: InferCall) -> Iterator[InferAnswer]:
        """Yield the results of a stream. Raise Refusal, ModelGone, and what `stream_results` and its results raise."""
        begin = time.monotonic_ns()
        try:
            yield from self._results(call, begin)
        except Exception as error:
            self._statistics.note_failure(time.monotonic_ns() - begin)
            if self._is_closed:
                raise ModelGone(f"model {self.name!r} is being unloaded") from error
            raise

    def _results(self, call: InferCall, begin: int) -> Iterator[InferAnswer]:
        terms = self.config.stream
        assert terms
        if call.slices:
            raise invalid(f"model {self.name!r} answers many times: its tensors come in messages, not in shared memory")
        given = self.ports.ordered(call.given, self.config.max_batch_size)
        inputs = tuple(port.array(each) for port, each in zip(self.ports.inputs, given, strict=True))
        plan = terms.plan(CONFIG_FILE, self.model, call.most)
        wanted = self._told(call, plan.told)
        its = self._engine(call.priority).compiled.burst(depth=DEPTH)
        ready = time.monotonic_ns()
        with its as burst, burst.repeated(plan, inputs, call.deadline) as stream:
            for result in stream:
                shapes = [array.shape for array in result.outputs]
                answer = self._answer(call, wanted, result.outputs, shapes)
                yield answer._replace(is_last=stream.ended_by is not None)
                del result, answer  # the device has its memory again
        done = time.monotonic_ns()
        self._statistics.note(1, [begin, ready, done, done])

    def _told(self, call: InferCall, told: Collection[int]) -> list[WantedTensor | None]:
        """Return what is wanted of each output that results have. Raise Refusal."""
        wanted = self.ports.wanted(call.wanted)
        found = [wanted.get(port.name) for port in self.ports.outputs]
        for n, port in enumerate(self.ports.outputs):
            if n not in told and call.wanted is not None and found[n]:
                raise invalid(f"output {port.name!r} is fed back: {CONFIG_FILE} has to name it in the parameter also")
        return [each if n in told else None for n, each in enumerate(found)]

    def _answer(
        self, call: InferCall, wanted: Sequence[WantedTensor | None], arrays: Sequence[Any], shapes: Sequence[Any]
    ) -> InferAnswer:
        """Answer in the order in which the client asked for its outputs."""
        found = {}
        for port, asked, array, shape in zip(self.ports.outputs, wanted, arrays, shapes, strict=True):
            if asked:
                place = asked.place
                if place:
                    place = place._replace(nbytes=port.nbytes(shape))
                values = None if place else port.answered(array)
                sizes = tuple(shape if values is None else values.shape)
                its = AnsweredTensor(port.name, port.kind, sizes, values, place=place, is_binary=asked.is_binary)
                if asked.classes:
                    labels, is_batched = self._labels.get(port.name, ()), bool(self.config.max_batch_size)
                    its = classified(its, asked.classes, labels, is_batched=is_batched)
                found[port.name] = its
        names = [each.name for each in call.wanted] if call.wanted is not None else list(found)
        return InferAnswer(self.name, self.version, call.id, [found[name] for name in names])

    def tensors(self) -> dict[str, list[dict[str, Any]]]:
        """Return inputs and outputs in the words of ModelMetadata."""
        return {
            "inputs": [port.metadata for port in self.ports.inputs],
            "outputs": [port.metadata for port in self.ports.outputs],
        }

    def statistics(self) -> dict[str, Any]:
        """Return the figures of ModelStatistics. Executions may be fewer than requests, which `serve` joins."""
        with self._lock:
            engines = list(self._engines.values())
        batches: Counter[int] = Counter()
        for engine in engines:
            if engine.joins:
                batches.update(engine.joins.stats()["batches"])
        joined = sum((rows - 1) * count for rows, count in batches.items())
        others = [each.counts(self) for each in self.elsewhere]
        return {"name": self.name, "version": self.version, **self._statistics.report(joined, others)}

    def burst_stats(self) -> list[dict[str, Any]]:
        """Return the statistics of the lanes' bursts: what was copied, and how long each stage took."""
        with self._lock:
            return [stats for engine in self._engines.values() for stats in engine.lanes.stats()]

    def close(self) -> None:
        """Finish the requests that it has, and free it."""
        with self._lock:
            self._is_closed = True
            engines, self._engines = list(self._engines.values()), {}
        for engine in engines:
            engine.close()


class InferenceCounts:
    """The numbers of requests, and where the time went. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows = self._last = self._succeeded = self._failed = self._failed_ns = 0
        self._ns = dict.fromkeys(_STAGES, 0)

    def note(self, rows: int, times: Sequence[int]) -> None:
        """Count a request. times: when it began, its inputs were ready, its result came, and the answer was made."""
        with self._lock:
            self._rows += rows
            self._succeeded += 1
            self._last = int(time.time() * 1000)
            for stage, begin, end in zip(_STAGES[1:], times, times[1:], strict=False):
                self._ns[stage] += end - begin

    def note_failure(self, ns: int) -> None:
        with self._lock:
            self._failed += 1
            self._failed_ns += ns

    def report(self, joined: int, others: Sequence[AnsweredElsewhere] = ()) -> dict[str, Any]:
        """Return the figures, with those of other processes. `joined`: requests that ran in the execution of another
        one.
        """
        with self._lock:
            succeeded = self._succeeded + sum(each.requests for each in others)
            ns = dict(self._ns)
            for each in others:
                for stage, more in zip(_STAGES[1:], each[3:6], strict=True):
                    ns[stage] += more
            stages = {stage: {"count": succeeded, "ns": taken} for stage, taken in ns.items()}
            success = {"count": succeeded, "ns": sum(ns.values())}
            failed = self._failed + sum(each.late for each in others)
            fail = {"count": failed, "ns": self._failed_ns + sum(each.late_ns for each in others)}
            return {
                "last_inference": max(self._last, *(each.last for each in others), 0),
                "inference_count": self._rows + sum(each.rows for each in others),
                "execution_count": max(0, succeeded - joined),
                "inference_stats": {"success": success, "fail": fail, **stages},
            }
