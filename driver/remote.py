"""A device in another process, behind the same methods: what `driver.connect` and `device.prepare` return."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self, get_args

import numpy as np

from burst import Controller, ErrorStatus, PeerDied, Timeout
from burst.channel import Channel
from driver import rendezvous
from driver.encoding import encode
from driver.errors import DeviceFailed, DriverError
from driver.nn import validate
from driver.options import Options, Policy, Preference
from driver.plain import PlainClient
from driver.rpc import PROTOCOL, call
from driver.session import Burst
from driver.workspace import InputSet, OutputSet, Workspace, input_shapes
from fmq.end import DEFAULT_SPIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    from burst import Memory, Offer, OutputShape, Request, Result
    from burst.controller import Configure
    from driver.nn import Model
    from fmq.region import Kind

_START_TIMEOUT = 60.0  # seconds for a service and its engine to come up
_ATTEMPTS = 3  # a service may retire just when we come


def connect(name: str = "reference") -> RemoteDevice:
    """A device by name, its process started when there is none. Raises DeviceNotFound, DeviceFailed."""
    for _ in range(_ATTEMPTS):
        with suppress(PeerDied):
            channel = rendezvous.connect(name)
            try:
                return RemoteDevice(channel, name)
            except BaseException:
                channel.close()
                raise
    log = rendezvous.Place(rendezvous.runtime_dir(), name).log
    raise DeviceFailed(f"device {name!r} ended while it started; its log is {log}")


class RemoteDevice:
    """One connection to a device. Any thread may use it; what was made through it ends with it."""

    def __init__(self, channel: Channel, address: str | None = None) -> None:
        """Use `connect`."""
        self.address = address  #: what `connect` was called with
        self._channel, self._lock, self._pid = channel, threading.Lock(), os.getpid()
        values, fds = self.call("hello", PROTOCOL, timeout=_START_TIMEOUT)
        channel.watch(fds[0])
        _, self.name, self.version, self.type, self.service_pid, self.engine_pid = values
        self._idle: list[PlainClient] = []
        self._threads: ThreadPoolExecutor | None = None

    def call(
        self, method: str, *arguments: object, fds: Sequence[int] = (), timeout: float | None = None
    ) -> tuple[list[Any], list[int]]:
        """One call to the service. Raises StatusError, PeerDied."""
        self.check_process()
        with self._lock:
            return call(self._channel, method, *arguments, fds=fds, timeout=timeout)

    def check_process(self) -> None:
        """Raises DriverError in a forked child: the connection is its parent's."""
        if os.getpid() != self._pid:
            raise DriverError("this device was connected before a fork; connect again in this process")

    def supported_operations(self, model: Model) -> list[bool]:
        """For each operation of the main subgraph: True is a promise. Raises InvalidModel."""
        n, bits = self._with_model("supported", model)
        return [bool(bit) for bit in np.unpackbits(np.frombuffer(bits, np.uint8), count=n)]

    def prepare(self, model: Model, *, preference: Preference = "fast_single_answer") -> RemotePreparedModel:
        """Compiles a model on the device.

        `preference`: "low_power", "fast_single_answer" or "sustained_speed"; so far it only says how bursts wait.
        Raises InvalidModel before anything is sent, StatusError, PeerDied.
        """
        if preference not in get_args(Preference):
            raise ValueError(f"preference={preference!r}: one of {', '.join(map(repr, get_args(Preference)))}")
        return RemotePreparedModel(self, model, self._with_model("prepare", model)[0], preference)

    def _with_model(self, method: str, model: Model) -> list[Any]:
        validate(model)
        fd, where = encode(model)
        try:
            return self.call(method, where, fds=[fd])[0]
        finally:
            os.close(fd)

    @contextmanager
    def plain_path(self) -> Iterator[PlainClient]:
        """A connection for one call. Calls at the same time get connections of their own, which are kept."""
        self.check_process()
        try:
            client = self._idle.pop()
        except IndexError:
            _, fds = self.call("channel")
            channel = Channel.from_fd(fds[0])
            channel.watch(fds[1])
            client = PlainClient(channel)
        try:
            yield client
        except BaseException:
            client.close()  # an answer may still be on its way
            raise
        else:
            self._idle.append(client)

    def free_memory(self, memory: Memory) -> None:
        """The device may unmap it on the plain path; a burst has its own free_memory."""
        for client in list(self._idle):
            client.free_memory(memory)

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """Runs an execution in a thread; eight at the same time."""
        with self._lock:
            self._threads = self._threads or ThreadPoolExecutor(8, "execute")
        return self._threads.submit(function)

    def close(self) -> None:
        """Ends the connection: prepared models and bursts made through it end too. Harmless when done twice."""
        if self._threads:
            self._threads.shutdown()
        while self._idle:
            self._idle.pop().close()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemotePreparedModel:
    """A model made ready to run on a device. Any thread may use it, several at once."""

    def __init__(
        self, device: RemoteDevice, model: Model, number: int, preference: Preference = "fast_single_answer"
    ) -> None:
        """Use `device.prepare`."""
        self.device, self.model, self.preference = device, model, preference
        self._number = number
        self._workspaces: dict[Any, list[Workspace]] = {}
        self._last: tuple[Any, Sequence[OutputShape], tuple[NDArray[Any], ...]] = None, (), ()

    def run(self, *arrays: ArrayLike | None, timeout: float | None = None) -> tuple[NDArray[Any], ...]:
        """Executes once on the plain path: an array per input (None: omitted), an array per output, which is yours.

        Raises ValueError for a wrong dtype or shape (nothing was sent), StatusError, PeerDied, and Timeout when the
        result does not come in `timeout` seconds.
        """
        with self._workspace(input_shapes(self.model, arrays)) as workspace:
            workspace.inputs.fill(arrays)
            result = self.execute(workspace.request, timeout=timeout)
            if result.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE and (old := workspace.grow(result.output_shapes)):
                self.device.free_memory(old)
                result = self.execute(workspace.request, timeout=timeout)
            result.raise_for_status()
            return tuple(output.copy() for output in result.outputs)

    @contextmanager
    def _workspace(self, shapes: tuple[tuple[int, ...] | None, ...]) -> Iterator[Workspace]:
        """One that nobody else uses now; kept for later, unless a device that was too slow may still write to it."""
        free = self._workspaces.setdefault(shapes, [])
        workspace = free.pop() if free else Workspace(InputSet(self.model, shapes), OutputSet(self.model))
        try:
            yield workspace
        except (Timeout, PeerDied):
            raise
        except Exception:  # and not KeyboardInterrupt, after which it is still executing
            free.append(workspace)
            raise
        free.append(workspace)

    def execute(self, request: Request, measure: bool = False, timeout: float | None = None) -> Result:
        """Executes an explicit request on the plain path, with any status; outputs are views of its pools.

        Raises PeerDied, Timeout, and Malformed for a request that cannot be said.
        """
        with self.device.plain_path() as path:
            result = path.execute(self._number, request, measure=measure, timeout=timeout)
        if result.status == 0:
            result.outputs = self.outputs(request, result.output_shapes)
        return result

    def execute_async(
        self,
        request: Request,
        measure: bool = False,
        *,
        timeout: float | None = None,
        callback: Callable[[Future[Result]], object] | None = None,
    ) -> Future[Result]:
        """The same in the background, several at once. `callback` gets the future when it is done."""
        future = self.device.submit(lambda: self.execute(request, measure=measure, timeout=timeout))
        if callback:
            future.add_done_callback(callback)
        return future

    def outputs(self, request: Request, shapes: Sequence[OutputShape]) -> tuple[NDArray[Any], ...]:
        """Typed views of a request's outputs in its pools; of the last request and shapes, the same ones again."""
        last = self._last
        if last[0] is request and last[1] == shapes:
            return last[2]
        outputs = self._views(request, shapes)
        self._last = request, shapes, outputs
        return outputs

    def _views(self, request: Request, shapes: Sequence[OutputShape]) -> tuple[NDArray[Any], ...]:
        operands = [self.model.main.operands[i] for i in self.model.main.outputs]
        return tuple(
            request.pools[a.pool].asarray(o.type.dtype, shapes[n].dimensions if shapes else o.dimensions, a.offset)
            for n, (o, a) in enumerate(zip(operands, request.outputs, strict=True))
        )

    def burst(
        self,
        *,
        spin: float | str | None = None,
        memory: Kind = "memfd",
        measure: bool = False,
        input_shapes: Sequence[tuple[int, ...] | None] | None = None,
        depth: int = 1,
        policy: Policy = "block",
        recover: bool = False,
    ) -> Burst:
        """Opens a burst.

        Args:
            spin: seconds that both sides poll before they sleep; 0 sleeps at once, "adaptive" polls while that pays.
                By default 50 us, and 0 for a model that was prepared for low power.
            memory: what its queues are made of, "memfd" or "posix".
            measure: whether results carry their timing.
            input_shapes: for a model that leaves them open; None there omits that input.
            depth: requests that may be in flight at once, for `submit`, from 1 to 64.
            policy: what `submit` does when so many are: "block", "reject" or "latest".
            recover: when the device dies, start it again, prepare the model again and send again what was not
                answered; the caller sees one slow result. A model that crashes the device twice is quarantined.

        Raises StatusError, PeerDied, ValueError.
        """
        if spin is None:
            spin = 0.0 if self.preference == "low_power" else DEFAULT_SPIN
        return Burst(self, Options(spin, memory, measure, input_shapes, depth, policy, recover).checked())

    def new_controller(self, options: Options, *, revive: bool = False) -> Controller:
        """A burst's queues and listener; `revive`: on a new device, for the one that we knew died."""
        if revive:
            raise PeerDied("not yet")
        return Controller(self.configure_burst(options.spin), options.memory, options.spin)

    def configure_burst(self, spin: float | str) -> Configure:
        """For burst.Controller."""

        def configure(offer: Offer) -> int:
            (request_wire, request_fds), (result_wire, result_fds) = offer.requests.to_wire(), offer.results.to_wire()
            fds = [*request_fds, *result_fds, offer.callback.fileno(), offer.context.fileno(), offer.trace.fd]
            answer, _ = self.device.call(
                "burst", self._number, request_wire, result_wire, spin, list(offer.versions), fds=fds
            )
            return int(answer[0])

        return configure

    def __reduce__(self) -> tuple[Any, ...]:
        """A recipe: connects to the device by its name and prepares the model again, wherever it is unpickled."""
        if self.device.address is None:
            raise TypeError("this device was not found by a name, so another process could not find it")
        return _prepare_again, (self.device.address, self.model, self.preference)

    def close(self) -> None:
        """Frees the model on the device; bursts on it go on until they are closed."""
        for workspace in [w for free in self._workspaces.values() for w in free]:
            self.device.free_memory(workspace.inputs.memory)
            self.device.free_memory(workspace.outputs.memory)
        self._workspaces.clear()
        self.device.call("free", self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(PeerDied, DriverError):  # with the device, the model is gone too
            self.close()


def _prepare_again(address: str, model: Model, preference: Preference) -> RemotePreparedModel:
    """What an unpickled prepared model is made by. Its connection is its own: `prepared.device`."""
    device = connect(address)
    try:
        return device.prepare(model, preference=preference)
    except BaseException:
        device.close()
        raise
