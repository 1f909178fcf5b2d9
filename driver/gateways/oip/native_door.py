"""The door for gRPC in C++, a process of its own in front of Python's door: csrc/oip.

`BURST_OIP_DOOR` names its program. It has the address, answers requests of the usual form for models that it can run,
and hands everything else to Python's door behind it, at a Unix socket that this account alone can reach. This module
starts it, again if it ends, and tells it (csrc/oip/control.h) which models and regions of shared memory there are, as
they come and go. What it is not told, or fails to do, Python's door does: so nothing here fails a client's request.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burst.freezing import frozen_fd
from driver.errors import DeviceFailed
from driver.gateways.oip.datatypes import STRINGS
from driver.gateways.oip.grpc_door import GrpcDoor
from driver.gateways.oip.regions import NO_REGIONS
from driver.gateways.oip.served_model import NOTHING_ELSEWHERE, AnsweredElsewhere
from driver.protocol.model_codec import encode
from driver.service.peer_limiter import of_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.gateways.door_address import DoorAddress
    from driver.gateways.oip.grpc_door import Credentials, DoorLimits
    from driver.gateways.oip.inference import TensorPort
    from driver.gateways.oip.regions import SharedRegion
    from driver.gateways.oip.served_model import ServedModel
    from driver.gateways.oip.service import InferenceService
    from driver.protocol.model_codec import EncodedModel

VARIABLE = "BURST_OIP_DOOR"
_LOG = logging.getLogger("burst.oip")
_STARTED, _ANSWERED, _LATE = 60.0, 10.0, 5.0  # seconds: until it serves; for a word; beyond its grace
_PAUSE = 0.5  # seconds before it is started again
_LONGEST = 1 << 16  # bytes of a word to it
_MOST_TENSORS, _MOST_RANK = 64, 8


class NativeProcess:
    """The process in front. Any thread; words to it are answered one at a time."""

    def __init__(
        self,
        program: str,
        listener: socket.socket,
        *,
        behind: str,
        limits: DoorLimits,
        credentials: Credentials | None,
    ) -> None:
        """Start it, and wait until it serves. Raise DeviceFailed."""
        self._asking = threading.Lock()
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numbers = its.fileno(), listener.fileno()
        words = [program, *map(str, numbers), behind, ",".join(map(str, limits)), *(credentials or ())]
        environment = {**os.environ, "BURST_PYTHON": sys.executable}
        with its:
            try:
                self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, env=environment, pass_fds=numbers)
            except OSError as error:
                self._control.close()
                raise DeviceFailed(f"{VARIABLE}={program}: it cannot be started: {error.strerror}") from None
        self._control.settimeout(_STARTED)
        if self._heard() != "ready":
            self.end(0.0)
            raise DeviceFailed(f"{VARIABLE}={program}: it has ended, or does not serve; its complaint is above")
        self._control.settimeout(_ANSWERED)

    def tell(self, *fields: object, fd: int = -1) -> str:
        """Return its answer, "" if it gives none: it ends, or has ended."""
        packet = b"\0".join(str(field).encode() for field in fields) + b"\0"
        # A client's name may have NUL, which parts fields: such a region stays behind.
        if len(packet) > _LONGEST or packet.count(b"\0") != len(fields):
            return "no"
        with self._asking:
            try:
                socket.send_fds(self._control, [packet], [fd] if fd >= 0 else [])
            except OSError:
                return ""
            return self._heard()

    def _heard(self) -> str:
        try:
            return self._control.recv(_LONGEST).decode()
        except OSError:
            with suppress(OSError):  # an answer that is late must not be taken for the next one's
                self._control.shutdown(socket.SHUT_RDWR)
            return ""

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def wait(self) -> int:
        """Return its exit status when it has ended."""
        return self._process.wait()

    def end(self, grace: float) -> None:
        """Have it answer what runs, and end; kill it if it does not."""
        has_ended = self._process.poll() is not None
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            status = self._process.wait(grace + _LATE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if status and not has_ended:
            _LOG.error("the door in C++ has ended with %d", status)
        self._control.close()


class NativeDoor:
    """A gRPC server at one address: the process in front, and Python's door behind it."""

    def __init__(
        self,
        service: InferenceService,
        address: DoorAddress,
        limits: DoorLimits,
        credentials: Credentials | None = None,
    ) -> None:
        """Listen there. Raise DeviceFailed."""
        program = shutil.which(os.environ[VARIABLE])
        if program is None:
            raise DeviceFailed(
                f"{VARIABLE}={os.environ[VARIABLE]}: there is no such program; build csrc/oip, or unset it"
            )
        self._program, self._service, self._limits, self._credentials = program, service, limits, credentials
        self._listener = address.listen()
        self.port = 0 if address.path else int(self._listener.getsockname()[1])
        self._numbers = itertools.count(1)
        self._models, self._regions = dict[Any, int](), dict[Any, int]()
        # Figures: of processes that have ended, and the last of all.
        self._counted, self._last = dict[Any, AnsweredElsewhere](), dict[Any, AnsweredElsewhere]()
        self._process: NativeProcess | None = None
        self._telling, self._end = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._restart, name="burst-oip-native", daemon=True)

    def begin(self) -> None:
        """Serve clients from now on. Raise DeviceFailed."""
        self._folder = Path(tempfile.mkdtemp(prefix="burst-oip-"))
        all_ = of_all(self._limits.requests)
        limits = self._limits._replace(requests=all_)  # streams are counted there alone
        self._behind = GrpcDoor(self._service, f"unix:{self._folder}/behind", limits, is_behind=True)
        self._behind.begin()
        try:
            self._start()
        except BaseException:
            self._behind.close(0.0)
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._service.repository.watchers.append(self)
        if self._service.regions:
            self._service.regions.watchers.append(self)
        self._thread.start()

    def _start(self) -> None:
        place = f"{self._folder}/behind"
        self._process = NativeProcess(
            self._program, self._listener, behind=place, limits=self._limits, credentials=self._credentials
        )

    def _restart(self) -> None:
        """Start it again whenever it ends, and tell it all that there is."""
        while (process := self._process) is not None:
            status = process.wait()
            if self._end.wait(_PAUSE):
                return
            _LOG.error("the door in C++ has ended with %d, and is started again", status)
            with self._telling:
                if self._end.is_set():  # `close` ends the one that it has found
                    return
                process.end(0.0)
                try:
                    self._start()
                except (DeviceFailed, OSError) as error:
                    _LOG.error("%s", error)
                    continue
                self._counted = dict(self._last)
                for served in self._service.repository.all():
                    self.ready(served)
                with self._service.regions.all() if self._service.regions else NO_REGIONS as regions:
                    for region in regions:
                        self.region_ready(region)

    @property
    def pid(self) -> int:
        """The process in front; 0 before it is there."""
        return self._process.pid if self._process else 0

    # ---- what it is told

    def ready(self, served: ServedModel) -> None:
        """Tell it of a model: to run it, if it can, and else that it exists."""
        with self._telling:
            number = self._models[served] = next(self._numbers)
            if self not in served.elsewhere:
                served.elsewhere.append(self)
            head = "model", number, served.name, served.version
            if self._tell(*head) and (fields := native_fields(served)):
                with suppress(Exception):  # it runs behind, then
                    fd, *where = _one_memory(encode(served.model))
                    try:
                        self._tell(*head, *fields[:4], *where, *fields[4:], fd=fd)
                    finally:
                        os.close(fd)

    def gone(self, served: ServedModel) -> None:
        """Tell it that a model is there no more: it begins no request on it."""
        with self._telling:
            self._counted.pop(served, None), self._last.pop(served, None)
            if number := self._models.pop(served, 0):
                self._tell("gone", number)

    def region_ready(self, region: SharedRegion) -> None:
        """Give it a region's file."""
        with self._telling:
            number = self._regions[region] = next(self._numbers)
            self._tell("region", number, region.name, region.offset, region.nbytes, fd=region.memory.fd)

    def region_gone(self, region: SharedRegion) -> None:
        """Tell it that a region has ended."""
        with self._telling:
            if number := self._regions.pop(region, 0):
                self._tell("lost", number)

    def region_used(self, region: SharedRegion) -> float:
        """Return when one of its requests last used a region: a time.monotonic()."""
        with self._telling:
            said = self._tell("used", self._regions.get(region, 0))
        return int(said) / 1e9 if said.isdecimal() else time.monotonic()  # it does not answer: nobody can know

    def counts(self, served: ServedModel) -> AnsweredElsewhere:
        """Return the figures of the requests that it has answered."""
        with self._telling:
            said = self._tell("count", self._models.get(served, 0)).split()
            if len(said) == len(NOTHING_ELSEWHERE):
                before = self._counted.get(served, NOTHING_ELSEWHERE)
                self._last[served] = before.plus(AnsweredElsewhere(*map(int, said)))
            return self._last.get(served, NOTHING_ELSEWHERE)

    def _tell(self, *fields: object, fd: int = -1) -> str:
        process = self._process
        return process.tell(*fields, fd=fd) if process else ""

    def close(self, grace: float) -> None:
        """Take no more requests, and give those that run so many seconds."""
        self._end.set()
        with self._telling:  # no other one is started from now on
            process = self._process
        if process:
            process.end(grace)
            self._thread.join()
            self._behind.close(grace)
            shutil.rmtree(self._folder, ignore_errors=True)
        self._listener.close()


