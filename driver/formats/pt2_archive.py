"""A .pt2 file of `torch.export.save`, read without PyTorch: a ZIP archive of the graph in JSON, and of raw weights.

PyTorch itself trusts such a file: it unpickles the sample inputs and what else is pickled, executes the code of guards,
and evaluates the sizes that are expressions. Here a file that needs any of that is refused, and `cleaned` leaves out
what only helps debuggers; what remains calls operators of ATen, and nothing else.
"""

import io
import json
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from driver.errors import ImportFailed, InvalidModel

_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64"}
_DTYPES |= {12: "bool", 13: "bfloat16", 28: "uint16", 34: "uint32", 35: "uint64"}
_MOST_JSON = 1 << 26
"""Bytes of the graph."""
_MOST_FILES = 1 << 16
_PIECE = 1 << 20
"""Bytes that are copied at once."""
_TARGETS = re.compile(
    r"torch\.ops\.(aten|prims)\.(?!__|from_file|_reshape_alias|segment_reduce|_sparse|_nested)\w+\.(?!__)\w+"
    r"|torch\.ops\.higher_order\.(cond|while_loop|scan|map_impl|wrap_with_set_grad_enabled|wrap_with_autocast)"
    r"|_operator\.(add|sub|mul|floordiv|truediv|mod|pow|neg|pos|getitem|eq|ne|lt|le|gt|ge|and_|or_|not_)"
    r"|math\.(ceil|floor|trunc|sqrt)|torch\.sym_(int|float|max|min|not|ite|sum|sqrt)"
)
"""What a node may call: nothing that opens a file, calls an attribute by its name, or trusts sizes and strides."""
_WORDS = {"Symbol", "positive", "integer", "nonnegative", "True", "False", "Max", "Min", "Mod", "PythonMod"}
_WORDS |= {"FloorDiv", "CeilDiv"}
_VIEWS = {"alias", "as_strided", "detach", "diagonal", "expand", "expand_as", "flatten", "movedim", "narrow", "permute"}
_VIEWS |= {"reshape", "select", "slice", "squeeze", "swapaxes", "t", "transpose", "unflatten", "unsqueeze", "view"}
_VIEWS |= {"view_as", "contiguous", "to", "real", "unfold"}
"""Operators whose result may lie in the memory of what they read."""
_EXPRESSION = re.compile(r"[\w\s+\-*/(),='<>]*")
_SYMBOL = re.compile(r"[su]\d+")
_LEAF, _SEQUENCES, _DICT = None, ("builtins.tuple", "builtins.list"), "builtins.dict"
_UNREADABLE = (zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError)
"""What Python raises for an archive or JSON that is damaged, encrypted, too new or too deep."""
_OLD = "export it again, and save it by torch.export.save of PyTorch 2.9 or later"


class Pt2Refused(ImportFailed, InvalidModel):
    """A .pt2 file is damaged, or needs what would run code: an import fails, and a device refuses the model."""


class Pt2Tensor(NamedTuple):
    """An input or an output. dtype: by name; "" for one that numpy and the file form lack. shape: 0 where it is open.

    symbols: names of open sizes, None for the others.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    symbols: tuple[str | None, ...]


class _MemoryReader(io.RawIOBase):
    """Reads memory as a file, without a copy of the whole."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data.cast("B"), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + (0, self._at, self._data.nbytes)[whence]
        if at < 0:
            raise ValueError(f"seek to {at}")
        self._at = at
        return at

    def readinto(self, target: Any) -> int:
        found = self._data[self._at : self._at + len(target)]
        target[: len(found)] = found
        self._at += len(found)
        return len(found)


