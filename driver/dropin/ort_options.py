"""SessionOptions and RunOptions of ONNX Runtime that remember what was set, and what of it a device takes.

The real ones are objects of C++ that tell much, but not all: neither sizes of open dimensions nor operators that were
registered. So what cannot be read back is written down when it is set.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from driver.devices.onnxruntime.session_settings import ENTRIES, SessionSettings
from driver.dropin.not_on_device import NotOnDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.dropin.device_model import RunOnBurst

_real: Any = import_module("onnxruntime")
_RealSessionOptions: Any = _real.SessionOptions
_RealRunOptions: Any = _real.RunOptions

_IN_PROCESS = {
    "add_external_initializers": "the options have weights of the program's own",
    "add_external_initializers_from_files_in_memory": "the options have weights of the program's own",
    "add_initializer": "the options have weights of the program's own",
    "add_provider": "the options choose an execution provider",
    "add_provider_for_devices": "the options choose an execution provider",
    "register_custom_ops_library": "the options have a library of custom operators",
    "set_ep_context_data_read_func": "the options call a function of the program",
    "set_load_cancellation_flag": "the options cancel the loading of the session",
    "set_provider_selection_policy": "the options choose an execution provider",
    "set_provider_selection_policy_delegate": "the options choose an execution provider",
}
"""Methods of the options -> what a device does not do."""
_WITHOUT_EFFECT = (
    "session.use_env_allocators",
    "session.use_device_allocator_for_initializers",
    "session.intra_op",
    "session.inter_op",
    "session.force_spinning_stop",
    "session.dynamic_block_base",
)
"""Beginnings of keys of the configuration that decide about time and memory in this process alone."""
_FROM_MODEL = "ORT_LOAD_CONFIG_FROM_MODEL"
"""The variable by which ONNX Runtime takes a session's options from its file."""
_PROPERTIES = (
    "enable_cpu_mem_arena",
    "enable_mem_pattern",
    "enable_mem_reuse",
    "enable_profiling",
    "execution_mode",
    "execution_order",
    "graph_optimization_level",
    "inter_op_num_threads",
    "intra_op_num_threads",
    "log_severity_level",
    "log_verbosity_level",
    "logid",
    "optimized_model_filepath",
    "profile_file_prefix",
    "use_deterministic_compute",
    "use_per_session_threads",
)


class RecordedOptions(NamedTuple):
    """Values that were set, so that the same options can be made again."""

    properties: dict[str, Any]
    calls: list[tuple[str, tuple[Any, ...]]]


