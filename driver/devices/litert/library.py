"""The functions of LiteRT's C API that the device needs, from a wheel of a pinned version.

The library is young and carries no version in its name, so only the pinned wheel is loaded.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cffi import FFI

from burst_engine.names import install_command
from driver.devices.litert.wheel import folder, missing
from driver.devices.lowering.errors import LibraryFailed, LibraryMissing, in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from driver.devices.litert.packed import PackedMemory
    from driver.devices.litert.tflite_file import FileImage
    from driver.devices.litert.weights import Image

_CPU = 1  # of its hardware accelerators
_OPTION_TYPE_INT, _LOG_SEVERITY, _REGISTERED, _ERRORS = 2, 25, 24, 3  # environment options
_ELEMENTS = {
    "FLOAT32": 1,
    "INT32": 2,
    "UINT8": 3,
    "INT64": 4,
    "BOOL": 6,
    "INT16": 7,
    "INT8": 9,
    "FLOAT16": 10,
    "FLOAT64": 11,
    "UINT64": 13,
    "UINT32": 16,
    "UINT16": 17,
    "BFLOAT16": 19,
}
_UNSUPPORTED = 5
_STATUSES = {
    1: "invalid argument",
    2: "out of memory",
    3: "runtime failure",
    4: "missing argument",
    _UNSUPPORTED: "unsupported",
    501: "invalid flatbuffer",
}
MOST_DIMENSIONS = 8
_QUANTISED, _FORCE_FP16 = 3, 4  # flags of XNNPACK's delegate
_IDENTIFIERS = (b"xnnpack", b"cpu_delegate")  # read by the delegate, and by the interpreter's set-up
_RUNTIME, _KEEP_ERRORS = b"runtime_options_string", b"error_reporter_mode = 2\n\0"

ffi = FFI()
ffi.cdef(
    """
    typedef int LiteRtStatus;
    typedef struct { uint32_t rank; int32_t dimensions[8]; uint32_t strides[8]; } Layout;
    typedef struct { int32_t element; Layout layout; } TensorType;
    typedef struct { int32_t type; int64_t value; } Any;
    typedef struct { int32_t tag; Any value; } EnvironmentOption;

    LiteRtStatus LiteRtCreateEnvironment(int count, const EnvironmentOption *options, void **environment);
    LiteRtStatus LiteRtCreateModelFromBuffer(void *environment, const void *buffer, size_t size, void **model);
    void LiteRtDestroyModel(void *model);
    LiteRtStatus LiteRtCreateOptions(void **options);
    LiteRtStatus LiteRtSetOptionsHardwareAccelerators(void *options, int accelerators);
    LiteRtStatus LiteRtCreateOpaqueOptions(const char *name, void *payload, void (*free)(void *), void **opaque);
    LiteRtStatus LiteRtAddOpaqueOptions(void *options, void *opaque);
    void LiteRtDestroyOptions(void *options);
    LiteRtStatus LiteRtCreateCompiledModel(void *environment, void *model, void *options, void **compiled);
    void LiteRtDestroyCompiledModel(void *compiled);
    LiteRtStatus LiteRtSetCompiledModelCancellationFunction(void *compiled, void *data, _Bool (*is_cancelled)(void *));
    LiteRtStatus LiteRtRunCompiledModel(void *compiled, size_t signature, size_t n_inputs, void **inputs,
                                        size_t n_outputs, void **outputs);
    LiteRtStatus LiteRtCreateTensorBufferFromHostMemory(const TensorType *type, void *address, size_t size,
                                                        void (*free)(void *), void **buffer);
    void LiteRtDestroyTensorBuffer(void *buffer);
    LiteRtStatus LiteRtGetCompiledModelOutputTensorLayouts(void *compiled, size_t signature, size_t count,
                                                           Layout *layouts, _Bool allocates);
    LiteRtStatus LiteRtCompiledModelGetErrorMessages(void *compiled, char **messages);
    LiteRtStatus LiteRtCompiledModelClearErrors(void *compiled);
    void *malloc(size_t size);
    void free(void *memory);
    size_t strlen(const char *text);
    """
)


@cache
def library() -> Any:
    """LiteRT, as cffi shows it. Raise LibraryMissing."""
    _, where = folder()
    if where is None:
        raise LibraryMissing(f"{missing()}; {install_command('litert')}")
    path = Path(where, "libLiteRt.so")
    try:
        return ffi.dlopen(str(path))
    except OSError as error:
        raise LibraryMissing(f"{path} cannot be loaded: {error}; {install_command('litert')}") from error


@cache
def _libc() -> Any:
    return ffi.dlopen(None)


@cache
def _environment() -> Any:
    """Return the process's only environment. CPU alone: other accelerators look for hardware and print what they
    miss.
    """
    options = [(_LOG_SEVERITY, (_OPTION_TYPE_INT, _ERRORS)), (_REGISTERED, (_OPTION_TYPE_INT, _CPU))]
    return _new(library().LiteRtCreateEnvironment, len(options), ffi.new("EnvironmentOption[]", options))


def status_text(status: int) -> str:
    """Return a status of the library, in words."""
    return f"LiteRT's status {status} ({_STATUSES.get(status, 'unknown')})"


def _check(status: int, what: str) -> None:
    if status:
        error = LibraryFailed(f"{what}: {status_text(status)}")
        error.status = status
        raise error


def _new(function: Any, *arguments: Any) -> Any:
    """Return what `function` makes. Raise LibraryFailed."""
    handle = ffi.new("void **")
    _check(function(*arguments, handle), str(ffi.typeof(function)))
    return handle[0]


def _options(threads: int, packed: PackedMemory | None, *, half: bool) -> Any:
    """Return the options for a compiled model. XNNPACK is on unless they say otherwise. `half`: it computes float32 as
    float16.
    """
    api = library()
    options = _new(api.LiteRtCreateOptions)
    _check(api.LiteRtSetOptionsHardwareAccelerators(options, _CPU), "accelerators")
    where = f'weight_cache_file_path = "{packed.path}"\n' if packed else ""
    precision = f"flags = {_QUANTISED | _FORCE_FP16}\n" if half else ""
    for identifier in _IDENTIFIERS:
        _add(options, identifier, f"num_threads = {threads}\n{precision}{where}".encode() + b"\0")
    return options


def _add(options: Any, identifier: bytes, text: bytes) -> None:
    """Add options that are a text, which the library frees."""
    api, libc = library(), _libc()
    payload = libc.malloc(len(text))
    ffi.memmove(payload, text, len(text))
    opaque = _new(api.LiteRtCreateOpaqueOptions, identifier, payload, ffi.addressof(libc, "free"))
    _check(api.LiteRtAddOpaqueOptions(options, opaque), "options")


class Compiled:
    """A flatbuffer made ready to run, in one thread at a time; `handle`: the library's pointer to it."""

    def __init__(self, image: Image, threads: int, packed: PackedMemory | None = None) -> None:
        """`image`: a flatbuffer and its constants. `packed`: memory for its packed weights: LiteRT uses
        those that it finds there, unchecked, or writes them if it is empty; None: the library's own memory.

        Raise LibraryFailed.
        """
        self._api, self.image, self.packed = library(), image, packed  # the library goes on reading these
        self._model = self.handle = ffi.NULL
        self._model = self._read()
        options = _options(threads, packed, half=image.half)
        try:
            self._extend(options)
            self.handle = _new(self._api.LiteRtCreateCompiledModel, _environment(), self._model, options)
        finally:
            self._api.LiteRtDestroyOptions(options)

    def _read(self) -> Any:
        address = ffi.cast("void *", self.image.address)
        return _new(self._api.LiteRtCreateModelFromBuffer, _environment(), address, self.image.nbytes)

    def _extend(self, options: Any) -> None:
        """Add further options."""

    def ask(self, function: int, data: int) -> None:
        """Set the cancellation function, a _Bool (*)(void *data) that the library calls before each node.

        Both are addresses, and live as long as this object. Raise LibraryFailed.
        """
        asked = ffi.cast("_Bool (*)(void *)", function)
        status = self._api.LiteRtSetCompiledModelCancellationFunction(self.handle, ffi.cast("void *", data), asked)
        _check(status, "setting the cancellation function")

    def __del__(self) -> None:
        if self.handle:
            self._api.LiteRtDestroyCompiledModel(self.handle)
        if self._model:
            self._api.LiteRtDestroyModel(self._model)