class Pt2Archive:
    """An archive of which PyTorch runs no code."""

    def __init__(self, data: memoryview) -> None:
        """Look through it. Raise Pt2Refused for one that is damaged, or that PyTorch would run code of."""
        try:
            self._zip = zipfile.ZipFile(_MemoryReader(data))
        except _UNREADABLE as error:
            raise Pt2Refused(f"damaged: {error}", remedy=_OLD) from None
        entries = self._zip.infolist()
        if len(entries) > _MOST_FILES or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise Pt2Refused("it is compressed, or has too many entries", remedy=_OLD)
        self._root = entries[0].filename.partition("/")[0] if entries else ""
        names = [entry.filename.removeprefix(f"{self._root}/") for entry in entries]
        if len({*names}) < len(names) or any(not entry.filename.startswith(f"{self._root}/") for entry in entries):
            raise Pt2Refused("damaged: it has an entry twice, or entries of several folders", remedy=_OLD)
        self._refuse(names)
        self.model = self._json("models/model.json")
        _check(self.model)
        try:
            self.inputs, self.outputs = self._ports()
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
            raise Pt2Refused(f"damaged: its graph is not as PyTorch writes it: {error!r:.100}", remedy=_OLD) from None

    def _refuse(self, names: list[str]) -> None:
        if any(name.startswith("data/aotinductor/") for name in names):
            raise Pt2Refused(
                "it holds machine code of AOTInductor", remedy="save the exported program: torch.export.save"
            )
        if [name for name in names if name.startswith("models/")] != ["models/model.json"]:
            raise Pt2Refused("it holds no exported program, or several, or is of an older PyTorch", remedy=_OLD)
        if not {"data/weights/model.pt", "data/constants/model.pt"}.isdisjoint(names):
            raise Pt2Refused(_PICKLED, remedy=_OLD)
        for folder in ("weights", "constants"):
            listed = self._json(f"data/{folder}/model_{folder}_config.json").get("config")
            if not isinstance(listed, dict) or not all(map(_is_raw, listed.values())):
                raise Pt2Refused(_PICKLED, remedy="export it with weights and constants that are plain tensors")

    def _json(self, name: str) -> dict[str, Any]:
        try:
            entry = self._zip.getinfo(f"{self._root}/{name}")
            found = json.loads(self._zip.read(entry)) if entry.file_size <= _MOST_JSON else None
        except (KeyError, *_UNREADABLE) as error:
            raise Pt2Refused(f"damaged: {name}: {error}", remedy=_OLD) from None
        if not isinstance(found, dict):
            raise Pt2Refused(f"damaged: {name} is no object, or larger than {_MOST_JSON} bytes")
        return found

    def _ports(self) -> tuple[list[Pt2Tensor], list[Pt2Tensor]]:
        module = self.model["graph_module"]
        values, signature = module["graph"]["tensor_values"], module["signature"]
        kept = {"parameter", "buffer", "tensor_constant"}
        given = [each for each in signature["input_specs"] if not {*each} & kept]
        call = module["module_call_graph"][0]["signature"]
        names = list(_leaves(json.loads(call["out_spec"])[1], ""))
        inputs = [_tensor(_argument(each, "user_input", "takes"), values) for each in given]
        results = [_argument(each, "user_output", "returns") for each in signature["output_specs"]]
        _refuse_state(module["graph"], {str(each["as_tensor"]["name"]) for each in module["graph"]["inputs"]})
        pairs = zip(names, results, strict=True)
        outputs = [_tensor(value, values)._replace(name=name) for name, value in pairs]
        if len(list(_leaves(json.loads(call["in_spec"])[1], ""))) != len(inputs):
            raise Pt2Refused("it takes values that are no tensors", remedy=_WITHOUT)
        return inputs, outputs

    def cleaned(self) -> io.BytesIO:
        """Return the archive without sample inputs, guards and notes for debuggers."""
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
            for entry in self._zip.infolist():
                name = entry.filename.removeprefix(f"{self._root}/")
                if name == "models/model.json":
                    archive.writestr(entry.filename, json.dumps({**self.model, "guards_code": []}))
                else:
                    self._copy(entry, archive, is_empty=name.startswith("data/sample_inputs/"))
        made.seek(0)
        return made

    def _copy(self, entry: zipfile.ZipInfo, archive: zipfile.ZipFile, *, is_empty: bool) -> None:
        copied = zipfile.ZipInfo(entry.filename)
        copied.file_size = 0 if is_empty else entry.file_size
        with archive.open(copied, "w") as target, self._zip.open(entry) as source:
            if not is_empty:
                shutil.copyfileobj(source, target, _PIECE)


