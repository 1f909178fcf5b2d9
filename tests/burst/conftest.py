"""What the tests of burst share: a small device, bursts within one process and across two, and raw clients."""

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import warnings
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from waiting import PATIENCE

import fmq
from burst import (
    Accepted,
    BurstOffer,
    Controller,
    ErrorStatus,
    ExecutionBurstServer,
    GeneralFailure,
    InvalidArgument,
    Memory,
    Offer,
    OutputShape,
    PeerDied,
    Request,
    RequestArgument,
    Result,
    Trace,
)
from burst._core import lib
from burst.channel import Channel, ChannelLoop
from burst.controller import Packet
from fmq.region import guard

sys.path.insert(0, str(Path(__file__).parent))

from burst_clients import Lender, RawClient

_contexts = ChannelLoop("test-contexts")
os.register_at_fork(after_in_child=_contexts.forget)


class Increment:
    """An execution: the output's bytes are the input's plus one."""

    is_static, native = True, None

    def __init__(self, request):
        (source,), (target,) = request.inputs, request.outputs
        try:
            self.source, self.target = (
                request.pools[a.pool].asarray(np.uint8, a.length, a.offset) for a in (source, target)
            )
        except ValueError as error:
            raise InvalidArgument(str(error)) from error
        self.shapes = (OutputShape((target.length,)),)

    def run(self):
        np.add(self.source, 1, out=self.target)

    @staticmethod
    def request(memory, n=4):
        """n bytes, and behind them room for the result."""
        return Request((RequestArgument(length=n),), (RequestArgument(offset=n, length=n),), (memory,))


class Keeper:
    """A BurstExecutorWithCache that increments as `Increment` does, and notes what it is asked to do."""

    def __init__(self, room=None):
        self.entries, self.calls, self._room = {}, [], room
        self._busy = threading.Lock()  # the methods are called one at a time

    @contextlib.contextmanager
    def _alone(self, *call):
        assert self._busy.acquire(blocking=False), f"{call} beside another call"
        try:
            self.calls.append(call)
            yield
        finally:
            self._busy.release()

    def is_cache_entry_present(self, slot):
        with self._alone("present", slot):
            return slot in self.entries

    def add_cache_entry(self, slot, memory):
        with self._alone("add", slot):
            assert slot not in self.entries
            if self._room and len(self.entries) >= self._room:
                del self.entries[next(iter(self.entries))]  # of its own accord: the oldest
            self.entries[slot] = memory

    def remove_cache_entry(self, slot):
        with self._alone("remove", slot):
            self.entries.pop(slot, None)

    def execute(self, request, slots, measure, deadline, loop_timeout):
        with self._alone("execute", *slots):
            assert not request.pools
            self.asked = measure, deadline, loop_timeout
            execution = Increment(request._replace(pools=tuple(self.entries[slot] for slot in slots)))
            self.work()
            execution.run()
            return Result(ErrorStatus.NONE, output_shapes=execution.shapes)

    def work(self):
        """In the midst of an execution."""

    def called(self, name):
        """The arguments of all calls of a method."""
        return [arguments for called, *arguments in self.calls if called == name]


class Gate:
    """For executions that wait: `entered` and `open` are events."""

    def __init__(self):
        self.entered, self.open = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self):
        self.entered.release()
        assert self.open.acquire(timeout=PATIENCE)


class Host:
    """Stands in for a device's process: as a Configure it starts `make(offer)` on what a Controller offers."""

    def __init__(self, make, spin, on_end=lambda: None):
        self._make, self._spin, self._tell = make, spin, on_end
        self.servers = []
        self.freed, self.ended = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, offer):
        ends = [Channel.from_fd(os.dup(channel.fileno())) for channel in (offer.callback, offer.context)]
        offered = BurstOffer(
            *(offer.requests, offer.results, ends[0]),
            trace=Trace(offer.trace),
            version=offer.versions[0],
            spin=self._spin,
            on_end=partial(self._on_end, ends[1]),
        )
        try:
            server = self._make(offered)
        except BaseException:
            for end in ends:
                end.close()
            raise
        self.servers.append(server)
        _contexts.add(ends[1], partial(self._on_message, server), server.stop)
        accepted = Accepted(offered.version, os.dup(offered.life.fd))
        server.start()
        return accepted

    def _on_message(self, server, message):
        _, *slots = message.body
        server.free_memory(slots)
        self.freed.release(len(slots))

    def _on_end(self, context):
        _contexts.discard(context)
        context.close()
        self.ended.release()
        self._tell()

    @property
    def server(self):
        """The one that was made last."""
        return self.servers[-1]

    def wait_freed(self):
        """Until the device has heard of one more free_memory."""
        assert self.freed.acquire(timeout=PATIENCE)

    def wait_ended(self, timeout=PATIENCE):
        """Until one more burst has ended and freed everything."""
        assert self.ended.acquire(timeout=timeout), "the burst goes on"
        for server in self.servers:
            server.join(PATIENCE)

    def close(self):
        for server in self.servers:
            server.stop()
            server.join(PATIENCE)


