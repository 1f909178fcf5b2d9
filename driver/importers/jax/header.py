"""The header of a .jax file, the bytes of a `jax.export.Exported`: the arrays that its function takes and returns.

A function takes trees of arrays; the model takes the leaves, in JAX's order. The name of a leaf is its path: `arg0` for
the first argument, `arg0.kernel` for an entry of it, `mask` for an argument by keyword; `output`, `output0` or the key
of a dict for a result. Field numbers are those of jax/_src/export/serialization.fbs.
"""

from collections.abc import Iterator
from typing import NoReturn

from driver.errors import ImportFailed
from driver.formats.file_bytes import FileBytes
from driver.formats.flatbuffer import U8, U16, FlatTable, root
from driver.importers.header import HIGHEST_RANK, Header, HeaderTensor
from driver.importers.obstacle import Obstacle

_VERSION, _IN_TREE, _IN_AVALS, _OUT_TREE, _OUT_AVALS, _AVALS, _IN_PLACES, _OUT_PLACES = 0, 2, 3, 4, 5, 19, 22, 23
_KIND, _CHILDREN, _KEYS = 0, 1, 2  # of a PyTreeDef
_LEAF, _NONE, _TUPLE, _LIST, _DICT = range(5)
_SHAPE, _DTYPE = 1, 2  # of an AbstractValue
_VERSIONS = (2, 3)
"""Those that JAX writes: later ones keep 3, and add fields."""
_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
)
_CARRIED = {n: name for n, name in enumerate(_DTYPES) if not name.startswith("complex")}
_DEEPEST = 64
_MOST_TENSORS = 1 << 12
"""Limit for inputs, and for outputs."""
_REMEDY = "export the function with one around it that takes and returns arrays of the types that are carried"


def read_header(data: memoryview) -> Header:
    """Read the header. Raise ImportFailed for a damaged one."""
    file = root(FileBytes(data))
    if (version := file.number(_VERSION, U16)) not in _VERSIONS:
        raise ImportFailed("not what jax.export's `serialize` returns", remedy=f"its first field is {version}, not 3")
    given, returned = file.table(_IN_TREE), file.table(_OUT_TREE)
    if given is None or returned is None:
        raise ImportFailed("damaged: it has no trees of arguments and results")
    return Header(
        _tensors("input", list(_arguments(given)), _avals(file, _IN_AVALS, _IN_PLACES)),
        _tensors("output", list(_results(returned)), _avals(file, _OUT_AVALS, _OUT_PLACES)),
    )


def as_first(data: memoryview, name: str) -> NoReturn:
    """Raise ImportFailed: a signature is what .tflite files have."""
    del data
    raise ImportFailed(f"signature={name[:64]!r}: a .jax file has one function", remedy="leave it out")


def _avals(file: FlatTable, field: int, places: int) -> list[FlatTable]:
    """Return the type of each array. Later files list each type once, and its place for each array."""
    if (listed := file.array(places, "<u4")).size:
        types = file.tables(_AVALS)
        return [types[index] for index in listed[: _MOST_TENSORS + 1].tolist()]
    return list(file.tables(field))[: _MOST_TENSORS + 1]


def _tensors(word: str, names: list[str], avals: list[FlatTable]) -> tuple[HeaderTensor, ...]:
    if len(names) != len(avals) or len(names) > _MOST_TENSORS:
        raise ImportFailed(f"damaged: {len(names)} names and {len(avals)} types of {word}s; {_MOST_TENSORS} at most")
    return tuple(_declared(f"{word} {n}", *pair) for n, pair in enumerate(zip(names, avals, strict=True)))


def _declared(where: str, name: str, aval: FlatTable) -> HeaderTensor:
    number = aval.number(_DTYPE, U8)
    if number not in _CARRIED:
        what = _DTYPES[number] if number < len(_DTYPES) else f"type {number} of JAX's schema"
        reason = f"{where} ({name[:64]!r}) has elements of {what}, which the file form does not carry"
        return HeaderTensor(name, "", None, refusal=Obstacle(None, None, (name,), reason, remedy=_REMEDY))
    words = aval.texts(_SHAPE)
    if len(words) > HIGHEST_RANK:
        raise ImportFailed(f"{where} has more than {HIGHEST_RANK} dimensions")
    is_known = [word.isascii() and word.isdecimal() and len(word) < 11 for word in words]
    shape = tuple(int(word) if known else 0 for word, known in zip(words, is_known, strict=True))
    names = tuple(None if known else word[:64] for word, known in zip(words, is_known, strict=True))
    return HeaderTensor(name, _CARRIED[number], shape, extra={} if all(is_known) else {"dims": names})


def _arguments(tree: FlatTable) -> Iterator[str]:
    """Yield the names of the leaves of ((positional, ...), {keyword: ...})."""
    parts = tree.tables(_CHILDREN)
    if len(parts) != 2:
        raise ImportFailed("damaged: its arguments are not those by position and those by keyword")
    for n, child in enumerate(parts[0].tables(_CHILDREN)):
        yield from _leaves(child, f"arg{n}", 0)
    yield from _leaves(parts[1], "", 0)


def _results(tree: FlatTable) -> Iterator[str]:
    if tree.number(_KIND, U8) in (_TUPLE, _LIST):
        for n, child in enumerate(tree.tables(_CHILDREN)):
            yield from _leaves(child, f"output{n}", 0)
    else:
        yield from _leaves(tree, "" if tree.number(_KIND, U8) == _DICT else "output", 0)


def _leaves(tree: FlatTable, path: str, depth: int) -> Iterator[str]:
    """Yield the paths of the leaves of a tree, in JAX's order."""
    kind, children = tree.number(_KIND, U8), tree.tables(_CHILDREN)
    if kind == _LEAF:
        yield path
    elif kind in (_TUPLE, _LIST, _DICT):
        if depth > _DEEPEST or len(children) > _MOST_TENSORS:
            raise ImportFailed(f"its trees are deeper than {_DEEPEST}, or have more than {_MOST_TENSORS} entries")
        keys = tree.texts(_KEYS) if kind == _DICT else [str(n) for n in range(len(children))]
        if len(keys) != len(children):
            raise ImportFailed(f"damaged: a dict has {len(keys)} keys and {len(children)} entries")
        for key, child in zip(keys, children, strict=True):
            yield from _leaves(child, f"{path}.{key}" if path else key, depth + 1)
    elif kind != _NONE:
        raise ImportFailed("it takes or returns a class of its own", remedy="export a function of arrays and dicts")
