"""What one client has in the engine: models, bursts, plain paths and buffers."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Self

from burst import (
    BurstServer,
    GeneralFailure,
    InvalidArgument,
    Malformed,
    Memory,
    ResourceExhaustedTransient,
    StatusError,
    Terms,
)
from burst.channel import Channel, Message, close_all
from burst.turns import Flow, Ticket, waiters
from burst.wire import VERSIONS
from driver.deadlines import due
from driver.engine.buffer_binding import execution
from driver.engine.cache.compilations import CacheOwner, Declined
from driver.engine.device_memory import LoadedModel, ManagedBuffers
from driver.engine.fenced import FencedServer, check_outputs
from driver.engine.plain import PlainServer
from driver.engine.trace_memory import to_read, trace_memory, trace_of
from driver.options import PRIORITIES
from driver.protocol.prepare_arguments import PrepareArguments
from driver.protocol.rpc import Reply, take_fd
from fmq import Descriptor, FmqError, LifePage

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst import Request
    from burst.executor import Execution
    from burst.turns import FlowCounts
    from driver.engine.models import SharedModel
    from driver.engine.process import Engine


_log = logging.getLogger(__name__)
_MOST_ROLES = 256  # of one buffer
_WORTH = 2**20  # bytes of temporaries from which on it is worth binding a request again
_FEW = 4  # requests that a burst of one in flight sends in turn, and some more
_TRACES_AT_ONCE = 32  # descriptors in one answer


class EngineClient:
    """What one client has made here; all of it ends with its connection."""

    def __init__(self, engine: Engine, uid: int) -> None:
        self._engine, self.uid, self._limits = engine, uid, engine.limits
        engine.clients.add(self)
        engine.note(uid)
        self._numbers = count(1)
        self._models: dict[int, LoadedModel] = {}
        self._share = engine.share_of(uid)
        self._flows = [Flow(self._share, priority) for priority in range(len(PRIORITIES))]
        self._buffers = ManagedBuffers(engine.new_quota())
        self._bursts: set[BurstServer] = set()
        self._plain: list[PlainServer] = []
        self._fenced: FencedServer | None = None
        self.handlers: dict[str, Callable[..., Reply]] = {
            "load": self.load,
            "restore": self.restore,
            "stage": self.stage,
            "free": self.free,
            "channel": self.channel,
            "fenced": self.fenced,
            "burst": self.burst,
            "traces": self.traces,
            "census": self.census,
            "turns": self.turns,
            "allocate": self.allocate,
            "release": self.release,
            "copy_from": self.copy_from,
            "copy_to": self.copy_to,
        }

    def load(self, message: Message, where: list[int], *plain: object) -> Reply:
        """Prepares the model in the first descriptor; answers its number, and why it was not cached, if it was not.

        Cache files follow if the arguments say so, then memory for a trace if the client wants one.
        """
        self._check_models()
        arguments = PrepareArguments.from_wire(*plain)
        with _Descriptors(message.take_fds()) as fds, due(arguments.deadline):
            arguments = arguments._replace(trace=trace_of(fds, 1 + max(0, sum(arguments.cache_counts))))
            shared = self._engine.prepare(fds, where, arguments)
            declined = [self._save(shared, arguments, fds)] if arguments.cache_counts else []
        return Reply([self._loaded_as(shared, arguments.priority), *declined])

    def _save(self, shared: SharedModel, arguments: PrepareArguments, fds: list[int]) -> str:
        """Nothing that goes wrong here is a reason not to use the model."""
        try:
            self._engine.compilations.check(arguments.cache_counts, arguments.cache_token, fds)
            owner = CacheOwner(self.uid, arguments.cache_token)
            shared.save(self._engine.compilations.saving(owner, fds))
        except (InvalidArgument, Malformed, Declined, OSError) as error:
            _log.warning("a compilation was not cached: %s", error)
            return str(error) or type(error).__name__
        return ""

    def restore(self, message: Message, *plain: object) -> Reply:
        """Makes the model in these cache files ready; answers its number. A trace may follow them."""
        arguments = PrepareArguments.from_wire(*plain)
        self._check_models()
        with _Descriptors(message.take_fds()) as fds, due(arguments.deadline):
            arguments = arguments._replace(trace=trace_of(fds, sum(arguments.cache_counts)))
            given = self._engine.compilations.check(arguments.cache_counts, arguments.cache_token, fds)
            owner = CacheOwner(self.uid, arguments.cache_token)
            restored = self._engine.compilations.restored(owner, given, fds)
            try:
                shared = self._engine.restore(restored, arguments)
            except StatusError:
                raise
            except Exception as error:
                raise GeneralFailure(f"the device cannot restore the model: {error}") from error
        return Reply([self._loaded_as(shared, arguments.priority)])

    def _check_models(self) -> None:
        self._limits.check("client_models", len(self._models), "close prepared models")

    def _loaded_as(self, shared: SharedModel, priority: int) -> int:
        number = next(self._numbers)
        self._models[number] = LoadedModel(number, shared, priority)
        return number

    def stage(self, _: Message, number: int) -> Reply:
        """How often a prepared model was replaced by something better."""
        return Reply([self._loaded(number).shared.stage])

    def free(self, _: Message, number: int) -> Reply:
        """Forgets a prepared model and the requests that are bound to it; a burst on it keeps it."""
        self._models.pop(number, None)
        self._forget_plain_plans()
        return Reply()

    def _forget_plain_plans(self) -> None:
        for plain in list(self._plain):
            plain.forget_plans()
        if self._fenced:
            self._fenced.forget_plans()

    def model(self, number: int) -> Callable[[Request], Execution]:
        """Binds requests to a prepared model. Raises InvalidArgument."""
        loaded = self._loaded(number)

        def bind(request: Request) -> Execution:
            bound: Execution = execution(loaded, request, self._buffers, self._engine.pace.for_others)
            if self._is_large() or any(worker.bound >= _FEW for worker in self.workers()):
                self._engine.idle.begin()
            return bound

        return bind

    def _fenced_model(self, number: int) -> Callable[[Request], Execution]:
        """The same for fenced executions, whose outputs have to be known."""
        loaded, bind = self._loaded(number), self.model(number)

        def bind_checked(request: Request) -> Execution:
            bound = bind(request)
            check_outputs(loaded.model, request)
            return bound

        return bind_checked

    def flow(self, number: int) -> Flow:
        """In which executions of a prepared model have their turn. Raises InvalidArgument."""
        return self._flows[self._loaded(number).priority]

    def turns(self, _: Message) -> Reply:
        """Slots, who waits, the weight of its account, and what has become of its executions, by priority."""
        return Reply([self._engine.queue.slots, waiters(), self._share.weight, self.counts()])

    def counts(self) -> list[FlowCounts]:
        """Of its executions, by priority."""
        return [flow.counts() for flow in self._flows]

    def _loaded(self, number: int) -> LoadedModel:
        try:
            return self._models[number]
        except (KeyError, TypeError):
            raise InvalidArgument(
                f"prepared model {number!r:.20}: this client has none with that number; it may have been closed"
            ) from None

    def allocate(
        self, _: Message, dimensions: list[int], numbers: list[int], inputs: list[Any], outputs: list[Any]
    ) -> Reply:
        """A buffer for roles [model index, input or output index, frequency]; answers its token."""
        if not all(type(d) is int and 0 <= d < 2**32 for d in dimensions):
            raise Malformed(f"dimensions={dimensions!r:.80}: each must be an integer of 32 bits, without a sign")
        if len(numbers) + len(inputs) + len(outputs) > _MOST_ROLES:
            raise InvalidArgument(f"{len(inputs) + len(outputs)} roles; at most {_MOST_ROLES} with their models")
        models = [self._loaded(number) for number in numbers]
        return Reply([self._buffers.allocate(tuple(dimensions), models, inputs, outputs).token])

    def release(self, _: Message, token: int) -> Reply:
        """Frees a buffer, and whatever was bound to it."""
        self._buffers.release(token)
        self.forget_plans()
        return Reply()

    def forget_plans(self) -> None:
        """What requests were bound to has changed."""
        self._forget_plain_plans()
        for burst in list(self._bursts):
            burst.forget_plans()

    def workers(self) -> list[BurstServer | PlainServer]:
        """What answers its requests, but for the fenced ones."""
        return [*self._plain, *self._bursts]

    def copy_from(self, message: Message, token: int, dimensions: list[int], plain: object) -> Reply:
        """The memory in the descriptor becomes the value of a buffer."""
        memory = Memory.from_wire(plain, take_fd(message))
        self._buffers[token].copy_from(memory, tuple(dimensions))
        return Reply()

    def copy_to(self, message: Message, token: int, plain: object) -> Reply:
        """The value of a buffer fills the memory in the descriptor."""
        self._buffers[token].copy_to(Memory.from_wire(plain, take_fd(message)))
        return Reply()

    def holders(self) -> list[BurstServer | PlainServer]:
        """Of those, who hold what is worth giving back: many requests, or large temporaries."""
        most = 0 if self._is_large() else _FEW
        return [worker for worker in self.workers() if worker.bound > most]

    def _is_large(self) -> bool:
        return self._buffers.quota.taken >= _WORTH

    def channel(self, _: Message) -> Reply:
        """A plain path of its own: one call at a time each, so a client opens as many as it wants in flight."""
        self._plain = [server for server in self._plain if server.is_alive]
        self._limits.check("client_connections", len(self._plain), "make fewer calls at once")
        (near, far), life = Channel.pair(), LifePage()
        server = PlainServer(near, self.model, self.flow, life.close)
        self._plain.append(server)
        server.start()
        return Reply([], [_handed_over(far), os.dup(life.fd)])

    def fenced(self, _: Message) -> Reply:
        """A connection for fenced executions; a client has one at a time."""
        if self._fenced and self._fenced.is_alive:
            raise ResourceExhaustedTransient(
                "this client already has a connection for fenced executions; close it first"
            )
        (near, far), life = Channel.pair(), LifePage()
        self._fenced = FencedServer(near, self._fenced_model, self.flow, life.close, self._limits)
        self._fenced.start()
        return Reply([], [_handed_over(far), os.dup(life.fd)])

    def burst(
        self, message: Message, number: int, requests: object, results: object, spin: float | str, versions: list[int]
    ) -> Reply:
        """Configures a burst: two queues, the callback, the context, and a trace if the client likes, in this order.

        Answers the wire version.
        """
        if len(message.fds) not in {4, 5} or not (spin == "adaptive" or 0 <= spin <= 10):  # type: ignore[operator]
            raise Malformed('a burst needs 4 or 5 descriptors, and 0 to 10 seconds of spinning or "adaptive"')
        version = max(set(versions) & set(VERSIONS), default=0)
        if not version:
            raise InvalidArgument(f"versions {versions!r:.80}: this device speaks {list(VERSIONS)}")
        bind = self.model(number)
        self._limits.check("client_bursts", len(self._bursts), "close bursts")
        with ExitStack() as undo:
            callback = undo.enter_context(Channel.from_fd(message.fds.pop(2)))
            context = undo.enter_context(Channel.from_fd(message.fds.pop(2)))
            try:
                server = BurstServer(
                    self._queue(requests, message),
                    self._queue(results, message),
                    callback,
                    bind,
                    terms=Terms(version, trace_memory(message.fds), spin),
                    ticket=Ticket(self.flow(number)),
                )
            except FmqError as error:
                raise GeneralFailure(f"the burst's queues cannot be used: {error}") from error
            undo.pop_all()
        server.trace.page.device.priority = 1 + self._loaded(number).priority
        self._start(server, context)
        return Reply([version])

    def _queue(self, wire: object, message: Message) -> Descriptor:
        """In the first descriptor of a message. Raises ResourceExhaustedPersistent, InvalidDescriptor."""
        queue = Descriptor.from_wire(wire, [message.fds.pop(0)], sealed=False)
        self._limits.check_size("burst_elements", queue.capacity, "use shorter queues")
        return queue

    def traces(self, _: Message, start: int) -> Reply:
        """The notes of bursts, to be read: some from number `start` on, and how many there are.

        Of the client's own account alone: whoever has a descriptor of a memfd can open it again for writing. The
        device's account and root see all.
        """
        found = self._engine.traces_of(self._sight)
        return Reply([len(found)], [to_read(memory) for memory in found[start : start + _TRACES_AT_ONCE]])

    @property
    def _sight(self) -> int | None:
        """Whose notes it may read: its own account's, or everybody's."""
        return None if self.uid in {0, os.getuid()} else self.uid

    def census(self, _: Message) -> Reply:
        """How many clients and bursts there are of those whose notes it may read; and a life page of this process."""
        census = self._engine.census(self._sight)
        return Reply([], [to_read(census.memory), os.dup(census.life.fd)])

    def _start(self, server: BurstServer, context: Channel) -> None:
        self._engine.traces[server] = self.uid, server.trace.memory

        def on_end() -> None:
            self._engine.traces.pop(server, None)
            self._bursts.discard(server)
            self._engine.contexts.discard(context)
            context.close()
            self._engine.count_burst(-1)
            self._engine.note(self.uid, changes=1)

        server.on_end = on_end
        self._bursts.add(server)
        self._engine.count_burst(+1)
        self._engine.note(self.uid, changes=1)
        self._engine.contexts.add(context, partial(_context_message, server), server.stop)
        server.start()

    def close(self) -> None:
        """The client is gone."""
        self._engine.clients.discard(self)
        self._engine.note(self.uid)
        for burst in list(self._bursts):
            burst.stop()
        for plain in self._plain:
            plain.stop()
        if self._fenced:
            self._fenced.stop()
            self._fenced = None
        # The handlers refer to us, as above.
        for held in (self._models, self._buffers, self._plain, self.handlers):
            held.clear()


class _Descriptors(list[int]):
    """Closed at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        close_all(self)


def _context_message(server: BurstServer, message: Message) -> None:
    match message.body:
        case ["free_memory", int(slot)]:
            server.free_memory(slot)
        case _:
            raise Malformed("the only message of a context is free_memory(slot)")


def _handed_over(channel: Channel) -> int:
    """A descriptor of its own for sending; the channel object is closed."""
    with channel:
        return os.dup(channel.fileno())
