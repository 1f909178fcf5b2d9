"""The engine of a device: prepared models, burst listeners and the plain path, and nothing that holds the GIL for long.

A busy Python thread beside a listener would turn its tenths of a millisecond into five, so models are decoded and
prepared here in small steps with a pause after each while a burst lives, and the garbage collector runs only when none
does.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import warnings
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from burst import BurstServer, GeneralFailure, InvalidArgument, Malformed, Memory, PeerDied, Terms, Trace
from burst.channel import Channel, ChannelLoop, Message
from burst.trace import blamed, note_crashes
from burst.wire import VERSIONS
from driver.constants import Kept, Models
from driver.devices import device_class
from driver.limits import limits
from driver.managed import Loaded, ManagedBuffers, Quota
from driver.managed_request import execution
from driver.plain import PlainServer
from driver.rpc import Reply, serve, take_fd
from fmq import Descriptor, FmqError, LifePage
from fmq.region import guard

if TYPE_CHECKING:
    from collections.abc import Callable

    from burst import Request
    from burst.executor import Execution
    from driver.interface import Device

_log = logging.getLogger(__name__)
_MOST_ROLES = 256  # of one buffer
_TRACES_AT_ONCE = 32  # descriptors in one answer
# Seconds. A request that meets a slice of work waits for its end, so slices have to be short and rare: with these, a
# burst that runs back to back meets one in some 200 requests, which leaves its p99 alone.
_WORK, _PAUSE = 100e-6, 1e-3


class Pacer:
    """Lets running bursts through while something long goes on in Python."""

    def __init__(self) -> None:
        self.bursts = 0
        self._since = 0.0

    def __call__(self) -> None:
        """Pauses now and then, while a burst lives."""
        if self.bursts:
            self._pause()

    def for_others(self) -> None:
        """The same on behalf of one burst: pauses while another lives."""
        if self.bursts > 1:
            self._pause()

    def _pause(self) -> None:
        if time.perf_counter() - self._since > _WORK:
            time.sleep(_PAUSE)  # a real sleep: giving up the GIL only to take it again would let nobody in
            self._since = time.perf_counter()


class Engine:
    """What all clients share."""

    def __init__(self, name: str, service: Channel) -> None:
        self.device: Device = device_class(name)()
        self._service, self._limits = service, limits()
        self._quota = Quota(self._limits.device_bytes)
        self.pace, self._models = Pacer(), Models(self.device)
        self.contexts = ChannelLoop("burst-contexts")
        self.traces: dict[BurstServer, Memory] = {}  #: of all bursts
        self._preparing, self._counting = threading.Lock(), threading.Lock()

    def prepare(self, fd: int, where: object, trace: Trace | None) -> Kept:
        """One at a time, so that the pauses are not filled by another's work. Owns `fd`; notes a crash in the trace."""
        with self._preparing, blamed(trace):
            return self._models.prepare(fd, where, self.pace)

    def new_quota(self) -> Quota:
        """Of one more client."""
        return Quota(self._limits.client_bytes, self._quota)

    def count_burst(self, change: int) -> None:
        """One more or one less. The last one out cleans up: while a burst lives, garbage is not collected."""
        with self._counting:
            self.pace.bursts += change
            if not self.pace.bursts:
                gc.collect()

    def serve(self, channel: Channel) -> None:
        """One client, until its connection ends."""
        client = Client(self)
        try:
            with channel:
                serve(channel, client.handlers)
        finally:
            self.end_with_service()
            client.close()

    def end_with_service(self) -> None:
        """Ends the process if the service is gone: then nobody needs us, and what clients wait for ends with our life
        words, so that they know that we died. Who sees a client's connection end asks here whether that is the reason.
        """
        if self._service.peer_has_died:
            os._exit(0)


