"""What a .jax file says of its inputs and outputs, read without JAX."""

from pathlib import Path

import numpy as np
import pytest

import driver
from driver.errors import ImportFailed
from driver.importers.jax.header import read_header

FILES = Path(__file__).parent / "jax_files"
TREES = (FILES / "trees.jax").read_bytes()


def described(tensors):
    return {t.name: (t.dtype, t.shape) for t in tensors}


def test_names_types_and_sizes():
    """A leaf of the trees of arguments and results is called by its path, and an open size is 0 and has its symbol."""
    header = read_header(memoryview(TREES))
    assert described(header.inputs) == {
        "arg0": ("float32", (0, 8)),
        "arg1.b": ("float32", (4,)),
        "arg1.w": ("float32", (8, 4)),
        "scale": ("float32", ()),
    }
    assert described(header.outputs) == {
        "logits": ("float32", (0, 4)),
        "more.0": ("float32", ()),
        "more.2.0": ("bfloat16", (0, 8)),
    }
    assert header.inputs[0].extra == {"dims": ("batch", None)}


def test_a_model_of_it():
    """It has the form "file" alone; open sizes can be fixed; other forms and signatures are refused with a remedy."""
    model = driver.load(FILES / "trees.jax", shapes={"arg0": (3, 8)})
    assert [info.shape for info in model.inputs] == [(3, 8), (4,), (8, 4), ()]
    with pytest.raises(ImportFailed, match=r'does not become operations of the HAL; keep form="auto"'):
        driver.load(FILES / "trees.jax", form="operations")
    with pytest.raises(ImportFailed, match=r"signature='f': a \.jax file has one function; leave it out"):
        driver.load(FILES / "trees.jax", signature="f")
    with pytest.raises(ImportFailed, match="shapes names 'x', which is not an input"):
        driver.load(FILES / "trees.jax", shapes={"x": (3, 8)})


def test_types_that_are_not_carried():
    """They are refused by the name of the input."""
    with pytest.raises(ImportFailed, match=r"input 0 \('arg0'\) has elements of complex64"):
        driver.load(FILES / "complex.jax")


@pytest.mark.parametrize("contents", [b"", b"\0" * 64, b"\xff" * 64, b"name,size\n" * 9, TREES[:200]], ids=len)
def test_what_is_no_such_file(tmp_path, contents):
    """Is refused as that."""
    path = tmp_path / "net.jax"
    path.write_bytes(contents)
    with pytest.raises(ImportFailed, match=r"net\.jax"):
        driver.load(path)


def test_damage_is_told_as_that():
    """A byte that is another one gives a header or ImportFailed, and nothing else."""
    random, outcomes = np.random.default_rng(7), set()
    for _ in range(400):
        damaged = bytearray(TREES)
        for _ in range(random.integers(1, 4)):
            damaged[random.integers(len(damaged) if random.random() < 0.5 else 700)] = random.integers(256)
        try:
            outcomes.add(type(read_header(memoryview(damaged))))
        except ImportFailed as error:
            outcomes.add(type(error))
    assert len(outcomes) > 1
