"""Reads the header of .jax files: what `jax.export.export(f)(x).serialize()` returns. JAX is not needed."""
