"""The models of a folder: found, loaded one at a time, and watched.

A folder holds files `NAME.onnx` and `NAME.tflite`, each version 1 of a model, and folders as Triton has them:
`NAME/VERSION/model.onnx` (or .tflite), with `NAME/config.pbtxt` if there is one. It is looked at once a second. A file
is loaded when it was the same in two looks that follow each other, so not while it is being written; one that changes
is loaded again, and takes the old one's place when it is ready. What cannot be loaded stands in the index with its
reason, and the old version goes on.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from driver.gateways.oip.model_config import CONFIG_FILE, FolderConfig, folder_config, text_of
from driver.gateways.oip.served_model import ServedModel
from driver.gateways.refusal import Refusal, RefusalCode, invalid, not_found, refusal_of
from driver.importers.files import READERS

if TYPE_CHECKING:
    from pathlib import Path

_LOG = logging.getLogger("burst.oip")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@-]{0,127}")
_PERIOD = 1.0
_MOST_VERSION = 2**31
Load = Callable[[str, str, "Path", FolderConfig], ServedModel]
Stamp = tuple[tuple[int, int, int, int], ...]


class FoundModel(NamedTuple):
    """A version of a model in the folder. stamp: what tells that its files have changed."""

    name: str
    version: int
    path: Path
    config: str
    stamp: Stamp
    reason: str = ""


@dataclass
class ModelState:
    """The state of a version. stamp: of the files that were loaded, or could not be."""

    stamp: Stamp
    served: ServedModel | None = None
    reason: str = ""


class ModelWatcher(Protocol):
    """Is told of models, one at a time."""

    def ready(self, served: ServedModel) -> None:
        """Note a model that requests find from now on."""

    def gone(self, served: ServedModel) -> None:
        """Note a model that no request finds any more, before it is closed."""


class ModelRepository:
    """The models of a folder, by name and version. Any thread."""

    def __init__(self, folder: Path, load: Load, period: float = _PERIOD) -> None:
        """`load`: makes a version ready; it may take long, and raise. `period`: seconds between two looks."""
        self._folder, self._load, self._period = folder, load, period
        self._lock = threading.Lock()  #: of what is below; held for moments
        self._loading = threading.Lock()  #: held while models are loaded
        self._states: dict[tuple[str, int], ModelState] = {}
        self.watchers: list[ModelWatcher] = []
        self._unloaded: set[str] = set()  # by a client: they stay so until one loads them
        self._seen: dict[tuple[str, int], Stamp] = {}
        self.has_begun = False  #: what was in the folder at the beginning is loaded, or could not be
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_ready(self) -> bool:
        """True if requests are answered."""
        return self.has_begun

    # ---- finding

    def begin(self) -> None:
        """Load what is there, and watch from then on."""
        self._seen = {(each.name, each.version): each.stamp for each in self._found()}
        self.look()
        self.has_begun = True
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(self._end,), name="burst-oip-models", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Load models that were given back, before a client asks for them. These never are."""

    def _watch(self, end: threading.Event) -> None:
        while not end.wait(self._period):
            try:
                self.look()
            except Exception:  # noqa: BLE001 (it is looked at again)
                _LOG.exception("the folder of models could not be read")

    def look(self) -> None:
        """Load what is new or has changed and was the same at the last look, and unload what has gone."""
        with self._loading:
            found = {(each.name, each.version): each for each in self._found()}
            stamps = {key: each.stamp for key, each in found.items()}
            for key, each in found.items():
                state = self._states.get(key)
                is_settled = self._seen.get(key) == each.stamp
                if is_settled and each.name not in self._unloaded and (state is None or state.stamp != each.stamp):
                    self._take(each)
            self._seen = stamps
            for key in [key for key in self._states if key not in found]:
                self._drop(key)

    def _found(self) -> list[FoundModel]:
        files, folders = list[FoundModel](), list[FoundModel]()
        for path in sorted(self._folder.iterdir()):
            name = path.stem if path.suffix.lower() in READERS else path.name
            if path.name.startswith(".") or not _NAME.fullmatch(name):
                continue
            with suppress(OSError):  # it has gone
                if path.is_dir():
                    folders += self._found_in(path)
                elif path.suffix.lower() in READERS:
                    files.append(FoundModel(name, 1, path, "", stamp=_stamp(path)))
        names = {each.name for each in folders}
        return folders + [each for each in files if each.name not in names]

    def _found_in(self, folder: Path) -> list[FoundModel]:
        """Return the versions of a model in Triton's layout that are to be served."""
        numbers = {int(each.name): each for each in folder.iterdir() if _is_version(each)}
        beside = folder / CONFIG_FILE
        has_config = beside.is_file()
        if not numbers:
            return []
        try:
            text = text_of(beside, CONFIG_FILE) if has_config else ""
            config = folder_config(text)
            if config.message.name not in ("", folder.name):
                raise invalid(
                    f"{CONFIG_FILE}: its name is {config.message.name!r:.80}, and its folder's {folder.name!r}"
                )
        except Refusal as error:
            latest = max(numbers)
            return [FoundModel(folder.name, latest, numbers[latest], "", stamp=_stamp(beside), reason=str(error))]
        found = []
        for version in sorted(config.versions(set(numbers))):
            path = _file_in(numbers[version], config.file_name)
            if path is None:
                reason = f"{folder.name}/{version} has no {config.file_name or 'model.onnx and no model.tflite'}"
                found.append(
                    FoundModel(
                        folder.name, version, numbers[version], text, stamp=_stamp(numbers[version]), reason=reason
                    )
                )
            else:
                stamp = _stamp(path) + (_stamp(beside) if has_config else ())
                found.append(FoundModel(folder.name, version, path, text, stamp=stamp))
        return found

    # ---- loading, under `_loading`

    def _take(self, found: FoundModel) -> None:
        """Load a version, which takes the place of the one before."""
        key, reason, served = (found.name, found.version), found.reason, None
        if not reason:
            try:
                served = self._load(found.name, str(found.version), found.path, FolderConfig(found.config))
            except Exception as error:  # noqa: BLE001 (a model file may make its runtime raise anything)
                reason = refusal_of(error, _note).text
        with self._lock:
            before = self._states.get(key)
            old = before.served if before else None
            self._states[key] = ModelState(found.stamp, served or old, reason)
        if reason:
            _LOG.warning("%s/%d is not served: %s", found.name, found.version, reason)
        elif served:
            passed_over = ", ".join(served.config.ignored)
            note = f" ({CONFIG_FILE}: no effect here: {passed_over})" if passed_over else ""
            _LOG.info("%s/%d is ready%s", found.name, found.version, note)
            for each in self.watchers:
                each.ready(served)
            if old:
                self._finish(old)

    def _drop(self, key: tuple[str, int]) -> None:
        with self._lock:
            state = self._states.pop(key)
        if state.served:
            self._finish(state.served)
            _LOG.info("%s/%d is unloaded", *key)

    def _finish(self, served: ServedModel) -> None:
        for each in self.watchers:
            each.gone(served)
        served.close()

    # ---- what clients ask

    def get(self, name: str, version: str = "") -> ServedModel:
        """Return that version of a model, or its latest. Raise Refusal."""
        self.wake()
        with self._lock:
            served = {v: state.served for (n, v), state in self._states.items() if n == name and state.served}
            if served:
                chosen = max(served) if not version else int(version) if version.isdecimal() else -1
                if (found := served.get(chosen)) is not None:
                    return found
                raise not_found(
                    f"model {name!r} has no version {version!r:.20}; it has {', '.join(map(str, sorted(served)))}"
                )
            reasons = [state.reason for (n, _), state in self._states.items() if n == name]
        if name in self._unloaded:
            raise Refusal(RefusalCode.UNAVAILABLE, f"model {name!r:.128} is unloaded; load it first")
        if reasons:
            raise Refusal(RefusalCode.UNAVAILABLE, f"model {name!r:.128} is not ready: {reasons[0]}")
        raise not_found(f"there is no model {name!r:.128}; the repository index has those that there are")

    def versions(self, name: str) -> list[str]:
        """Return those that are ready."""
        self.wake()
        with self._lock:
            return [str(v) for (n, v), state in sorted(self._states.items()) if n == name and state.served]

    def all(self) -> list[ServedModel]:
        """Return every version that is ready."""
        self.wake()
        with self._lock:
            return [state.served for _, state in sorted(self._states.items()) if state.served]

    def index(self, *, ready: bool) -> list[dict[str, Any]]:
        """Return every version, its state, and why it is not ready."""
        self.wake()
        with self._lock:
            states = dict(self._states)
        rows = []
        for (name, version), state in sorted(states.items()):
            row = {"name": name, "version": str(version), "state": "READY" if state.served else "UNAVAILABLE"}
            rows.append({**row, "reason": state.reason})
        known = {name for name, _ in states}
        rows += [
            {"name": name, "version": "", "state": "UNAVAILABLE", "reason": "unloaded"}
            for name in sorted(self._unloaded - known)
        ]
        return [row for row in rows if row["state"] == "READY"] if ready else rows

    def load(self, name: str) -> None:
        """Load the versions of a model that are not ready, or have changed. Raise Refusal."""
        self.wake()
        with self._loading:
            found = [each for each in self._found() if each.name == name]
            if not found:
                raise not_found(f"there is no model {name!r:.128} in the folder of models")
            for each in found:
                state = self._states.get((name, each.version))
                if state is None or state.served is None or state.stamp != each.stamp:
                    self._take(each)
            self._unloaded.discard(name)  # until now requests are told that it is unloaded
            reasons = [self._states[name, each.version].reason for each in found]
            if all(reasons):
                raise invalid(f"model {name!r} cannot be loaded: {reasons[-1]}")

    def unload(self, name: str) -> None:
        """Unload a model, whose running requests are finished. Raise Refusal."""
        self.wake()
        with self._loading:
            keys = [key for key in self._states if key[0] == name]
            if not keys:
                raise not_found(f"there is no model {name!r:.128} that could be unloaded")
            self._unloaded.add(name)
            for key in keys:
                self._drop(key)

    def close(self) -> None:
        """Stop watching, and end all models."""
        self._end.set()
        if self._thread:
            self._thread.join()
        with self._loading:
            for key in list(self._states):
                self._drop(key)


def _is_version(path: Path) -> bool:
    return path.name.isascii() and path.name.isdecimal() and 0 < int(path.name) < _MOST_VERSION and path.is_dir()


def _file_in(folder: Path, name: str) -> Path | None:
    names = [name] if name else [f"model{suffix}" for suffix in READERS]
    return next((path for each in names if (path := folder / each).is_file()), None)


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return ((found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns),)


def _note(error: Exception) -> None:
    _LOG.error("a model could not be loaded", exc_info=error)
