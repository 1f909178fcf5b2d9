"""What a .pt2 file says of its inputs and outputs, and what it may not hold; read without PyTorch."""

import io
import json
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

import driver
from driver.errors import ImportFailed
from driver.formats.pt2_archive import Pt2Archive

TREES = Path(__file__).parent / "pt2_files" / "trees.pt2"


def contents():
    """The entries of the file, by name below its folder."""
    with zipfile.ZipFile(TREES) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def written(path, entries, **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in entries.items():
            archive.writestr(f"net/{name}", data)
    return path


def with_model(change):
    """The entries, after a change of the graph's JSON."""
    entries = contents()
    model = json.loads(entries["models/model.json"])
    change(model)
    return entries | {"models/model.json": json.dumps(model).encode()}


def test_names_types_and_sizes():
    """Inputs have the names of arguments, outputs those of their paths; an open size is 0 and has its symbol."""
    model = driver.load(TREES)
    assert [(info.name, info.dtype.name, info.shape) for info in model.inputs] == [
        ("x", "float32", (None, 8)),
        ("scale", "float32", ()),
    ]
    assert [(info.name, info.dtype.name, info.shape) for info in model.outputs] == [
        ("logits", "float32", (None, 4)),
        ("more.0", "float32", ()),
        ("more.1.0", "uint16", (None, 8)),
    ]
    assert [info.shape for info in driver.load(TREES, shapes={"x": (3, 8)}).inputs] == [(3, 8), ()]


def test_other_forms():
    """Are refused with a remedy."""
    with pytest.raises(ImportFailed, match=r'does not become operations of the HAL; keep form="auto"'):
        driver.load(TREES, form="operations")
    with pytest.raises(ImportFailed, match=r"signature='f': a \.pt2 file has one program; leave it out"):
        driver.load(TREES, signature="f")


def pickled(folder):
    entries = contents()
    name = f"data/{folder}/model_{folder}_config.json"
    entry = {"path_name": "custom_obj_0", "use_pickle": True, "is_param": False, "tensor_meta": None}
    return entries | {name: json.dumps({"config": {"k": entry}}).encode()}


def calls(target):
    return with_model(lambda model: model["graph_module"]["graph"]["nodes"][0].update(target=target))


def sized(expression):
    def change(model):
        model["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0]["as_expr"]["expr_str"] = expression

    return with_model(change)


CODE = {
    "pickled weights": (lambda: pickled("weights"), "unpickling runs code"),
    "pickled constants": (lambda: pickled("constants"), "unpickling runs code"),
    "weights of an older PyTorch": (lambda: contents() | {"data/weights/model.pt": b"x"}, "unpickling runs code"),
    "machine code": (lambda: contents() | {"data/aotinductor/model/a.so": b"x"}, "machine code of AOTInductor"),
    "a function of torch": (lambda: calls("torch.hub.load"), "it calls 'torch.hub.load'"),
    "a method by its name": (lambda: calls("_operator.methodcaller"), "it calls '_operator.methodcaller'"),
    "a file": (lambda: calls("torch.ops.aten.from_file.default"), "it calls 'torch.ops.aten.from_file.default'"),
    "memory by strides": (lambda: calls("torch.ops.aten._reshape_alias.default"), "_reshape_alias"),
    "memory by lengths": (lambda: calls("torch.ops.aten.segment_reduce.default"), "segment_reduce"),
    "memory by indices": (lambda: calls("torch.ops.aten._sparse_coo_tensor_unsafe.default"), "tensor_unsafe"),
    "another library": (lambda: calls("torch.ops.torchvision.nms.default"), "the operators of ATen alone"),
    "a size that is code": (lambda: sized("__import__('os').system('id')"), "a size is computed as"),
    "a size with an attribute": (lambda: sized("Symbol.mro"), "a size is computed as"),
}


@pytest.mark.parametrize("case", CODE)
def test_what_would_run_code_is_refused(tmp_path, case):
    """Each way to have PyTorch run code of the file is named."""
    entries, words = CODE[case]
    with pytest.raises(ImportFailed, match=words):
        driver.load(written(tmp_path / "net.pt2", entries()))


def test_what_is_left_out():
    """Sample inputs, which are pickled, guards, which are code, and notes are not passed on to PyTorch."""
    entries = with_model(lambda model: model.update(guards_code=["1/0"], metadata={"a": "b"}))
    made = io.BytesIO()
    written(made, entries | {"data/sample_inputs/model.pt": b"pickled"})
    with zipfile.ZipFile(Pt2Archive(made.getbuffer()).cleaned()) as archive:
        model = json.loads(archive.read("net/models/model.json"))
        assert archive.read("net/data/sample_inputs/model.pt") == b""
    assert (model["guards_code"], model["metadata"]) == ([], {})


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\0" * 64, TREES.read_bytes()[:5000]], ids=len)
def test_what_is_no_such_file(tmp_path, data):
    """Is refused as that."""
    path = tmp_path / "net.pt2"
    path.write_bytes(data)
    with pytest.raises(ImportFailed, match=r"net\.pt2"):
        driver.load(path)


def test_damage_of_the_directory_is_told_as_that():
    """Entries that are encrypted, too new for Python, cut off or elsewhere: a byte that differs gives ImportFailed, or
    nothing.
    """
    data = TREES.read_bytes()
    for at in range(data.index(b"PK\x01\x02"), len(data)):
        for byte in (data[at] ^ 1, 0xFF):
            with suppress(ImportFailed):
                Pt2Archive(memoryview(data[:at] + bytes([byte]) + data[at + 1 :]))


@pytest.mark.parametrize("spec", ["[1, " + '{"type": "builtins.tuple", "children_spec": [' * 3000, "3", "[1, 1e999]"])
def test_trees_that_are_none(tmp_path, spec):
    """Trees of results that are too deep, or none, are damage."""
    entries = with_model(lambda m: m["graph_module"]["module_call_graph"][0]["signature"].update(out_spec=spec))
    with pytest.raises(ImportFailed, match="damaged: its graph is not as PyTorch writes it"):
        driver.load(written(tmp_path / "net.pt2", entries))


def test_a_size_without_end(tmp_path):
    """JSON has a word for infinity, which is no size."""
    sizes = [{"as_int": float("inf")}]
    entries = with_model(lambda m: m["graph_module"]["graph"]["tensor_values"]["x"].update(sizes=sizes))
    with pytest.raises(ImportFailed, match="cannot convert float infinity"):
        driver.load(written(tmp_path / "net.pt2", entries))


def test_archives_that_two_readers_could_read_differently(tmp_path):
    """Compressed ones, and those with entries of several folders, are refused."""
    with pytest.raises(ImportFailed, match="compressed"):
        driver.load(written(tmp_path / "net.pt2", contents(), compression=zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(written(tmp_path / "net.pt2", contents()), "a") as archive:
        archive.writestr("other/models/model.json", b"{}")
    with pytest.raises(ImportFailed, match="several folders"):
        driver.load(tmp_path / "net.pt2")


def test_a_large_file_is_copied_once():
    """It is read where it lies; what PyTorch is given is the only copy."""
    size = 16 << 20
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in (contents() | {"data/weights/more": bytes(size)}).items():
            archive.writestr(f"net/{name}", data)
    data = made.getbuffer()
    tracemalloc.start()
    try:
        archive = Pt2Archive(data)
        assert tracemalloc.get_traced_memory()[1] < size / 4
        cleaned = archive.cleaned()
        assert tracemalloc.get_traced_memory()[1] < 1.5 * size
    finally:
        tracemalloc.stop()
    with zipfile.ZipFile(cleaned) as found:
        assert found.testzip() is None
        assert found.getinfo("net/data/weights/more").file_size == size
