"""A model that is prepared on a device in another process: its plain path, and its bursts."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from burst import Controller, ErrorStatus, PeerDied, Quarantined, Timeout, Trace
from driver.domains import check_buffers
from driver.errors import DriverError
from driver.options import Options, Policy, Preference
from driver.plain import with_loop_timeout
from driver.recovery import Crash, Key, crash_in_preparation, digest_of, quarantine
from driver.session import Burst
from driver.workspace import InputSet, OutputSet, Workspace, input_shapes, output_views
from fmq.end import DEFAULT_SPIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from numpy.typing import ArrayLike, NDArray

    from burst import Offer, OutputShape, Request, Result
    from burst.controller import Configure
    from driver.connection import Connection
    from driver.nn import Model
    from driver.remote import RemoteDevice
    from fmq.region import Kind


class Home(NamedTuple):
    """Where a model is prepared: on one life of its device, under a number."""

    connection: Connection
    number: int


class RemotePreparedModel:
    """A model made ready to run on a device. Any thread may use it, several at once."""

    def __init__(
        self, device: RemoteDevice, model: Model, number: int, preference: Preference = "fast_single_answer"
    ) -> None:
        """Use `device.prepare`."""
        self.device, self.model, self.preference = device, model, preference
        self.home = Home(device.connection, number)
        self._preparing, self._crashed_in_preparation = threading.Lock(), False
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

    def execute(
        self,
        request: Request,
        measure: bool = False,
        timeout: float | None = None,
        loop_timeout: float | None = None,
    ) -> Result:
        """Executes an explicit request on the plain path, with any status; outputs are views of its pools.

        `timeout`: seconds that we wait. `loop_timeout`: seconds that a WHILE may take; by default 2, at most 15.

        Raises PeerDied, Timeout, and Malformed for a request that cannot be said.
        """
        self.device.check_process()
        request = with_loop_timeout(request, loop_timeout)
        home = self.present_home()
        check_buffers(request.pools, home.connection)
        with home.connection.plain_path() as path:
            result = path.execute(home.number, request, measure=measure, timeout=timeout)
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
        outputs = output_views(self.model, request, shapes)
        self._last = request, shapes, outputs
        return outputs

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
                answered; the caller sees one slow result. A model that crashes the device twice over one request, or
                three times in all, gets Quarantined; a burst that is bound to buffers of the device, BuffersLost.

        Raises StatusError, PeerDied, ValueError.
        """
        if spin is None:
            spin = 0.0 if self.preference == "low_power" else DEFAULT_SPIN
        self.check_quarantine()
        return Burst(self, Options(spin, memory, measure, input_shapes, depth, policy, recover).checked())

    @property
    def _number(self) -> int:
        return self.home.number

    @cached_property
    def key(self) -> Key:
        """What its crashes are counted by."""
        return Key(self.device.address, digest_of(self.model))

    def check_quarantine(self) -> None:
        """Raises Quarantined."""
        if quarantine.knows(self.device.address):
            quarantine.check(self.key)

    def present_home(self) -> Home:
        """Where it is prepared. Prepares it again, once for all its users, if the device was started again since."""
        if self.home.connection is not self.device.connection:
            with self._preparing:
                if self.home.connection is not self.device.connection:
                    self.check_quarantine()
                    self.home = self._prepared_again()
        return self.home

    def _prepared_again(self) -> Home:
        trace = Trace.create()
        try:
            return self.device.home_of(self.model, trace)
        except PeerDied:
            if crash := crash_in_preparation(trace):
                self.note_crash(crash, again=self._crashed_in_preparation)
                self._crashed_in_preparation = True
            raise

    def note_crash(self, crash: Crash, *, again: bool) -> None:
        """Of this model. Raises Quarantined when it was one too many."""
        quarantine.note(self.key, self.model, crash, again=again)

    def new_controller(self, options: Options, home: Home) -> Controller:
        """A burst's queues and listener, where the model is prepared."""
        return Controller(self.configure_burst(options.spin, home), options.memory, options.spin)

    def revived(self, options: Options, dead: Connection) -> tuple[Home, Controller]:
        """The same on the device's next life. Raises Quarantined, and what `RemoteDevice.revive` raises."""
        while True:
            self.check_quarantine()
            self.device.revive(dead)
            dead = self.device.connection  # should it have died, too
            try:
                home = self.present_home()
                return home, self.new_controller(options, home)
            except Quarantined:
                raise
            except PeerDied:
                pass

    def configure_burst(self, spin: float | str, home: Home | None = None) -> Configure:
        """For burst.Controller."""
        connection, number = home or self.present_home()
        self.device.check_process()

        def configure(offer: Offer) -> int:
            (request_wire, request_fds), (result_wire, result_fds) = offer.requests.to_wire(), offer.results.to_wire()
            fds = [*request_fds, *result_fds, offer.callback.fileno(), offer.context.fileno(), offer.trace.fd]
            answer, _ = connection.call("burst", number, request_wire, result_wire, spin, list(offer.versions), fds=fds)
            return int(answer[0])

        return configure

    def __reduce__(self) -> tuple[Any, ...]:
        """A recipe: connects to the device by its name and prepares the model again, wherever it is unpickled."""
        return _prepare_again, (self.device.address, self.model, self.preference)

    def close(self) -> None:
        """Frees the model on the device; bursts on it go on until they are closed."""
        for workspace in [w for free in self._workspaces.values() for w in free]:
            self.device.free_memory(workspace.inputs.memory)
            self.device.free_memory(workspace.outputs.memory)
        self._workspaces.clear()
        self.device.check_process()
        if self.home.connection is self.device.connection:  # else its device died, and the model with it
            self.home.connection.call("free", self.home.number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(PeerDied, DriverError):  # with the device, the model is gone too
            self.close()


def _prepare_again(address: str, model: Model, preference: Preference) -> RemotePreparedModel:
    """What an unpickled prepared model is made by. Its connection is its own: `prepared.device`."""
    from driver.remote import connect

    device = connect(address)
    try:
        return device.prepare(model, preference=preference)
    except BaseException:
        device.close()
        raise
