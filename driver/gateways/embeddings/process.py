"""`burst serve DEVICE --embeddings FOLDER --http ADDRESS`, until SIGTERM or SIGINT.

The process is a client of the device, as any other. It is one event loop, and two threads of tokenizers.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from driver.errors import DeviceFailed
from driver.gateways.account_process import AccountProcess, GatewayAccount, GatewayKeeper, kept_for, load_all
from driver.gateways.door_address import DoorAddress
from driver.gateways.embeddings.api_errors import refused
from driver.gateways.embeddings.text_models import TextModel
from driver.gateways.embeddings.vector_api import VectorApi
from driver.gateways.http_requests import BoundedRequests
from driver.gateways.http_server import tls_context
from driver.gateways.loop_thread import LoopThread
from driver.gateways.request_memory import RequestMemory

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from driver.gateways.embeddings.model_folder import ModelFolder

_LOG = logging.getLogger("burst.embeddings")
_GRACE = 10.0  # seconds for requests that run at the end


class VectorLimits(NamedTuple):
    """The limits of one machine or account. All together may have half as much again.

    message: bytes of a body. requests, connections: at once. patience: seconds until a request that has begun is
    complete, and for an answer to be read; slowest: to these is added the time of so many bytes a second. memory: bytes
    of requests. within: seconds from a whole request to its answer.
    """

    message: int = 8 << 20
    requests: int = 64
    connections: int = 256
    patience: float = 30.0
    slowest: int = 1 << 20
    memory: int = 256 << 20
    within: float = 120.0


def http_address(text: str) -> DoorAddress:
    """Parse an address. Raise DeviceFailed."""
    said, rest = f"--http {text}", text.removeprefix("http+").removeprefix("http://")
    if rest.startswith("unix:"):
        return DoorAddress.of_owner(said, rest.removeprefix("unix:"))
    door = DoorAddress.of_tcp(said, rest)
    if not door:
        raise DeviceFailed(f"{said}: give HOST:PORT, :PORT (this machine alone), or unix:PATH (this account alone)")
    return door


class VectorServer:
    """Models at some addresses, in one event loop: `async with` it."""

    def __init__(
        self,
        device: str,
        folders: Sequence[ModelFolder],
        addresses: Sequence[str],
        limits: VectorLimits = VectorLimits(),  # noqa: B008 (it is immutable)
        tls: Sequence[str] | None = None,
    ) -> None:
        """Bind the addresses. `tls`: paths of a certificate and its key, for TCP addresses. Raise DeviceFailed.
        `async with` raises what `driver.compile` of a path does, too.
        """
        self._tls = tls_context(*tls) if tls else None
        self._device, self._folders, self._limits = device, folders, limits
        self.models: dict[str, TextModel] = {}
        if len({folder.name for folder in folders}) < len(folders):
            raise DeviceFailed("--embeddings: two models have one name; give NAME=FOLDER")
        self._doors: list[tuple[DoorAddress, socket.socket]] = []
        with ExitStack() as stack:
            for text in addresses:
                door = http_address(text)
                listener = stack.enter_context(door.listen())
                stack.callback(door.remove)
                if not door.path:
                    door = door._replace(port=listener.getsockname()[1])
                self._doors.append((door, listener))
            self._bound = stack.pop_all()
        self._stack = AsyncExitStack()

    @property
    def addresses(self) -> list[str]:
        """The addresses as clients use them: the base_url of OpenAI's, or a socket's path."""
        scheme = "https" if self._tls else "http"
        return [f"unix:{door.path}" if door.path else f"{scheme}://{door.place}/v1" for door, _ in self._doors]

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.enter_context(self._bound)
            for folder in self._folders:
                model = await asyncio.to_thread(TextModel, folder, self._device)
                await model.open(stack)
                self.models[folder.name] = model
            api = VectorApi(self.models, self._limits.within)
            stack.callback(api.close)
            of_one = self._limits.memory
            memory = RequestMemory(of_one, of_one + of_one // 2, advice="send fewer texts at once")
            for door, listener in self._doors:
                requests = BoundedRequests(api.answer, refused, self._limits, memory, cancels=True)
                self._serve(door, listener, requests, stack=stack)
            self._stack = stack.pop_all()
        return self

    def _serve(
        self, door: DoorAddress, listener: socket.socket, requests: BoundedRequests, *, stack: AsyncExitStack
    ) -> None:
        end: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(requests.serve(listener, end, None if door.path else self._tls))
        stack.push_async_callback(_end, end, task)
        if door.is_open:
            _LOG.warning("%s: every machine that reaches this address may use the models", door.said)

    async def __aexit__(self, *reason: object) -> None:
        await self._stack.aclose()


class AccountVectors:
    """The server of one account, in a process of its own: `AccountProcess` makes it."""

    def __init__(
        self, device: str, folders: Sequence[ModelFolder], addresses: Sequence[str], tls: Sequence[str] | None
    ) -> None:
        """Bind the addresses. `tls`: as of `VectorServer`. Raise DeviceFailed."""
        self._server = VectorServer(device, folders, addresses, tls=tls)
        self.addresses = self._server.addresses
        self._thread = LoopThread("burst-embeddings", self._serve)

    def begin(self) -> None:
        """Serve from now on. Raise what opening the models raises."""
        try:
            self._thread.begin()
        except Exception as error:
            _LOG.error("the models cannot be served: %s", error)
            raise

    async def _serve(self, begun: Callable[[], object], end: asyncio.Future[None]) -> None:
        async with self._server:
            begun()
            await end

    def close(self) -> None:
        """Finish what runs."""
        self._thread.end(None)


def opened(
    device: str, folders: Sequence[ModelFolder], addresses: Sequence[str], tls: Sequence[str] | None
) -> tuple[VectorServer | GatewayKeeper, list[str]]:
    """Return what serves while it is entered, and the addresses as clients use them. `tls`: as of `VectorServer`. Raise
    DeviceFailed.

    Where root serves sockets of other accounts, that is a process for each account.
    """
    doors = [http_address(text) for text in addresses]
    uids = [door.uid if door.path else os.getuid() for door in doors]
    if os.getuid() or not any(uids):
        server = VectorServer(device, folders, addresses, tls=tls)
        return server, server.addresses
    load_all("numpy.ma", "tokenizers")
    places = {path.parent for folder in folders for path in (folder.model, folder.tokenizer)}
    texts = {uid: [text for text, its in zip(addresses, uids, strict=True) if its == uid] for uid in uids}
    processes = [
        AccountProcess(
            GatewayAccount.of(uid, device, places),
            device,
            partial(AccountVectors, device, folders, its, tls),
            kept_for(doors),
        )
        for uid, its in texts.items()
    ]
    keeper = GatewayKeeper(processes, {door.path: door.remove for door in doors if door.path})
    found = {uid: iter(its) for uid, its in zip(texts, keeper.addresses, strict=True)}
    return keeper, [next(found[uid]) for uid in uids]


async def _end(end: asyncio.Future[float], task: asyncio.Task[None]) -> None:
    if not end.done():
        end.set_result(_GRACE)
    await task


__all__ = ["AccountVectors", "VectorLimits", "VectorServer", "opened"]
