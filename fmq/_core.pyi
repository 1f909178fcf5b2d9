"""What cffi builds from csrc/api.h; README there says what each function does."""

from typing import Any

ffi: Any
lib: Any