def native_fields(served: ServedModel) -> list[object]:
    """Return what the process has to know of a model to run it, its encoded form apart; [] if it cannot: its requests
    are joined or have many answers, or its tensors are texts, or of too many dimensions.
    """
    ports = served.ports
    tensors = [*ports.inputs, *ports.outputs]
    is_one_of_them = not served.is_decoupled and served.config.batch == 1
    if not is_one_of_them or max(len(ports.inputs), len(ports.outputs)) > _MOST_TENSORS:
        return []
    if any(port.kind is STRINGS or len(port.sizes or ()) > _MOST_RANK for port in tensors):
        return []
    config = served.config
    is_sustained = int(config.instances > 1)
    its = [field for port in tensors for field in _port_fields(port)]
    return [served.device, config.instances, config.max_batch_size, is_sustained, len(ports.inputs), *its]


def _port_fields(port: TensorPort) -> Sequence[object]:
    sizes = "?" if port.sizes is None else ",".join(map(str, port.sizes))
    return port.name, port.kind.name, port.dtype.itemsize, sizes


def _one_memory(encoded: EncodedModel) -> tuple[int, int, int]:
    """Return a descriptor of one memory with all of a model, and where its structure lies: the bytes are those that
    Python's client sends in several, so to the device both are one model.
    """
    offset, nbytes, *handles = encoded.where
    if not handles:
        return os.dup(encoded.fd), offset, nbytes
    own, *pools = encoded.fds
    parts = [(fd, begin, size) for fd, (_, begin, size) in zip(pools, handles[0], strict=True)]
    starts = [*itertools.accumulate((-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for *_, size in parts), initial=0)]
    parts.append((own, 0, os.fstat(own).st_size))

    def write(fd: int, total: int) -> None:
        os.ftruncate(fd, total)
        for (source, begin, size), to in zip(parts, starts, strict=True):
            os.lseek(fd, to, os.SEEK_SET)
            done = 0
            while done < size:
                count = os.sendfile(fd, source, begin + done, size - done)
                if not count:
                    raise ValueError("a model's memory is shorter than it says")
                done += count

    return frozen_fd(starts[-1] + parts[-1][2], write), offset, nbytes


__all__ = ["VARIABLE", "NativeDoor", "NativeProcess", "native_fields"]