def _is_raw(entry: object) -> bool:
    """Return True for a tensor that is stored as raw bytes; PyTorch unpickles all else."""
    if not isinstance(entry, dict):
        return False
    return entry.get("use_pickle") is False and str(entry.get("path_name")).startswith(("weight_", "tensor_"))


_PICKLED = "it has values that are pickled, and unpickling runs code of the file"
_WITHOUT = "export a function that takes and returns tensors alone, and keeps none"


def _refuse_state(graph: Mapping[str, Any], kept: set[str]) -> None:
    """Raise Pt2Refused where an operator in place changes a weight, a buffer or an input. kept: their names."""
    for node in graph["nodes"]:
        read = {given["arg"]["as_tensor"]["name"] for given in node["inputs"] if "as_tensor" in given["arg"]}
        operator = node["target"].split(".")[-2]
        if operator.endswith("_") and node["inputs"][0]["arg"].get("as_tensor", {}).get("name") in kept:
            name = node["inputs"][0]["arg"]["as_tensor"]["name"]
            raise Pt2Refused(f"it changes {name!r:.80} in place, by {operator}", remedy=_WITHOUT)
        if operator in _VIEWS and read & kept:
            kept.update(str(made["as_tensor"]["name"]) for made in node["outputs"] if "as_tensor" in made)


def _argument(spec: Mapping[str, Any], kind: str, verb: str) -> str:
    if {*spec} != {kind} or {*spec[kind]["arg"]} != {"as_tensor"}:
        what = ", ".join(map(str, spec))
        raise Pt2Refused(f"it {verb} a value that is no tensor, or changes its state ({what:.80})", remedy=_WITHOUT)
    return str(spec[kind]["arg"]["as_tensor"]["name"])


def _tensor(name: str, values: Mapping[str, Any]) -> Pt2Tensor:
    meta = values[name]
    sizes = [size.get("as_int") for size in meta["sizes"]]
    words = [None if "as_int" in size else size["as_expr"]["expr_str"] for size in meta["sizes"]]
    symbols = [word and "".join(_SYMBOL.findall(word)[:1]) for word in words]
    return Pt2Tensor(name, _DTYPES.get(meta["dtype"], ""), tuple(int(size or 0) for size in sizes), tuple(symbols))


def _leaves(spec: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the paths of the leaves of a tree of results: `output`, `output0`, or keys of dicts."""
    kind, children = spec["type"], spec["children_spec"]
    if kind is _LEAF:
        yield path or "output"
        return
    if kind != _DICT and kind not in _SEQUENCES:
        raise Pt2Refused(f"it takes or returns a {kind!r:.80}", remedy=_WITHOUT)
    keys = json.loads(spec["context"]) if kind == _DICT else range(len(children))
    for key, child in zip(keys, children, strict=True):
        below = str(key) if kind == _DICT else f"output{key}"
        yield from _leaves(child, f"{path}.{key}" if path else below)


def _check(model: dict[str, Any]) -> None:
    """Remove notes for debuggers. Raise Pt2Refused for what is no operator, and for sizes that are no arithmetic."""
    waiting: list[Any] = [model]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            if "metadata" in value:
                value["metadata"] = {}
            for key in ("target", "as_operator"):
                if isinstance(value.get(key), str) and not _TARGETS.fullmatch(value[key]):
                    remedy = "the device has the operators of ATen alone, and none that trusts strides"
                    raise Pt2Refused(f"it calls {value[key]!r:.100}", remedy=remedy)
            text = value.get("expr_str", "")
            words = {*re.findall(r"[A-Za-z_]\w*", str(text))}
            if not _EXPRESSION.fullmatch(str(text)) or any(w not in _WORDS and not _SYMBOL.fullmatch(w) for w in words):
                raise Pt2Refused(f"a size is computed as {text!r:.100}", remedy="export it with simpler sizes")
            waiting += value.values()
