"""The context that `CompiledModel.serve` returns."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from driver.replicas.blocking import BlockingServer
from driver.replicas.model_server import ModelServer

if TYPE_CHECKING:
    from driver.client.surface import AnyPreparedModel
    from driver.replicas.options import ServeOptions


class Serving:
    """A model that is about to be served: `async with` it to serve tasks, `with` it to serve threads."""

    def __init__(self, prepared: AnyPreparedModel, options: ServeOptions) -> None:
        """Use `CompiledModel.serve`."""
        self._make = partial(ModelServer, prepared, options)
        self._tasks: list[ModelServer] = []
        self._threads: list[BlockingServer] = []

    if not TYPE_CHECKING:  # for which nothing else is here

        def __getattr__(self, name: str) -> None:
            """Raise AttributeError, which says where the server is that has this."""
            remedy = ""
            if not name.startswith("_") and (hasattr(ModelServer, name) or hasattr(BlockingServer, name)):
                opens = f"with compiled.serve() as server: server.{name}"
                remedy = f": the server that has it is what `with` gives ({opens}), or `async with` in a task"
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{remedy}", name=name, obj=self
            )

    async def __aenter__(self) -> ModelServer:
        server = self._make()
        await server.open()
        self._tasks.append(server)
        return server

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._tasks.pop().close(drain=kind is None)

    def __enter__(self) -> BlockingServer:
        server = BlockingServer(self._make)
        server.open()
        self._threads.append(server)
        return server

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._threads.pop().close(drain=kind is None)
