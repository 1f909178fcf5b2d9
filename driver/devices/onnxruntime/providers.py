"""The execution providers of ONNX Runtime that are devices of their own: one table.

A provider is a plug-in, a shared library in a package of its own (`onnxruntime-ep-…`) or in ONNX Runtime's wheel for
it. It is found by the names of the files that the package has installed, so nothing of the package is imported. To add
a provider: an entry in `PROVIDERS`, its class in `provider_device.py`, a name in pyproject.toml, a test.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from burst import DeviceUnavailable, ResourceExhaustedTransient
from burst_engine.names import install_command
from driver.config import in_home
from driver.devices.device_options import DeviceOption, chosen_options, configuration_of
from driver.devices.lowering.errors import LibraryFailed, LibraryMissing
from driver.devices.nvidia import NODES
from driver.devices.onnxruntime.library import library
from driver.devices.onnxruntime.library import version as runtime_version
from driver.interface import Needs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from importlib.metadata import Distribution

    from driver.devices.device_options import Value
    from driver.devices.onnxruntime.on_cuda import OrtLane, OrtLanes


def distribution(name: str) -> Distribution | None:
    """Return an installed package; None: it is not installed."""
    from importlib import metadata  # most of these devices' modules are loaded without any of the packages

    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


OLDEST_RUNTIME = (1, 24)
"""The first ONNX Runtime that tells which provider runs which node."""

ERRORS = 3
"""Of the severities of ONNX Runtime's log."""

SHADER_CACHE = "~/.local/state/burst/shaders"
"""The drivers' cache of compiled shaders: a folder that only devices write to, not the one of the user's desktop."""


class OrtProvider(NamedTuple):
    """The facts about a provider. packages: any of these has its library, which matches `file`."""

    device: str
    title: str
    extra: str
    packages: tuple[str, ...]
    file: str
    options: Mapping[str, DeviceOption]
    nodes: tuple[str, ...]  #: of devices, one of which is there if the hardware is
    needs: Needs
    lost: str  #: matches errors after which this process cannot use the GPU any more
    slots: int  #: executions at once
    uses_vulkan: bool = False
    lacks: frozenset[str] = frozenset()  #: types that it computes on no hardware
    inexact: Mapping[str, str] = MappingProxyType({})  #: operations of the HAL that it computes worse than that allows

    @property
    def configuration(self) -> Path:
        """The file with the device's options."""
        return configuration_of(self.device)

    def chosen(self, given: Mapping[str, object]) -> dict[str, Value]:
        """Return the options: `given` ones, else those of the configuration file, else the defaults. Raises
        ValueError.
        """
        return chosen_options(self.device, self.options, given)

    @property
    def package(self) -> Distribution | None:
        """The installed package with its library."""
        return next(filter(None, map(distribution, self.packages)), None)

    def missing(self) -> tuple[str, str] | None:
        """Return what the device lacks, and the remedy; None: nothing. Looks at files alone."""
        install = install_command(self.extra)
        found = runtime_version()
        if found == "none" or tuple(int(part) for part in found.split(".")[:2]) < OLDEST_RUNTIME:
            oldest = ".".join(map(str, OLDEST_RUNTIME))
            return f"the device needs onnxruntime {oldest} or later, and {found} is installed", install
        if self.package is None:
            return f"the package {self.packages[0]} is not installed", install
        if not any(place.exists() for place in map(Path, self.nodes)) and not self.driver:
            software = f", or name a software driver: driver = … in {self.configuration}" if self.uses_vulkan else ""
            seen = ", ".join(self.nodes)
            return f"there is no GPU: none of {seen} exists", f"install the GPU's kernel driver{software}"
        return None

    @property
    def driver(self) -> Path | None:
        """The Vulkan driver that the options name."""
        try:
            found = self.chosen({}).get("driver")
        except ValueError:  # each instance raises it
            return None
        return in_home(str(found)) if found else None

    @property
    def all_needs(self) -> Needs:
        """With the folder of the driver that the options name."""
        found = self.needs
        folder = (str(self.driver.parent),) if self.driver and self.driver.is_absolute() else ()
        return found._replace(read_paths=(*found.read_paths, str(self.configuration), *folder))

    @property
    def version(self) -> str:
        """The versions of ONNX Runtime and of the provider."""
        package = self.package
        plugin = package.version if package else "none"
        return f"2 (ONNX Runtime {runtime_version()}, {self.title} {plugin})"


_HARDWARE = ("/sys/devices/system/cpu", "/sys/bus/pci/devices", "/sys/class/drm", "/sys/dev/char", "/proc/cpuinfo")
_NVIDIA = (
    *("/dev/nvidiactl", "/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-caps"),
    *(f"/dev/nvidia{n}" for n in range(8)),
)
_VULKAN_NODES = (*(f"/dev/dri/renderD{n}" for n in range(128, 136)), *NODES, "/dev/mali0", "/dev/kgsl-3d0")
_CPU_NODES = DeviceOption("", bool, default=False)
_CUDA_NEEDS = Needs(
    (*_HARDWARE, "/sys/module", "/etc/nvidia", "~/.config/burst/cuda.toml"), (*_NVIDIA, "/dev/dxg"), ("ioctl",)
)
_CUDA_LOST = r"CUDA (failure|error) (46|214|700|702|709|71[0-9]|719|721|999)\b|device-side assert|illegal memory access"
_NO_MEMORY = r"[Ff]ailed to allocate memory|[Oo]ut of memory|OUT_OF_(DEVICE|HOST)_MEMORY|CUDA (failure|error) 2\b"