class Client:
    """What one client has made here; all of it ends with its connection."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = count(1)
        self._models: dict[int, Loaded] = {}
        self._buffers = ManagedBuffers(engine.new_quota())
        self._bursts: set[BurstServer] = set()
        self._plain: list[PlainServer] = []
        self.handlers: dict[str, Callable[..., Reply]] = {
            "load": self.load,
            "free": self.free,
            "channel": self.channel,
            "burst": self.burst,
            "traces": self.traces,
            "allocate": self.allocate,
            "release": self.release,
            "copy_from": self.copy_from,
            "copy_to": self.copy_to,
        }

    def load(self, message: Message, where: object) -> Reply:
        """Prepares the model in the descriptor; answers its number. A second descriptor is memory for a trace."""
        number, more = next(self._numbers), message.fds[1:]
        del message.fds[1:]
        memory = _trace(more)
        if memory:
            memory.close()  # what is mapped stays
        kept = self._engine.prepare(take_fd(message), where, Trace(memory) if memory else None)
        self._models[number] = Loaded(number, kept)
        return Reply([number])

    def free(self, _: Message, number: int) -> Reply:
        """Forgets a prepared model and the requests that are bound to it; a burst on it keeps it."""
        self._models.pop(number, None)
        for plain in self._plain:
            plain.forget_plans()
        return Reply()

    def model(self, number: int) -> Callable[[Request], Execution]:
        """Binds requests to a prepared model. Raises InvalidArgument."""
        loaded = self._loaded(number)
        return lambda request: execution(loaded, request, self._buffers, self._engine.pace.for_others)

    def _loaded(self, number: int) -> Loaded:
        try:
            return self._models[number]
        except (KeyError, TypeError):
            raise InvalidArgument(
                f"prepared model {number!r:.20}: there is none of that number; it was closed"
            ) from None

    def allocate(
        self, _: Message, dimensions: list[int], numbers: list[int], inputs: list[Any], outputs: list[Any]
    ) -> Reply:
        """A buffer for roles [model index, input or output index, frequency]; answers its token."""
        if not all(type(d) is int and 0 <= d < 2**32 for d in dimensions):
            raise Malformed(f"dimensions={dimensions!r:.80}: whole numbers of 32 bits")
        if len(numbers) + len(inputs) + len(outputs) > _MOST_ROLES:
            raise InvalidArgument(f"{len(inputs) + len(outputs)} roles; at most {_MOST_ROLES} with their models")
        models = [self._loaded(number) for number in numbers]
        return Reply([self._buffers.allocate(tuple(dimensions), models, inputs, outputs).token])

    def release(self, _: Message, token: int) -> Reply:
        """Frees a buffer, and whatever was bound to it."""
        self._buffers.release(token)
        for plain in list(self._plain):
            plain.forget_plans()
        for burst in list(self._bursts):
            burst.forget_plans()
        return Reply()

    def copy_from(self, message: Message, token: int, dimensions: list[int], plain: object) -> Reply:
        """The memory in the descriptor becomes the value of a buffer."""
        memory = Memory.from_wire(plain, take_fd(message))
        self._buffers[token].copy_from(memory, tuple(dimensions))
        return Reply()

    def copy_to(self, message: Message, token: int, plain: object) -> Reply:
        """The value of a buffer fills the memory in the descriptor."""
        self._buffers[token].copy_to(Memory.from_wire(plain, take_fd(message)))
        return Reply()

    def channel(self, _: Message) -> Reply:
        """A plain path of its own: one call at a time each, so a client opens as many as it wants in flight."""
        near, far = Channel.pair()
        life = LifePage()
        self._plain = [server for server in self._plain if server.is_alive]
        server = PlainServer(near, self.model, life.close)
        self._plain.append(server)
        server.start()
        return Reply([], [_handed_over(far), os.dup(life.fd)])

    def burst(
        self, message: Message, number: int, requests: object, results: object, spin: float | str, versions: list[int]
    ) -> Reply:
        """Configures a burst: two queues, the callback, the context, and a trace if the client likes, in this order.

        Answers the wire version.
        """
        if len(message.fds) not in {4, 5} or not (spin == "adaptive" or 0 <= spin <= 10):  # type: ignore[operator]
            raise Malformed(
                'a burst needs four or five descriptors, and from 0 to 10 seconds of spinning or "adaptive"'
            )
        version = max(set(versions) & set(VERSIONS), default=0)
        if not version:
            raise InvalidArgument(f"versions {versions!r:.80}: this device speaks {list(VERSIONS)}")
        bind = self.model(number)
        with ExitStack() as undo:
            callback = undo.enter_context(Channel.from_fd(message.fds.pop(2)))
            context = undo.enter_context(Channel.from_fd(message.fds.pop(2)))
            try:
                server = BurstServer(
                    Descriptor.from_wire(requests, [message.fds.pop(0)], sealed=False),
                    Descriptor.from_wire(results, [message.fds.pop(0)], sealed=False),
                    callback,
                    bind,
                    terms=Terms(version, _trace(message.fds), spin),
                )
            except FmqError as error:
                raise GeneralFailure(f"the burst's queues cannot be used: {error}") from error
            undo.pop_all()
        self._start(server, context)
        return Reply([version])

    def traces(self, _: Message, start: int) -> Reply:
        """The notes of all clients' bursts, to be read: some from number `start` on, and how many there are."""
        found = list(self._engine.traces.values())
        paths = [f"/proc/self/fd/{memory.fd}" for memory in found[start : start + _TRACES_AT_ONCE]]
        return Reply([len(found)], [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths])

    def _start(self, server: BurstServer, context: Channel) -> None:
        self._engine.traces[server] = server.trace.memory

        def on_end() -> None:
            self._engine.traces.pop(server, None)
            self._bursts.discard(server)
            self._engine.contexts.discard(context)
            context.close()
            self._engine.count_burst(-1)

        server.on_end = on_end
        self._bursts.add(server)
        self._engine.count_burst(+1)
        self._engine.contexts.add(context, partial(_context_message, server), server.stop)
        server.start()

    def close(self) -> None:
        """The client is gone."""
        for burst in list(self._bursts):
            burst.stop()
        for plain in self._plain:
            plain.stop()
        # The handlers refer to us, as above.
        for held in (self._models, self._buffers, self._plain, self.handlers):
            held.clear()


def _trace(fds: list[int]) -> Memory | None:
    """Its descriptor is kept, for `traces`."""
    try:
        return Memory.adopt(fds.pop(), Trace.nbytes) if fds else None
    except (FmqError, OSError) as error:
        raise Malformed(f"the trace cannot be used: {error}") from error


def _context_message(server: BurstServer, message: Message) -> None:
    match message.body:
        case ["free_memory", int(slot)]:
            server.free_memory(slot)
        case _:
            raise Malformed("a context takes free_memory(slot)")


def _handed_over(channel: Channel) -> int:
    """A descriptor of its own for sending; the channel object is closed."""
    with channel:
        return os.dup(channel.fileno())


def main(name: str, service: Channel) -> None:
    """What the process does from its beginning to its end. `service`: the channel to the other one."""
    warnings.simplefilter("ignore")  # numpy's, of infinities that a client computes
    gc.disable()
    note_crashes()
    guard()
    engine = Engine(name, service)
    life = LifePage()
    ready = service.receive()
    service.watch(take_fd(ready))
    service.send([ready.body[0], 0], [life.fd])
    while True:
        try:
            message = service.receive()
        except PeerDied:
            os._exit(0)  # as in end_with_service
        client = Channel.from_fd(take_fd(message))
        threading.Thread(target=engine.serve, args=(client,), name="client", daemon=True).start()
