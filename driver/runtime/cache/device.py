"""Devices that look into a cache folder before they compile, and placements that are remembered there.

Nothing that happens to the folder is an error: what cannot be restored is compiled, what cannot be kept is not, and
`stats()` and the log of `driver.runtime` say why.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgpack

from burst import GeneralFailure, InvalidArgument
from driver.engine.cache.processor import processor
from driver.nn.file_form import is_file
from driver.options import Cache
from driver.protocol.model_digest import model_digest, sampled_digest, structure_digest
from driver.runtime.cache.folder import Folder
from driver.runtime.cache.manifest import About, Counts
from driver.runtime.cache.verify import PLACEMENT
from driver.runtime.capabilities import digest as capabilities_digest
from fmq.printable import printable
from fmq.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from burst import Trace
    from driver.client.device import RemoteDevice
    from driver.client.prepared_model import RemotePreparedModel
    from driver.client.remote_executor import Home
    from driver.nn import Model
    from driver.options import PrepareOptions
    from driver.runtime.cache.entry import Draft, Entry
    from driver.runtime.partition import Step


TOKEN_BYTES = 32
"""A token says what a cache entry stands for: everything that makes a compilation what it is.

The first part is the application's: by default the BLAKE3 of the model, or 32 bytes of its own, which stand for the
model's constants then, and save the time to hash those. Of a model file it is that of a sample: the file is sent along,
and the device restores nothing that it has made of another one. The rest is what the HAL's runtime adds (which
operations of the model run on the device, its name and version, preference and priority), and what ours does: the
model's structure, this library's version, and the processor. So what is there under a token is what would be compiled
now.
"""


def token_of(application: bytes, structure: bytes, *terms: object) -> bytes:
    """Return a token. `application`: its token. `terms`: msgpack knows how to write them."""
    return hashlib.sha256(application + structure + msgpack.packb([*terms, __version__, processor()])).digest()


def part_token(
    application: bytes, structure: bytes, operations: Sequence[int] | None, device: tuple[str, str], *how: str
) -> bytes:
    """Return the token of what one device compiles. `operations`: None when that is the whole model. `device`: name and
    version.
    """
    return token_of(application, structure, "part", operations, device, how)


_log = logging.getLogger("driver.runtime")
_PLACEMENT = Counts(0, 1)
_MOST_BYTES = 2**24  # of a placement
_MOST_NAMES = 3
_MOST_NAME = 100  # characters


class CacheOutcome(NamedTuple):
    """The outcome of looking for a compilation."""

    kind: Literal["restored", "saved", "compiled"]  #: out of the cache; anew, and kept; anew, and not kept
    reason: str = ""  #: why it was not restored, or not kept


class CompilationCache(NamedTuple):
    """The cache of one call of `compile`: where compilations are kept, and what all of its tokens begin with."""

    folder: Folder
    application: bytes
    structure: bytes
    options: PrepareOptions
    wait: Callable[[], object]  #: called before we wait for another process that compiles the same
    patience: Callable[[], float | None]  #: seconds that we may wait then

    @classmethod
    def of(
        cls,
        path: str | Path,
        token: bytes | None,
        model: Model,
        options: PrepareOptions,
        wait: Callable[[], object],
        patience: Callable[[], float | None],
    ) -> CompilationCache:
        """Return a cache. `token`: the application's, or None for the model's BLAKE3. Raise ValueError, OSError."""
        if token is not None and (not isinstance(token, bytes) or len(token) != TOKEN_BYTES):
            raise ValueError(f"cache_token={token!r:.80}: give {TOKEN_BYTES} bytes, or None for the model's digest")
        try:
            folder = Folder(path)
        except (TypeError, ValueError) as error:
            raise ValueError(f"cache_dir={path!r}: {error}") from error
        structure = structure_digest(model)
        digest = sampled_digest if is_file(model) else model_digest  # of a file the device compares the rest
        return cls(folder, token or digest(model, structure), structure, options, wait=wait, patience=patience)

    @property
    def how(self) -> tuple[str, str]:
        """The options, as tokens state them."""
        return self.options.preference, self.options.priority

    def placement(self, names: Sequence[str], required: str | None) -> CachedPlacement:
        """Return what remembers which of these devices runs what."""
        figures = [capabilities_digest(name) for name in names]
        token = token_of(self.application, self.structure, "placement", names, required, figures, self.how)
        return CachedPlacement(self.folder.entry(token))


class CachedPlacement:
    """The choice of devices for a model's operations."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def read(self, operations: int, devices: int) -> list[int] | None:
        """Return for each operation the number of a device; None when nothing is kept that makes sense."""
        with suppress(OSError, ValueError, TypeError), self._entry.opened(_PLACEMENT) as files:
            if files is not None:
                chosen = json.loads(os.pread(files.data[0], _MOST_BYTES, 0))
                if len(chosen) == operations and all(type(n) is int and 0 <= n < devices for n in chosen):
                    self._entry.note_hit()
                    return list(chosen)
        return None

    def write(self, chosen: Sequence[int], model: Model) -> None:
        """Keep the choice; where that is not possible, only log it."""
        about = About(model=describe(model), device=PLACEMENT, version="")
        try:
            with self._entry.locked(lambda: None, 0), self._entry.draft(_PLACEMENT, about) as draft:
                os.pwrite(draft.files.data[0], json.dumps(list(chosen)).encode(), 0)
                draft.commit()
        except OSError as error:
            _log.warning("a placement was not kept: %s", error)


