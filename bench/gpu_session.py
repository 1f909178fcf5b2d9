"""The session beside which gpu.py puts a burst: ONNX Runtime in this process, as a program would run it fastest."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import NotMeasured

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

_TYPES = {"tensor(float)": "float32", "tensor(double)": "float64"}
"""ONNX Runtime's names of types, where they are not those of NumPy in brackets."""


def own_session(device: str, path: Path, feeds: list[NDArray[Any]]) -> Callable[[], Sequence[NDArray[Any]]]:
    """The file in this process as a program would run it fastest, inputs copied in and outputs copied out: with CUDA
    graphs, if the device has them, on memory that is bound once, where the device is CUDA's. Raises NotMeasured.
    """
    try:
        session = _session(device, path)
    except NotMeasured:
        raise
    except Exception as error:
        raise NotMeasured(f"ONNX Runtime in process: {error}") from error
    inputs = dict(zip((its.name for its in session.get_inputs()), feeds, strict=True))
    return _bound(session, inputs) if device == "onnxruntime-cuda" else partial(session.run, None, inputs)


def has_graphs(device: str) -> bool:
    """Whether the device is configured to use CUDA graphs."""
    from driver.devices.onnxruntime.providers import PROVIDERS

    return device in PROVIDERS and bool(PROVIDERS[device].chosen({}).get("graphs"))


def configure_graphs(home: Path, device: str) -> None:
    """A home with the options of this one, and CUDA graphs, for this process and for what it starts."""
    folder, before = home / ".config/burst", Path("~/.config/burst").expanduser()
    if before.is_dir():
        shutil.copytree(before, folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{device}.toml"
    lines = file.read_text().splitlines() if file.exists() else []
    file.write_text("\n".join([*(line for line in lines if not line.startswith("graphs")), "graphs = true", ""]))
    os.environ["HOME"] = str(home)


def _session(device: str, path: Path) -> Any:
    import onnxruntime as ort

    from driver.devices.onnxruntime.providers import PROVIDERS, ExecutionProvider

    options = ort.SessionOptions()
    options.log_severity_level = 4
    if device == "onnxruntime":
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    if device == "onnxruntime-cuda":
        cuda_options = {"enable_cuda_graph": str(int(has_graphs(device))), "use_tf32": "0"}
        return ort.InferenceSession(path, options, providers=[("CUDAExecutionProvider", cuda_options)])
    if device not in PROVIDERS:
        raise NotMeasured(f"what {device} runs is no session of ONNX Runtime")
    kind = PROVIDERS[device]
    ExecutionProvider(kind, kind.chosen({})).add_to(options)
    return ort.InferenceSession(path, options)


def _bound(session: Any, inputs: dict[str, NDArray[Any]]) -> Callable[[], Sequence[NDArray[Any]]]:
    import onnxruntime as ort

    binding, outputs = session.io_binding(), session.get_outputs()
    there = {name: ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0) for name, array in inputs.items()}
    is_open = any(type(size) is not int for its in outputs for size in its.shape)
    if is_open and has_graphs("onnxruntime-cuda"):
        raise NotMeasured("its outputs have open shapes, for which there are no CUDA graphs")
    for name, value in there.items():
        binding.bind_ortvalue_input(name, value)
    for its in () if is_open else outputs:
        place = ort.OrtValue.ortvalue_from_shape_and_type(its.shape, _dtype(its.type), "cuda", 0)
        binding.bind_ortvalue_output(its.name, place)

    def run() -> list[NDArray[Any]]:
        for name, array in inputs.items():
            there[name].update_inplace(array)
        for its in outputs if is_open else ():  # ONNX Runtime allocates them in each run
            binding.bind_output(its.name, "cuda", 0)
        session.run_with_iobinding(binding)
        return [value.numpy() for value in binding.get_outputs()]

    run()
    return run


def _dtype(type_: str) -> np.dtype[Any]:
    return np.dtype(_TYPES.get(type_) or type_.removeprefix("tensor(").removesuffix(")"))
