"""Which of ONNX's own backend tests pass through the onnxruntime device, in another process?

    python bench/onnx_backend.py [--kinds node simple pytorch-operator pytorch-converted] [--json FILE]

Each case is a model file, inputs and expected outputs (onnx.backend.test, in the package onnx). It runs in ONNX Runtime
in this process, and then by driver.load(path, form="file") in the device. What passes in ONNX Runtime itself has to
pass there, bit for bit: strings, sequences, maps and optional values, too. Types of less than a byte are refused by
name, and counted.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
import warnings
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case import node
from onnx.backend.test.loader import load_model_tests

import driver
from driver.errors import DriverError, ImportFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    Arrays = list[NDArray[Any]]
    Values = list[Any]

KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted")
DENSE = frozenset(
    f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)
) | {"BOOL", "FLOAT16", "FLOAT", "DOUBLE", "BFLOAT16"}  # fmt: skip


CARRIED = ("", "string", "sequence", "optional", "map")
"""What inputs and outputs may be, as `unlike_tensors` says it."""


class Case(NamedTuple):
    """A model, its inputs and what is expected."""

    name: str
    model: onnx.ModelProto
    data: list[tuple[Values, Values]]
    rtol: float
    atol: float


class Verdict(NamedTuple):
    """What came of a case."""

    name: str
    kind: str  #: passed, failed, refused, or "own": ONNX Runtime itself does not pass
    reason: str = ""


def cases(kind: str) -> Iterator[Case]:
    """All cases of a kind. Those of "node" take 10 s to make."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = load_model_tests(kind=kind)
    for case in found:
        if case.model is not None:
            yield _made(case)
        elif case.model_dir is not None:
            folder = Path(case.model_dir)
            model = onnx.load(folder / "model.onnx")
            yield Case(case.name, model, [*_stored(folder, model)], case.rtol, case.atol)


