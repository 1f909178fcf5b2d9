"""What driver.load says to bad input, in every form: other files, files that change, and wrong shapes."""

import gzip
import io
import os
import re
import signal
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from header_files import labelled_onnx, labelled_tflite, onnx_file
from onnx import TensorProto, helper, numpy_helper

import driver

FORMS = ("auto", "file", "operations")


def archive():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("model.onnx", labelled_onnx())
    return packed.getvalue()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "is empty"),
        (gzip.compress(labelled_onnx()), "it is compressed with gzip, not a model; unpack it first"),
        (archive(), "it is a ZIP archive, not a model; unpack it"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12150158\n", "a pointer of Git LFS.*pull"),
        (b"<!DOCTYPE html><html>not found</html>", "it is a web page, not a model; download the file itself"),
        (b"\x89HDF\r\n\x1a\n" + bytes(64), "it is an HDF5 file.*convert it"),
        (labelled_onnx()[:-1], "damaged"),
    ],
)
@pytest.mark.parametrize("suffix", ["onnx", "tflite"])
def test_files_that_are_no_model(tmp_path, suffix, data, told, form):
    """The error names the file, what it is, and what helps."""
    path = tmp_path / f"net.{suffix}"
    path.write_bytes(data)
    told = "not a .tflite file" if (suffix, told) == ("tflite", "damaged") else told
    with pytest.raises(driver.ImportFailed, match=rf"'net\.{suffix}'.*{told}"):
        driver.load(path, form=form)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_with_the_suffix_of_another_kind(tmp_path, form):
    """It says which kind it is."""
    (tmp_path / "a.onnx").write_bytes(labelled_tflite())
    (tmp_path / "b.tflite").write_bytes(labelled_onnx())
    with pytest.raises(driver.ImportFailed, match=r"'a\.onnx': it is a \.tflite file; rename it"):
        driver.load(tmp_path / "a.onnx", form=form)
    with pytest.raises(driver.ImportFailed, match=r"'b\.tflite': not a \.tflite file"):
        driver.load(tmp_path / "b.tflite", form=form)


def test_the_case_of_a_suffix_does_not_matter(tmp_path):
    """NET.ONNX is an .onnx file."""
    (tmp_path / "NET.ONNX").write_bytes(labelled_onnx())
    assert driver.load(tmp_path / "NET.ONNX", form="file").inputs


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_file(tmp_path, form):
    """A folder, a device, links that lead to one or in circles, and names that no file can have."""
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "zeros.onnx").symlink_to("/dev/zero")
    (tmp_path / "circle.onnx").symlink_to("circle.onnx")
    for name in ("folder.onnx", "zeros.onnx"):
        with pytest.raises(driver.ImportFailed, match=f"'{name}' is not a regular file"):
            driver.load(tmp_path / name, form=form)
    for name in ("circle.onnx", "x" * 300 + ".onnx", "missing.onnx"):
        with pytest.raises(OSError, match=name):
            driver.load(tmp_path / name, form=form)
    with pytest.raises(driver.ImportFailed, match="has a null character"):
        driver.load(f"{tmp_path}/a\0b.onnx", form=form)


UNPRIVILEGED = """
import os, sys
from driver import load  # while its files can be read
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for form in ("auto", "file", "operations"):
    try:
        load(sys.argv[1], form=form)
    except PermissionError as error:
        print(f"{form}: {error}")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another account")
def test_a_file_without_permission(tmp_path):
    """PermissionError, with its name."""
    path = tmp_path / "net.onnx"
    path.write_bytes(labelled_onnx())
    path.chmod(0)
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    run = subprocess.run([sys.executable, "-c", UNPRIVILEGED, path], capture_output=True, text=True, check=True)
    assert re.findall(r"(\w+): .*Permission denied: '.*net\.onnx'", run.stdout) == [*FORMS], run.stdout


# ---- files that change -----------------------------------------------------------------------------------------------


def scaled(factors):
    """y = x * factors; the weights are much larger than a page."""
    node = helper.make_node("Mul", ["x", "w"], ["y"])
    ends = {"x": (TensorProto.FLOAT, [factors.size])}, {"y": (TensorProto.FLOAT, [factors.size])}
    return onnx_file(*ends, [node], [numpy_helper.from_array(factors, "w")])


def test_a_file_may_be_cut_or_replaced_after_it_was_loaded(tmp_path, run):
    """The operations have its weights as they were; nothing reads the file any more."""
    path, factors = tmp_path / "net.onnx", np.arange(1 << 20, dtype=np.float32)
    path.write_bytes(scaled(factors))
    model = driver.load(path, form="operations")
    os.truncate(path, 10)
    np.testing.assert_array_equal(run(model, [np.ones(factors.size, np.float32)])[0], factors)


CUT_WHILE_LOADING = """
import os, sys, threading, driver
path, whole = sys.argv[1], open(sys.argv[1], "rb").read()
stop, seen = threading.Event(), set()

def change():
    while not stop.is_set():
        os.truncate(path, 5000)
        with open(path, "r+b") as file:
            file.write(whole)

thread = threading.Thread(target=change)
thread.start()
for number in range(40):
    try:
        driver.load(path, form=sys.argv[2])
    except driver.ImportFailed as error:
        assert "net.onnx" in str(error), error
stop.set()
thread.join()
"""


@pytest.mark.integration
@pytest.mark.parametrize("form", ["file", "operations"])
def test_a_file_that_is_cut_and_written_while_it_is_loaded(tmp_path, form):
    """Again and again, it is a model or refused; the process lives on."""
    path = tmp_path / "net.onnx"
    path.write_bytes(scaled(np.arange(1 << 16, dtype=np.float32)))
    run = subprocess.run([sys.executable, "-c", CUT_WHILE_LOADING, path, form], stderr=subprocess.PIPE, check=False)
    assert run.returncode == 0, (signal.Signals(-run.returncode) if run.returncode < 0 else "", run.stderr)


# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        ([1, 3], r"shapes=\[1, 3\]: give the sizes of inputs by name, such as \{'images'"),
        ("images", "shapes='images': give the sizes of inputs by name"),
        (3, "shapes=3: give the sizes of inputs by name"),
        ({"images": "1x3"}, r"shapes\['images'\] = '1x3': give a size for each dimension"),
        ({"images": b"\1\3"}, "give a size for each dimension"),
        ({"images": {1: 2, 3: 4}}, "give a size for each dimension"),
        ({"images": (1, 2.5)}, r"= \(1, 2\.5\): give a size for each dimension"),
        ({"images": [1] * 10**6}, r"\[1, 1, .*\.\.\.\] has 1000000 dimensions; the input is \[batch, side\]"),
        ({"images": (2**16, 2**16)}, r"these are 4294967296 elements; give less than 4294967296"),
        ({"x" * 10**5: (1,)}, "names 'x{64}', which is not an input; the inputs are 'images'"),
        ({5: (1,)}, "names '5', which is not an input"),
    ],
)
def test_shapes_of_another_kind(tmp_path, shapes, told, form):
    """The error has the argument, its value however long it is, and what to give instead."""
    path = tmp_path / "net.onnx"
    sides = {"images": (TensorProto.FLOAT, ["batch", "side"])}, {"y": (TensorProto.FLOAT, None)}
    path.write_bytes(onnx_file(*sides, [helper.make_node("Abs", ["images"], ["y"])]))
    with pytest.raises(driver.ImportFailed, match=told) as caught:
        driver.load(path, shapes, form)
    assert len(str(caught.value)) < 400
    with pytest.raises(driver.ImportFailed, match=told):
        driver.check(path, shapes)
