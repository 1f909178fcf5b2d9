"""From a model's vectors of tokens to one vector for each text, as sentence-transformers has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

POOLINGS = "cls", "mean", "max", "last", "mean_sqrt"
_LEAST = 1e-12  # length of a vector that is normalised


def pooled(kind: str, tokens: Floats, mask: NDArray[np.int64]) -> Floats:
    """Return a vector for each text, [texts, size].

    `kind`: one of POOLINGS. `tokens`: [texts, tokens, size]. `mask`: [texts, tokens], 0 for padding, on the right.
    """
    found: Floats
    if kind == "cls":
        found = tokens[:, 0]
    elif kind == "last":
        found = tokens[np.arange(len(tokens)), mask.sum(1) - 1]
    elif kind == "max":
        found = np.where(mask[:, :, None] != 0, tokens, np.float32(-np.inf)).max(1)
    else:
        count = mask.sum(1, dtype=np.float32)[:, None]
        total = np.einsum("bth,bt->bh", tokens, mask.astype(np.float32), optimize=True)
        found = total / (count if kind == "mean" else np.sqrt(count))
    return found


def normalized(vectors: Floats) -> Floats:
    """Return vectors of length 1."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    found: Floats = vectors / np.maximum(lengths, np.float32(_LEAST))
    return found
