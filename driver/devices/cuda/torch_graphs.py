"""CUDA graphs of PyTorch's programs: the kernels of a request that has come again are launched by one call.

The protocol, for each execution, whose arguments lie at the same addresses of the GPU in every run:

1. Its first run adds kernels to the lane's stream one by one. A request that comes once is not worth a recording.
2. Its second run does so, too, so that this thread has the handles of cuBLAS and cuDNN, and the kernels are loaded.
   After its answer has been added, the same calls are recorded, which computes nothing: that answer does not wait.
3. Later runs replay the recording on the lane's stream. The copies of the results are part of it; copies from and to
   the client's memory, and the answer, are the lane's as before.

What keeps recordings apart from the rest of the process:

* They are recorded on a stream that nothing else uses or asks for its state. It has the lane's priority, which PyTorch
  has kernels keep when they are replayed.
* Other threads go on: calls that a recording forbids are forbidden to its thread alone (`thread_local`). In that
  thread Python collects no garbage meanwhile, which might free memory of the GPU. Two calls break a recording from any
  thread: one that waits for the whole context, of which there is none here, and one on the default stream, for which
  streams of ours do not wait. Before 2.14, PyTorch may have random numbers fail in all threads while one records, and
  may not recover from a recording that fails (pytorch #172390, #180395, #190308): nothing is recorded there.
* The graphs of a lane share memory for what they compute: the lane runs one after another, and nothing of it is used
  after its run. Graphs of other lanes, which may run at the same time, have memory of their own. PyTorch takes no new
  graph into memory whose graphs have all gone, so the next one gets new memory.
* One recording at a time in the process; an execution that comes meanwhile is recorded in a later run.

Limits: a program that asks the GPU for values or sizes while it runs (`torch.cond`, `nonzero`) is not recorded, nor one
that takes random numbers, as replays of two lanes may take the same ones, nor one that returns memory of the CPU, which
is free before a replay reads it. A recording that fails is not tried again for its execution. A graph that cannot be
launched is dropped. All these go on as in their first run.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from driver.devices.lowering.errors import in_words
from driver.devices.torch import torch_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from driver.devices.cuda.lane import CudaLane

_log = logging.getLogger(__name__)
MOST = 32
"""Graphs of a lane: CUDA keeps memory of the GPU for each, which no ledger counts."""
_PLAIN_RUNS = 2
_BRANCHES = "cond", "while_loop"
_WAITING_TAGS = "data_dependent_output", "dynamic_output_shape", "cudagraph_unsafe"
_PYTORCH = 2, 14


def obstacle_to_graphs(program: Any) -> str | None:
    """Return why an exported program cannot be recorded; None: no reason is known."""
    torch = torch_module()
    if tuple(map(int, torch.__version__.split(".")[:2])) < _PYTORCH:
        return f"they need PyTorch 2.14, and this is {torch.__version__}"
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            operator = node.target
            if isinstance(operator, torch._ops.HigherOrderOperator) and operator.name() in _BRANCHES:
                return f"{operator.name()} chooses what to run by a value"
            if isinstance(operator, torch._ops.OpOverload):
                if _waits(operator):
                    return f"{operator} waits for a value or a size"
                if _draws(node):
                    return f"{operator} takes random numbers"
    return None


def _waits(operator: Any) -> bool:
    tags = torch_module().Tag
    return any(getattr(tags, name, None) in operator.tags for name in _WAITING_TAGS)


def _draws(node: Any) -> bool:
    """Return True if it takes random numbers: dropout does not where it is off, nor attention without dropout."""
    operator = node.target
    if torch_module().Tag.nondeterministic_seeded not in operator.tags:
        return False
    arguments = operator._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments}
    given.update(zip(given, node.args, strict=False), **node.kwargs)
    return given.get("train", given.get("training")) is not False and given.get("dropout_p") != 0


RECORDING = threading.Lock()
"""Held while something is recorded."""


def _record(graph: Any, pool: Any, work: Callable[[], None]) -> None:
    """Record what `work` adds to the current stream. Raise what `work` and PyTorch raise."""
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        work()
    except Exception:
        with suppress(Exception):  # which says only that the recording failed
            graph.capture_end()
        raise
    graph.capture_end()


class LaneGraphs:
    """The stream, the memory and the number that graphs of one lane share."""

    def __init__(self, lane: CudaLane, place: str) -> None:
        """Make a stream. Raise CudaFailed, and what PyTorch raises."""
        torch = torch_module()
        self._own = lane.gpu.context.stream(lane.priority)
        self._stream = torch.cuda.ExternalStream(self._own.address, device=place)
        self._pool: Any = None
        self._live: weakref.WeakSet[Any] = weakref.WeakSet()  # graphs

    def recorded(self, work: Callable[[], None], plan: PlanGraph) -> Any:
        """Return a graph of what `work` adds; None: another thread is recording. Raise what PyTorch raises."""
        torch = torch_module()
        live = list(self._live)  # which keeps the pool in use meanwhile
        if len(live) >= MOST:
            plan.is_refused = True
            return None
        if not RECORDING.acquire(blocking=False):
            return None
        try:
            if not live:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self._stream), _no_garbage_collection():
                _record(graph, self._pool, work)
        finally:
            RECORDING.release()
        self._live.add(graph)
        return graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class PlanGraph:
    """The graph of one execution, once there is one. Called with the lane's lock held."""

    def __init__(self, graphs: LaneGraphs | None) -> None:
        """`graphs`: of its lane; None: nothing is recorded."""
        self._graphs = graphs
        self._graph: Any = None
        self._runs = 0
        self.is_refused = False  #: nothing will be recorded any more

    def run(self, work: Callable[[], None]) -> None:
        """Add the work to the current stream. Raise what `work` raises."""
        if self._graph is None or not self._is_replayed():
            work()
        self._runs += 1

    def record(self, work: Callable[[], None]) -> None:
        """Record the work for later runs, if it is time to. A failure is logged."""
        if self._graphs is None or self._graph is not None or self.is_refused or self._runs < _PLAIN_RUNS:
            return
        try:
            self._graph = self._graphs.recorded(work, self)
        except Exception as error:  # noqa: BLE001 (the request is served without it)
            self.refuse(in_words(error))

    def refuse(self, why: str) -> None:
        """Record nothing any more, and log why."""
        if self._graphs is not None and not self.is_refused:
            _log.warning("a request runs without a CUDA graph: %s", why)
        self.is_refused = True

    def _is_replayed(self) -> bool:
        """Launch the graph; return False if that failed, and then nothing of it runs."""
        try:
            self._graph.replay()
        except Exception as error:  # noqa: BLE001 (frameworks share no class of errors)
            _log.warning("a CUDA graph could not be launched, and is dropped: %s", in_words(error))
            self._graph, self.is_refused = None, True
            return False
        return True
