"""Writes the .jax files of the tests, which need no JAX: python tests/driver/importers/make_jax.py, with JAX 0.10."""

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import export

FOLDER = Path(__file__).parent / "jax_files"


def trees(x, weights, *, scale):
    """Arguments and results in trees, with a size that is open, an argument by keyword, and bfloat16."""
    return {"logits": x @ weights["w"] + weights["b"], "more": (x.sum() * scale, None, [x.astype(jnp.bfloat16)])}


def main():
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")  # no paths of the machine in the files
    (batch,) = export.symbolic_shape("batch")
    floats = jnp.float32
    weights = {"w": jax.ShapeDtypeStruct((8, 4), floats), "b": jax.ShapeDtypeStruct((4,), floats)}
    x, scale = jax.ShapeDtypeStruct((batch, 8), floats), jax.ShapeDtypeStruct((), floats)
    complex_ = jax.ShapeDtypeStruct((2,), jnp.complex64)
    made = {
        "trees": export.export(jax.jit(trees))(x, weights, scale=scale),
        "increment": export.export(jax.jit(lambda x: x + 1))(jax.ShapeDtypeStruct((4,), floats)),
        "complex": export.export(jax.jit(jnp.conj))(complex_),
    }
    for name, exported in made.items():
        (FOLDER / f"{name}.jax").write_bytes(exported.serialize())


if __name__ == "__main__":
    main()