class CompiledFile(Compiled):
    """A .tflite file made ready to run."""

    image: FileImage

    def _read(self) -> Any:
        """LiteRT verifies all tables first; what it refuses after that, it has not to know."""
        self.image.show(outline=False)
        try:
            return super()._read()
        except LibraryFailed as error:
            if error.status != _UNSUPPORTED:
                raise
        self.image.show(outline=True)
        try:
            return super()._read()
        finally:
            self.image.show(outline=False)

    @classmethod
    def verify(cls, image: FileImage) -> None:
        """Let LiteRT look at all tables of the file, without compiling it. Raise LibraryFailed."""
        found = cls.__new__(cls)
        found._api, found.image = library(), image
        found._model = found.handle = ffi.NULL
        try:
            found._model = found._read()
        except LibraryFailed as error:
            raise LibraryFailed(f"LiteRT rejected the file: {error}") from None

    def _extend(self, options: Any) -> None:
        _add(options, _RUNTIME, _KEEP_ERRORS)

    def shapes(self, count: int) -> list[tuple[int, ...]]:
        """Make it ready to run, and return the shapes of its `count` outputs, as far as known then. Raises
        LibraryFailed.
        """
        layouts = ffi.new("Layout[]", max(1, count))
        status = self._api.LiteRtGetCompiledModelOutputTensorLayouts(self.handle, 0, count, layouts, True)
        if status:
            raise LibraryFailed(self.told() or status_text(status))
        return [tuple(layouts[n].dimensions[0 : layouts[n].rank]) for n in range(count)]

    def told(self) -> str:
        """Return what it has said of errors since the last time, in one line."""
        messages = ffi.new("char **")
        if self._api.LiteRtCompiledModelGetErrorMessages(self.handle, messages) or not messages[0]:
            return ""
        text = bytes(ffi.buffer(messages[0], _libc().strlen(messages[0])))
        _libc().free(messages[0])
        self._api.LiteRtCompiledModelClearErrors(self.handle)
        return in_words(text.decode(errors="replace"))


class TensorBuffers:
    """The library's tensor buffers on existing memory; `handles`: an array of pointers to them."""

    def __init__(self, arrays: Sequence[tuple[str, tuple[int, ...], NDArray[np.uint8]]]) -> None:
        """`arrays`: TFLite type, dimensions and memory of each tensor. Raise LibraryFailed."""
        api = library()
        self._api, self._arrays, self._count = api, arrays, 0
        self.handles = ffi.new("void *[]", max(1, len(arrays)))
        for type_, dimensions, memory in arrays:
            description: Any = ffi.new("TensorType *", {"element": _ELEMENTS[type_]})
            description.layout.rank = len(dimensions)
            description.layout.dimensions[0 : len(dimensions)] = dimensions
            address = ffi.cast("void *", memory.ctypes.data)
            create = api.LiteRtCreateTensorBufferFromHostMemory
            self.handles[self._count] = _new(create, description, address, memory.nbytes, ffi.NULL)
            self._count += 1

    def __len__(self) -> int:
        return self._count

    def __del__(self) -> None:
        for i in range(self._count):
            self._api.LiteRtDestroyTensorBuffer(self.handles[i])