def binding(bind):
    """Makes servers whose requests are bound with `bind`."""
    return lambda offer: ExecutionBurstServer.create(replace(offer, bind=bind))


def _relay(client, message):
    client()._hand_over(message)


class Asked(Controller):
    """A Controller that notes what the device asked its callback for, and may answer something else: what the device
    has is the end of a relay to the callback.
    """

    def __init__(self, configure, *args, answer=None, **kwargs):
        self.asked, self.answer, self.answered = [], answer, threading.Semaphore(0)
        self._callback, self._own = None, None
        super().__init__(partial(self._relayed, configure), *args, **kwargs)

    def _relayed(self, configure, offer):
        self._callback, far = Channel.pair()
        self._own = Channel.from_fd(os.dup(offer.callback.fileno()))
        _contexts.add(self._callback, partial(_relay, weakref.ref(self)), self._callback.close)
        with far:
            return configure(offer._replace(callback=far))

    def _hand_over(self, message):
        self.asked.append(message.body[1])
        if self.answer is None:
            with contextlib.closing(self._own.call(message.body)) as answer:
                self._callback.send_raw(answer.raw, answer.fds)
        else:
            self.answer(self, message.body[1])
        self.answered.release()

    @property
    def _context(self):
        """The client's end of the burst context, once more."""
        return Channel.from_fd(os.dup(lib.burst_sockets_context(self._sockets)))

    def close(self):
        super().close()
        if self._callback:
            _contexts.discard(self._callback)
            self._callback.close()
            self._own.close()

    def run(self, memory, n=4, **options):
        """One Increment."""
        return self.send(self.encode(Increment.request(memory, n)), **options)

    def send_raw(self, raw, measure=False, **options):
        """Any bytes."""
        return self.send(Packet(raw, measure, self._caller), **options)


def offer(channel, burst):
    """A Configure that asks the process at the other end of `channel`; see `accept`."""
    (request_wire, request_fds), (result_wire, result_fds) = burst.requests.to_wire(), burst.results.to_wire()
    fds = [*request_fds, *result_fds, burst.trace.fd, burst.callback.fileno(), burst.context.fileno()]
    message = channel.call([[request_wire, result_wire], burst.versions], fds, PATIENCE)
    (answer,) = message.body
    if isinstance(answer, str):
        raise GeneralFailure(answer)
    return Accepted(answer, *message.take_fds())


def accept(message, channel, host):
    """Serves the message of an `offer`."""
    try:
        with Channel.from_fd(message.fds.pop()) as context, Channel.from_fd(message.fds.pop()) as callback:
            wires, versions = message.body
            queues = [fmq.Descriptor.from_wire(wire, [message.fds.pop(0)], sealed=False) for wire in wires]
            trace = Memory.from_wire(["ashmem", Trace.nbytes, True], message.fds.pop(0))
            accepted = host(Offer(*queues, trace, callback, context, versions))
    except fmq.FmqError as error:
        channel.send([str(error)])
    else:
        channel.send([accepted.version], [accepted.life])
        os.close(accepted.life)
    finally:
        message.close()