PROVIDERS = {
    provider.device: provider
    for provider in (
        OrtProvider(
            device="onnxruntime-webgpu",
            title="WebGPU",
            extra="webgpu",
            packages=("onnxruntime-ep-webgpu",),
            file="libonnxruntime_providers_webgpu.so",
            options={
                "driver": DeviceOption("", str),
                "power_preference": DeviceOption("powerPreference", ("high-performance", "low-power")),
                "layout": DeviceOption("preferredLayout", ("NCHW", "NHWC")),
                "validation": DeviceOption("validationMode", ("disabled", "wgpuOnly", "basic", "full")),
                "int64": DeviceOption("enableInt64", bool),
                "cpu_nodes": _CPU_NODES,
            },
            nodes=_VULKAN_NODES,
            needs=Needs(
                (*_HARDWARE, "/etc/vulkan", "/etc/drirc", "~/.local/share/vulkan", "/sys/module", "/etc/nvidia"),
                ("/dev/dri", *_NVIDIA, "/dev/dxg", "/dev/mali0", "/dev/kgsl-3d0"),
                ("ioctl",),
            ),
            # Where memory was short, ONNX Runtime keeps an invalid buffer, and gives it to later runs.
            lost=r"\[Device\] is lost|[Dd]evice (was|is) lost|DEVICE_LOST|\[Invalid Buffer",
            slots=1,
            uses_vulkan=True,
            lacks=frozenset({"float64"}),
            inexact={"SIN": "to 2^-11, as WGSL says"},
        ),
        OrtProvider(
            device="onnxruntime-cuda",
            title="CUDA",
            extra="cuda",
            packages=("onnxruntime-gpu",),
            file="libonnxruntime_providers_cuda.so",
            options={
                "device": DeviceOption("", int, default=0),
                "tf32": DeviceOption("use_tf32", bool, default=False),
                "memory_limit": DeviceOption("gpu_mem_limit", int),
                "convolution_search": DeviceOption(
                    "cudnn_conv_algo_search", ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"), default="HEURISTIC"
                ),
                "nhwc": DeviceOption("prefer_nhwc", bool),
                "graphs": DeviceOption("", bool, default=False),
                "cpu_nodes": _CPU_NODES,
            },
            nodes=NODES,
            needs=_CUDA_NEEDS,
            lost=_CUDA_LOST,
            slots=os.cpu_count() or 1,
        ),
        OrtProvider(
            device="onnxruntime-tensorrt-rtx",
            title="TensorRT RTX",
            extra="tensorrt-rtx",
            packages=("onnxruntime-ep-nv-tensorrt-rtx-cu13", "onnxruntime-ep-nv-tensorrt-rtx-cu12"),
            file="libonnxruntime_providers_nv_tensorrt_rtx*.so",
            options={"device": DeviceOption("", int, default=0), "cpu_nodes": _CPU_NODES},
            nodes=NODES,
            needs=_CUDA_NEEDS,
            lost=_CUDA_LOST,
            slots=1,
        ),
    )
}
"""By the name of its device."""


INDEX_OPERATORS = frozenset(
    {
        *("Shape", "Size", "Gather", "GatherElements", "Slice", "Concat", "Split", "Squeeze", "Unsqueeze", "Reshape"),
        *("Transpose", "Expand", "Tile", "Range", "ConstantOfShape", "Identity", "Cast", "Where", "Equal", "Less"),
        *("Greater", "Not", "And", "Or", "NonZero", "Add", "Sub", "Mul", "Div", "Mod", "Neg", "Min", "Max"),
        *("ReduceProd", "ReduceMax", "ReduceMin", "ReduceSum"),
    }
)
"""What computes shapes and indices. Every provider has kernels of these for floats, so that those which it leaves to
the CPU work on whole numbers, of which files have few.
"""