def cases_of(modules: Iterable[str]) -> list[Case]:
    """Those of "node" that these modules of onnx.backend.test.case.node make: an operator each, mostly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            import_module(f"onnx.backend.test.case.node.{name}")
    return [_made(case) for case in node._NodeTestCases]


def _made(case: Any) -> Case:
    is_carried = unlike_tensors(case.model) in CARRIED
    data = [tuple([*map(_value, side)] for side in pair) for pair in case.data_sets] if is_carried else []
    return Case(case.name, case.model, data, case.rtol, case.atol)


def _value(value: Any) -> Any:
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return value if value is None or isinstance(value, list | dict) else np.asarray(value)


def _stored(folder: Path, model: onnx.ModelProto) -> Iterator[tuple[Arrays, Arrays]]:
    if unlike_tensors(model) not in CARRIED:
        return
    for data in sorted(folder.glob("test_data_set_*")):
        sides = (
            sorted(data.glob(f"{side}_*.pb"), key=lambda p: int(p.stem.split("_")[1])) for side in ("input", "output")
        )
        given, wanted = (
            [numpy_helper.to_array(TensorProto.FromString(p.read_bytes())) for p in side] for side in sides
        )
        yield given, wanted


def unlike_tensors(model: onnx.ModelProto) -> str:
    """What an input or output is that no memory of numbers can hold; "" if there is none."""
    weights = {tensor.name for tensor in model.graph.initializer}
    for info in (*(i for i in model.graph.input if i.name not in weights), *model.graph.output):
        word = info.type.WhichOneof("value")
        if word != "tensor_type":
            return str(word).removesuffix("_type")
        element = TensorProto.DataType.Name(info.type.tensor_type.elem_type)
        if element not in DENSE:
            return element.lower()
    return ""


def _session(case: Case) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(case.model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def values_in_process(case: Case, given: Values) -> Values:
    """What ONNX Runtime itself computes, on one thread, in its own Python. Raises what it raises."""
    session = _session(case)
    return list(session.run(None, dict(zip([i.name for i in session.get_inputs()], given, strict=True))))


def are_same(found: Any, own: Any) -> bool:
    """Whether two values are of the same types, and have the same bits."""
    if isinstance(own, np.ndarray) and own.dtype != object:
        is_alike = isinstance(found, np.ndarray) and (found.dtype, found.shape) == (own.dtype, own.shape)
        return is_alike and bool(found.tobytes() == own.tobytes())
    if isinstance(own, np.ndarray):
        return isinstance(found, np.ndarray) and found.shape == own.shape and found.tolist() == own.tolist()
    if isinstance(own, list):
        return isinstance(found, list) and len(found) == len(own) and all(map(are_same, found, own))
    return type(found) is type(own) and found == own


def are_close(found: Any, wanted: Any, case: Case) -> bool:
    """As the backend tests compare: what is expected may lie in another container."""
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(are_close, found, wanted, [case] * 99))
    if not isinstance(wanted, np.ndarray | np.generic) or wanted.dtype.kind in "OU":
        return bool(np.array_equal(np.asarray(found, object), np.asarray(wanted, object)))
    return np.shape(found) == wanted.shape and is_close(np.asarray(found).tobytes(), wanted, case)


def in_process(case: Case, given: Arrays) -> list[bytes | None]:
    """What ONNX Runtime itself computes, on one thread; None for what is no tensor. Raises what it raises."""
    session, make = _session(case), onnxruntime.OrtValue
    feeds = {
        declared.name: make.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), TensorProto.BFLOAT16)
        if array.dtype.name == "bfloat16"
        else make.ortvalue_from_numpy(np.ascontiguousarray(array))
        for declared, array in zip(session.get_inputs(), given, strict=True)
    }
    return [_contents(value) for value in session.run_with_ort_values(None, feeds)]


def _contents(value: Any) -> bytes | None:
    if not value.is_tensor():
        return None
    nbytes = value.tensor_size_in_bytes()
    return ctypes.string_at(value.data_ptr(), nbytes) if nbytes else b""


def is_close(found: bytes, wanted: NDArray[Any], case: Case) -> bool:
    """As the backend tests compare."""
    if len(found) != wanted.nbytes:
        return False
    got = np.frombuffer(found, wanted.dtype).reshape(wanted.shape)
    if wanted.dtype.kind in "biu":
        return bool(np.array_equal(got, wanted))
    with np.errstate(all="ignore"):
        pair = got.astype(np.float64), wanted.astype(np.float64)
        return bool(np.allclose(*pair, rtol=case.rtol, atol=case.atol, equal_nan=True))


def through(device: Any, path: Path, given: Arrays) -> Arrays:
    """What the device computes. Raises DriverError, StatusError."""
    with device.prepare(driver.load(path, form="file")) as prepared:
        bits = [a.view(np.uint16) if a.dtype.name == "bfloat16" else np.ascontiguousarray(a) for a in given]
        return list(prepared.run(*bits))


def judge(device: Any, case: Case, folder: Path) -> Verdict:
    """Runs one case on both sides."""
    path = folder / f"{case.name}.onnx"
    path.write_bytes(case.model.SerializeToString())
    try:
        foreign = unlike_tensors(case.model)
        if foreign not in CARRIED:
            return _judge_refusal(path, case, foreign)
        compare = _compare_values if foreign else _compare
        found = [compare(device, case, path, given, wanted) for given, wanted in case.data]
    except Exception as error:  # noqa: BLE001 (whatever it is, the case fails)
        return Verdict(case.name, "failed", f"{type(error).__name__}: {error}")
    finally:
        path.unlink()
    without = Verdict(case.name, "own", "the case has no data")
    return next((verdict for verdict in found if verdict.kind != "passed"), found[0] if found else without)


def _compare(device: Any, case: Case, path: Path, given: Arrays, wanted: Arrays) -> Verdict:
    try:
        own = in_process(case, given)
    except (AttributeError, TypeError, ValueError):
        raise  # a fault of this script
    except Exception as error:  # noqa: BLE001 (its errors share no other class)
        return Verdict(case.name, "own", str(error).strip().splitlines()[0])
    if not all(part is not None and is_close(part, array, case) for part, array in zip(own, wanted, strict=True)):
        return Verdict(case.name, "own", "other results than expected")
    found = through(device, path, given)
    for n, (array, part, expected) in enumerate(zip(found, own, wanted, strict=True)):
        if array.shape != expected.shape:
            return Verdict(case.name, "failed", f"output {n}: shape {array.shape} instead of {expected.shape}")
        if array.tobytes() != part:
            return Verdict(case.name, "failed", f"output {n} differs from ONNX Runtime's")
    return Verdict(case.name, "passed")


def _compare_values(device: Any, case: Case, path: Path, given: Values, wanted: Values) -> Verdict:
    """Of a case with strings, sequences, maps or optional values."""
    try:
        own = values_in_process(case, given)
    except Exception as error:  # noqa: BLE001 (its errors share no other class)
        return Verdict(case.name, "own", str(error).strip().splitlines()[0])
    if not are_close(own, wanted, case):
        return Verdict(case.name, "own", "other results than expected")
    with device.prepare(driver.load(path, form="file")) as prepared:
        found = list(prepared.run(*given))
        with prepared.burst() as burst:
            again = list(burst.run(*given).outputs)
    return Verdict(case.name, "passed" if are_same(found, own) and are_same(again, own) else "failed", str(found)[:200])


def _judge_refusal(path: Path, case: Case, foreign: str) -> Verdict:
    try:
        driver.load(path, form="file")
    except (ImportFailed, DriverError) as error:
        return Verdict(case.name, "refused", f"{foreign}: {error}")
    return Verdict(case.name, "failed", f"{foreign} was not refused")


def judged(device: Any, found: Iterable[Case], *, progress: bool = False) -> list[Verdict]:
    """All of these."""
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        for n, case in enumerate(found):
            verdicts.append(judge(device, case, Path(folder)))
            if progress and n % 100 == 0:
                print(f"\r{n}", end="", file=sys.stderr)
    return verdicts


def table(kinds: dict[str, list[Verdict]]) -> str:
    """Counts, for people."""
    lines = [
        "| cases | ONNX Runtime itself passes | of these the device passes | ONNX Runtime does not | refused by name |",
        "|---|---|---|---|---|",
    ]
    for kind, verdicts in kinds.items():
        count = Counter(verdict.kind for verdict in verdicts)
        own = count["passed"] + count["failed"]
        lines.append(f"| {kind}, {len(verdicts)} | {own} | {count['passed']} | {count['own']} | {count['refused']} |")
    why = Counter(v.reason.split(":")[0] for verdicts in kinds.values() for v in verdicts if v.kind == "refused")
    lines += ["", "refused: " + ", ".join(f"{count} {word}" for word, count in why.most_common())]
    failed = [v for verdicts in kinds.values() for v in verdicts if v.kind == "failed"]
    return "\n".join([*lines, *(f"failed: {v.name}: {v.reason}" for v in failed)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with driver.connect("onnxruntime") as device:
        shown = sys.stderr.isatty()
        found = {kind: judged(device, cases(kind), progress=shown) for kind in options.kinds}
    print(table(found))
    if options.json:
        options.json.write_text(
            json.dumps({k: [v._asdict() for v in verdicts] for k, verdicts in found.items()}, indent=1)
        )
    return any(v.kind == "failed" for verdicts in found.values() for v in verdicts)


if __name__ == "__main__":
    sys.exit(main())
