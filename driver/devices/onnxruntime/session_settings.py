"""How a file's session is made: options that a program set, which travel in the file.

They are one entry of the file's own metadata, behind all that was in it. So files with the same weights and other
options are other models, for all that compares models by their content, and an application that gives none gets what it
got before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from driver.formats.onnx_schema import FIELDS
from driver.formats.protobuf import ProtoWriter
from driver.nn import InvalidModel

KEY = "burst.session"
"""The key of the entry."""

LEVELS = (
    "ORT_DISABLE_ALL",
    "ORT_ENABLE_BASIC",
    "ORT_ENABLE_EXTENDED",
    "ORT_ENABLE_LAYOUT",
    "ORT_ENABLE_ALL",
)
ENTRIES = frozenset(
    {
        "mlas.disable_kleidiai",
        "mlas.enable_gemm_fastmath_arm64_bfloat16",
        "mlas.use_lut_gemm",
        "optimization.enable_cast_chain_elimination",
        "optimization.enable_gelu_approximation",
        "session.allow_released_opsets_only",
        "session.disable_aot_function_inlining",
        "session.disable_double_qdq_remover",
        "session.disable_prepacking",
        "session.disable_qdq_constant_folding",
        "session.disable_quant_qdq",
        "session.enable_quant_qdq_cleanup",
        "session.qdqisint8allowed",
        "session.strict_shape_type_inference",
        "session.x64quantprecision",
    }
)
"""Keys of the configuration that decide about bits, and about nothing outside of the session."""

_MOST_THREADS, _MOST_SIZES, _LONGEST = 256, 1000, 200
_MOST_SIZE, _LONGEST_TEXT = 2**31 - 1, 2**21


class SessionSettings(NamedTuple):
    """The options that a program set, which no default of a device replaces.

    level: of optimisations, by its name; "" leaves it to ONNX Runtime. threads: of one execution; 0 is one for each
    core. sizes: of open dimensions, by their names. denotations: the same, by what they denote.
    """

    level: str = ""
    threads: int = 0
    is_deterministic: bool = False
    entries: Mapping[str, str] = MappingProxyType({})
    sizes: Mapping[str, int] = MappingProxyType({})
    denotations: Mapping[str, int] = MappingProxyType({})

    def encoded(self) -> bytes:
        """Return what is appended to the bytes of a file."""
        fields, entry = FIELDS["ModelProto"], FIELDS["StringStringEntryProto"]
        words = json.dumps({name: _plain(value) for name, value in self._asdict().items()}, sort_keys=True)
        told = ProtoWriter().text(entry["key"], KEY).text(entry["value"], words)
        return ProtoWriter().message(fields["metadata_props"], told).joined()

    def number(self, measured: int) -> int:
        """Return the number of threads: what the program asked for, else what was measured, else one for each core."""
        return min(self.threads or measured or cores(), os.cpu_count() or 1)

    def add_to(self, options: Any, library: Any, threads: int = 0) -> None:
        """Set a session's options. `threads`: how many; 0: as `number` says."""
        if self.level:
            levels = library.GraphOptimizationLevel.__members__
            options.graph_optimization_level = levels.get(self.level, levels["ORT_ENABLE_ALL"])
        options.use_deterministic_compute = self.is_deterministic
        options.intra_op_num_threads = threads or self.number(0)
        # As in the program's own process; but between runs threads leave the processors to other clients.
        options.add_session_config_entry("session.intra_op.allow_spinning", "1")
        options.add_session_config_entry("session.force_spinning_stop", "1")
        for key, value in self.entries.items():
            options.add_session_config_entry(key, value)
        for name, size in self.sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        for name, size in self.denotations.items():
            options.add_free_dimension_override_by_denotation(name, size)


def settings_of(text: str) -> SessionSettings:
    """Return the settings that an entry tells. Raise InvalidModel for what is none: a client wrote it."""
    try:
        found = SessionSettings(**json.loads(text if len(text) <= _LONGEST_TEXT else ""))
        sizes = (*found.sizes.items(), *found.denotations.items())
        is_right = (
            found.level in {"", *LEVELS}
            and type(found.threads) is int
            and 0 <= found.threads <= _MOST_THREADS
            and type(found.is_deterministic) is bool
            and set(found.entries) <= ENTRIES
            and all(type(value) is str and len(value) <= _LONGEST for value in found.entries.values())
            and len(sizes) <= _MOST_SIZES
            and all(len(name) <= _LONGEST and type(size) is int and 0 < size <= _MOST_SIZE for name, size in sizes)
        )
    except (ValueError, TypeError, AttributeError, RecursionError):
        is_right = False
    if not is_right:
        raise InvalidModel(f"the entry {KEY!r} of the .onnx file's metadata is no settings of a session: {text!r:.200}")
    return found


def cores() -> int:
    """Return how many cores the machine has: ONNX Runtime makes a thread for each, whatever threads they run."""
    found = set()
    for place in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list"):
        try:
            found.add(place.read_text())
        except OSError:  # a processor that has just gone
            continue
    return len(found) or os.cpu_count() or 1


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value