class Child:
    """A process forked off that has nothing of ours open but its end of `channel` and the memories `keep`."""

    def __init__(self, function, keep):
        self.channel, far = Channel.pair()
        with far, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork in a process with threads
            gc.disable()
            self.pid = os.fork()
            if not self.pid:
                gc.freeze()  # the child must not finalize what is ours
                self._run(function, far, {0, 1, 2, far.fileno(), *(pool.fd for pool in keep)})
            gc.enable()  # and what was frozen here after the collection of the tests stays frozen

    @staticmethod
    def _run(function, channel, keep):
        gc.disable()
        logging.disable()  # pytest would keep every record, with the objects in its traceback
        try:
            for fd in {int(name) for name in os.listdir("/proc/self/fd")} - keep:
                with contextlib.suppress(OSError):
                    os.close(fd)
            function(channel)
        except PeerDied:
            os._exit(0)
        finally:
            os._exit(1)

    def wait_told(self):
        """The next message from the child."""
        message = self.channel.receive(PATIENCE)
        body = message.body
        message.close()
        return body

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def holdings(self):
        """What it has once all of its bursts have ended: descriptors, threads, and mappings of shared memory."""
        self.channel.call([], timeout=PATIENCE)
        with open(f"/proc/{self.pid}/maps") as lines:
            shared = sum("/memfd:" in line for line in lines)
        return len(os.listdir(f"/proc/{self.pid}/fd")), len(os.listdir(f"/proc/{self.pid}/task")), shared

    def status(self, key):
        """A line of its /proc status, in bytes: "VmRSS", "VmHWM"."""
        with open(f"/proc/{self.pid}/status") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

    def close(self):
        """Kills it if need be, and waits until it is gone."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.channel.close()


def mappings(memory):
    """How often this process has mapped a memory."""
    inode = str(os.fstat(memory.fd).st_ino)
    with open("/proc/self/maps") as lines:
        return sum(line.split()[4] == inode for line in lines)


@pytest.fixture
def closing():
    """Closes what a test made, last things first."""
    with contextlib.ExitStack() as stack:
        yield lambda thing: stack.callback(thing.close) and thing


class Synchronous:
    """An Execution whose shapes are known only when `execute` has returned."""

    is_static = False
    native = None

    def __init__(self, execute, request):
        self._execute, self._request, self.shapes = execute, request, ()

    def run(self):
        result = self._execute(self._request)
        result.raise_for_status()
        self.shapes = result.output_shapes


@pytest.fixture
def host(closing):
    """host(bind), host(execute=…) or host(executor=…): a Configure that starts servers in this process."""

    def make(bind=Increment, execute=None, spin=0.0, executor=None):
        if executor:
            return closing(Host(lambda offer: ExecutionBurstServer.create_with_executor(offer, executor()), spin))
        return closing(Host(binding(partial(Synchronous, execute) if execute else bind), spin))

    return make


@pytest.fixture
def wire():
    """The wire version that clients speak. Modules whose tests run in each version say so again, with params."""
    return 2


@pytest.fixture
def burst(closing, wire):
    """burst(configure): an `Asked` controller that does not spin unless told to."""
    return lambda configure, spin=0.0, **options: closing(Asked(configure, spin=spin, versions=[wire], **options))


@pytest.fixture
def clients():
    """The classes (RawClient, Asked, Lender), for tests that make thousands and close each by itself."""
    return RawClient, Asked, Lender


@pytest.fixture
def raw(closing, wire):
    """raw(configure): a RawClient."""
    return lambda configure, **options: closing(RawClient(configure, wire, **options))


@pytest.fixture
def lender(closing, wire):
    """lender(configure): a Lender."""
    return lambda configure, **options: closing(Lender(configure, wire, **options))


@pytest.fixture
def memory(closing):
    """memory(nbytes): a memory pool whose bytes count up from 0."""

    def make(nbytes=4096):
        pool = closing(Memory.create(nbytes))
        pool.asarray()[:] = np.arange(nbytes, dtype=np.uint64).astype(np.uint8)
        return pool

    return make


@pytest.fixture
def child(closing):
    """child(function, *memories): a process that runs function(channel) and has the memories, too."""
    return lambda function, *memories: closing(Child(function, memories))


@pytest.fixture
def service(child):
    """service(bind): a process that serves bursts, and a Configure for it. Sent [], it answers when all have ended."""

    def serve(bind, spin, channel):
        guard()
        host = Host(binding(bind), spin)
        while True:
            message = channel.receive()
            if message.fds:
                host.servers[:] = [server for server in host.servers if server._thread.is_alive()]
                accept(message, channel, host)
                continue
            for server in host.servers:
                server.join()
            host.servers.clear()
            gc.collect()
            channel.send([])

    def make(bind=Increment, spin=0.0):
        process = child(partial(serve, bind, spin))
        return process, partial(offer, process.channel)

    return make


@pytest.fixture
def increment():
    """The class Increment."""
    return Increment


@pytest.fixture
def keeper():
    """The class Keeper."""
    return Keeper


@pytest.fixture
def gate():
    """A Gate."""
    return Gate()


@pytest.fixture
def gated(gate):
    """A class Increment whose runs wait at the gate."""

    class Gated(Increment):
        def run(self):
            gate()
            super().run()

    return Gated


@pytest.fixture(name="mappings")
def mappings_fixture():
    """mappings(memory)."""
    return mappings


@pytest.fixture
def remote():
    """(offer, accept): a Configure that asks another process over a channel, and how that one serves the next."""
    return offer, lambda channel, host: accept(channel.receive(PATIENCE), channel, host)
