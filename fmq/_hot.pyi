"""What cffi builds from csrc/fmq/hot_api.h; that file says why there is a second module."""

from typing import Any, TypeAlias, type_check_only

_Pointer: TypeAlias = Any  # a cffi pointer, and bytes for `const void *`

@type_check_only
class _Lib:
    def fmq_hot_exchange(self, channel: _Pointer, packet: _Pointer, nbytes: int, /) -> int: ...

ffi: Any
lib: _Lib