class SessionOptions(_RealSessionOptions):  # type: ignore[misc]
    """Options of a session. See `onnxruntime.SessionOptions`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []  #: methods that were called, and with which arguments

    @classmethod
    def of(cls, recorded: RecordedOptions) -> SessionOptions:
        """Return the options that were recorded."""
        options = cls()
        for name, value in recorded.properties.items():
            kind = type(getattr(options, name))
            setattr(options, name, value if isinstance(value, kind) else kind(value))
        for name, arguments in recorded.calls:
            getattr(options, name)(*arguments)
        return options

    @property
    def recorded(self) -> RecordedOptions:
        """The values that were set, plain enough to be pickled."""
        found = {name: getattr(self, name) for name in _PROPERTIES if hasattr(self, name)}
        plain = {name: value if isinstance(value, bool | int | str) else int(value) for name, value in found.items()}
        return RecordedOptions(plain, list(self.calls))

    def entries(self) -> dict[str, str]:
        """Return the entries of the configuration that were added."""
        return {args[0]: args[1] for name, args in self.calls if name == "add_session_config_entry"}

    def dimensions(self, by: str) -> dict[str, int]:
        """Return the sizes of open dimensions that were given, by "name" or "denotation"."""
        method = f"add_free_dimension_override_by_{by}"
        return {args[0]: args[1] for name, args in self.calls if name == method}


def _recording(name: str) -> Callable[..., Any]:
    """Return a method that does what the real one does, and notes it."""

    def method(self: SessionOptions, *arguments: Any) -> Any:
        found = getattr(_RealSessionOptions, name)(self, *arguments)
        self.calls.append((name, arguments))
        return found

    method.__name__, method.__doc__ = name, getattr(_RealSessionOptions, name).__doc__
    return method


_RECORDED = (
    "add_session_config_entry",
    "add_free_dimension_override_by_name",
    "add_free_dimension_override_by_denotation",
    "clear_ep_context_data_read_func",
    *_IN_PROCESS,
)
for _name in _RECORDED:
    if hasattr(_RealSessionOptions, _name):  # releases differ
        setattr(SessionOptions, _name, _recording(_name))


def settings_for(options: Any, providers: Any, more: dict[str, Any]) -> SessionSettings:
    """Return what a device is told of a session's arguments. Raise NotOnDevice for what it does not do."""
    _check_providers(providers)
    if os.environ.get(_FROM_MODEL) == "1":
        raise NotOnDevice(f"{_FROM_MODEL} is set: the file may have options of its own")
    if more.get("disabled_optimizers"):
        raise NotOnDevice("the session leaves optimisers out by name")
    if options is None:
        return SessionSettings()
    if not isinstance(options, SessionOptions):
        raise NotOnDevice("its options are not of the class onnxruntime.SessionOptions")
    for name, _ in options.calls:
        if reason := _IN_PROCESS.get(name):
            raise NotOnDevice(reason)
    if options.enable_profiling:
        raise NotOnDevice("the session is profiled", "see `burst trace`")
    if options.optimized_model_filepath:
        raise NotOnDevice("the session writes its optimised graph to a file")
    level, threads = options.graph_optimization_level, options.intra_op_num_threads
    return SessionSettings(
        level=level.name,
        threads=max(0, threads),
        is_deterministic=options.use_deterministic_compute,
        entries=_entries(options),
        sizes=options.dimensions("name"),
        denotations=options.dimensions("denotation"),
    )


def _entries(options: SessionOptions) -> dict[str, str]:
    """Return the entries that a device takes. Raise NotOnDevice for one that it does not know."""
    found = {key: value for key, value in options.entries().items() if not key.startswith(_WITHOUT_EFFECT)}
    if unknown := sorted(found.keys() - ENTRIES):
        raise NotOnDevice(f"the options have the configuration entry {unknown[0]!r}")
    return found


_ON_CPU = {"CPUExecutionProvider", "AzureExecutionProvider"}


def _check_providers(providers: Any) -> None:
    """Raise NotOnDevice for a provider that is here, and that the device does not have."""
    names = available = _real.get_available_providers()
    if providers is not None:
        if not isinstance(providers, Sequence):
            raise NotOnDevice("its providers are no sequence")
        names = [each[0] if isinstance(each, tuple) and each else each for each in providers]
    for name in available:
        if name in names and name not in _ON_CPU:
            raise NotOnDevice(f"the session may use {name}")


class RunOptions(_RealRunOptions):  # type: ignore[misc]
    """Options of a run. See `onnxruntime.RunOptions`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.has_adapter = False  #: whether the run has weights of the program's own
        self._running: weakref.WeakSet[RunOnBurst] = weakref.WeakSet()

    @property
    def terminate(self) -> bool:
        """True if runs with these options are to end."""
        return bool(_RealRunOptions.terminate.__get__(self))

    @terminate.setter
    def terminate(self, value: bool) -> None:
        _RealRunOptions.terminate.__set__(self, value)
        if value:
            for run in list(self._running):
                run.cancel()

    def watch(self, run: RunOnBurst) -> None:
        """End that run when these options say so."""
        self._running.add(run)
        if self.terminate:
            run.cancel()

    def add_active_adapter(self, adapter: Any) -> None:
        """Add an adapter to the run."""
        super().add_active_adapter(adapter)
        self.has_adapter = True

    @staticmethod
    def obstacle_of(options: Any) -> str:
        """Return what of the options of a run a device does not do; "" if it is nothing."""
        if not isinstance(options, RunOptions):
            return "its options are not of the class onnxruntime.RunOptions"
        if options.has_adapter:
            return "the run has adapters"
        if options.terminate or options.only_execute_path_to_fetches:
            return "the run is to end early"
        return ""