class ExecutionProvider:
    """A provider with its options, for the sessions of this process."""

    def __init__(self, provider: OrtProvider, options: Mapping[str, Value]) -> None:
        self.kind, self._options = provider, options
        self.may_use_cpu = bool(options["cpu_nodes"])
        self.give_up: Callable[[str], object] | None = None  #: ends the engine when the GPU is lost
        self._lanes: OrtLanes | None = None

    def environment(self) -> dict[str, str]:
        """Return the variables by which the drivers of GPUs are configured."""
        if not self.kind.uses_vulkan:
            return {}
        cache = str(in_home(SHADER_CACHE))
        driver = str(in_home(str(self._options.get("driver", "")))) if self._options.get("driver") else ""
        return {
            "MESA_SHADER_CACHE_DIR": cache,
            "__GL_SHADER_DISK_CACHE_PATH": cache,
            # ONNX Runtime finds GPUs on the PCI bus alone; the provider chooses its adapter itself, from Vulkan's.
            "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1",
            # Layers that put themselves before every program: overlays, recorders, choosers of a desktop's GPU.
            "VK_LOADER_LAYERS_DISABLE": "~implicit~",
            "NODEVICE_SELECT": "1",  # Mesa's, for loaders that do not know that
            # Of newer loaders, and of older ones.
            **(dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES"), driver) if driver else {}),
        }

    def set_environment(self) -> None:
        """Set these variables in this process. Before anything of the drivers is loaded."""
        os.environ.update(self.environment())

    def devices(self) -> list[Any]:
        """ONNX Runtime's devices of this provider. Loads its library. Raise LibraryMissing, LibraryFailed."""
        self.set_environment()
        name = _registered(self.kind.device)
        return [device for device in library().get_ep_devices() if device.ep_name == name]

    @property
    def ordinal(self) -> int:
        """The number of its GPU, from 0."""
        return int(self._options.get("device", 0))

    def lane(self) -> OrtLane | None:
        """Return what a session gets to run in the GPU's memory; None: the provider does not run there.

        Raise CudaMissing, CudaFailed.
        """
        if self.kind.device != "onnxruntime-cuda":
            return None
        if self._lanes is None:
            from driver.devices.onnxruntime.on_cuda import OrtLanes

            graphs = bool(self._options.get("graphs", False))
            self._lanes = OrtLanes(self.ordinal, self._lose, has_graphs=graphs)
        return self._lanes.lane()

    def time_work(self, until: float) -> bool:
        """Note what runs on CUDA's streams, as `Device.time_work` says."""
        return self._lanes is not None and self._lanes.time_work(until)

    def _lose(self, words: str) -> None:
        if self.give_up is not None:
            self.give_up(words)

    def add_to(self, options: Any, more: Mapping[str, str] = MappingProxyType({})) -> None:
        """Let a session with these options use it; `more`: of the provider. Raise LibraryMissing, LibraryFailed."""
        devices, number = self.devices(), self.ordinal
        if number >= len(devices):
            raise LibraryFailed(f"{self.kind.title} has {len(devices)} devices here: device = {number} is none of them")
        texts = {
            self.kind.options[name].key: str(int(value) if isinstance(value, bool) else value)
            for name, value in self._options.items()
            if self.kind.options[name].key
        }
        options.add_provider_for_devices([devices[number]], {**texts, **more})
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")

    def __repr__(self) -> str:
        return f"{self.kind.device}: {self._options}"

    def check(self, on_cpu: Sequence[str], spared: Collection[str] = ()) -> None:
        """Raise LibraryFailed if it leaves these operators to the CPU, `spared` ones apart, and may not."""
        found = [name for name in on_cpu if name not in spared]
        if found and not self.may_use_cpu:
            raise LibraryFailed(
                f"{self.kind.title} has no kernel for {', '.join(sorted(set(found)))} with these types, so that "
                f"{len(found)} nodes would run on the CPU; cpu_nodes = true in {self.kind.configuration} allows it"
            )

    def examine(self, fault: str) -> None:
        """Look at an error of ONNX Runtime's.

        Raise DeviceUnavailable if this process can use the GPU no more, ResourceExhaustedTransient if another request
        may fit into its memory.
        """
        if re.search(self.kind.lost, fault):
            said = fault[-300:]  # first come names of functions
            reason = f"{self.kind.title} can use the GPU no more, which is lost or has no memory left: {said}"
            if self.give_up is not None:
                self.give_up(reason)
            raise DeviceUnavailable(reason)
        if re.search(_NO_MEMORY, fault):
            raise ResourceExhaustedTransient(f"{self.kind.title}: the GPU has no memory left: {fault:.300}")

    def nodes_elsewhere(self, session: Any) -> list[str]:
        """Return the operators that a session runs on the CPU: one for each node."""
        name = _registered(self.kind.device)
        parts = [part for part in session.get_provider_graph_assignment_info() if part.ep_name != name]
        return [node.op_type for part in parts for node in part.get_nodes()]


@cache
def _registered(device: str) -> str:
    """ONNX Runtime's name of a provider, whose library it has loaded. Raise LibraryMissing, LibraryFailed."""
    kind, ort = PROVIDERS[device], library()
    ort.set_default_logger_severity(ERRORS)
    before = {found.ep_name for found in ort.get_ep_devices()}
    try:
        ort.register_execution_provider_library(device, str(_library_of(kind)))
    except Exception as error:  # its errors share no other class
        raise LibraryFailed(f"ONNX Runtime cannot load {kind.title}: {error}") from error
    names = {found.ep_name for found in ort.get_ep_devices()} - before
    if not names:
        raise LibraryFailed(f"ONNX Runtime finds no device for {kind.title}")
    return str(names.pop())


def _library_of(kind: OrtProvider) -> Path:
    """Return the path of the provider's library. Raise LibraryMissing."""
    package = kind.package
    for file in (package.files or ()) if package else ():
        if file.match(kind.file):
            return Path(str(file.locate()))
    raise LibraryMissing(f"no installed file is {kind.file}; {install_command(kind.extra)}")