class CachedDevice:
    """A device, for one step of a model. `outcome`: of the last preparation."""

    def __init__(
        self, device: RemoteDevice, cache: CompilationCache, step: Step, *, is_whole: bool, graph: int = 0
    ) -> None:
        """`graph`: 0 for the main subgraph, n for the referenced one n - 1."""
        self._device, self._cache, self._model = device, cache, step.model
        operations = None if is_whole else [(graph, n) for n in step.operations]
        which = (device.name, device.version)
        token = token_of(cache.application, cache.structure, "part", operations, which, cache.how)
        self._token, self._entry = token, cache.folder.entry(token)
        # What is a step's output is another one's input, so only a whole model's runs are joined.
        self._options = cache.options if is_whole else cache.options._replace(batch=None)
        self.outcome = CacheOutcome("compiled")

    def prepare(self, deadline: float | None = None) -> RemotePreparedModel:
        """Prepare a valid model, as `RemoteDevice.prepare` does. The cache serves again when the device is started
        again.
        """
        options = self._options

        def prepare_again(trace: Trace) -> Home:
            return self._home(options._replace(trace=trace))

        def at_first() -> Home:
            return self._home(options._replace(deadline=deadline))

        return self._device.prepared(self._model, options, at_first, prepare_again)

    def _home(self, options: PrepareOptions) -> Home:
        counts = Counts(*self._device.number_of_cache_files_needed())
        if counts == Counts(0, 0):
            self.outcome = CacheOutcome("compiled", "the device keeps no compilations")
            return self._device.home_of(self._model, options)
        return self._restored(counts, options) or self._compiled(counts, options)

    def _restored(self, counts: Counts, options: PrepareOptions) -> Home | None:
        with ExitStack() as stack:
            try:
                files = stack.enter_context(self._entry.opened(counts))
            except OSError as error:
                self._miss(f"the cache folder cannot be read: {error}")
                return None
            if files is None:
                self.outcome = CacheOutcome("compiled", "nothing is kept for it")
                return None
            try:
                home = self._device.restored_home(options._replace(cache=Cache(self._token, *files)), self._model)
            except (GeneralFailure, InvalidArgument) as error:
                self._miss(str(error))
                return None
            self._entry.note_hit()
            self.outcome = CacheOutcome("restored")
            return home

    def _miss(self, reason: str) -> None:
        self.outcome = CacheOutcome("compiled", reason)
        _log.warning("device %r: a compilation was not restored, and is made anew: %s", self._device.address, reason)

    def _compiled(self, counts: Counts, options: PrepareOptions) -> Home:
        """Compile, and keep that; unless another process does so just now, which we wait for."""
        waited: list[None] = []

        def wait() -> None:
            self._cache.wait()
            waited.append(None)

        with ExitStack() as stack:
            draft: Draft | None = None
            try:
                stack.enter_context(self._entry.locked(wait, self._cache.patience()))
                if waited and (home := self._restored(counts, options)):
                    return home
                draft = stack.enter_context(self._entry.draft(counts, self._about()))
            except OSError as error:
                self._not_kept(str(error))
            cache = Cache(self._token, *draft.files) if draft else None
            home = self._device.home_of(self._model, options._replace(cache=cache))
            if draft:
                self._keep(draft, home.declined)
            return home

    def _keep(self, draft: Draft, declined: str) -> None:
        if declined:
            self._not_kept(declined)
            return
        try:
            if draft.commit():
                self.outcome = CacheOutcome("saved", self.outcome.reason)
            else:
                self._not_kept("it is larger than what the folder may hold")
        except OSError as error:
            self._not_kept(str(error))

    def _not_kept(self, reason: str) -> None:
        self.outcome = CacheOutcome("compiled", reason)
        _log.warning("device %r: a compilation was not cached: %s", self._device.address, reason)

    def _about(self) -> About:
        return About(model=describe(self._model), device=self._device.address, version=self._device.version)


def describe(model: Model) -> str:
    """Describe a model for a list: "mobilenet.onnx", "31 operations: 14 CONV_2D, 13 DEPTHWISE_CONV_2D, …"."""
    if model.name:
        return printable(model.name)[:_MOST_NAME]
    counts = Counter(operation.type for operation in model.main.operations)
    names = [f"{count} {name}" for name, count in counts.most_common(_MOST_NAMES)]
    more = ["…"] if len(counts) > _MOST_NAMES else []
    plural = "s" if counts.total() > 1 else ""
    return f"{counts.total()} operation{plural}: {', '.join([*names, *more])}"
