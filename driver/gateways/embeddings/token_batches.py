"""Token ids of texts to arrays: texts of like length run together, in few runs with little padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from driver.gateways.embeddings.text_tokenizer import TextTokens

MOST_ROWS = 16
"""Texts of one run."""
MOST_TOKENS = 4096
"""Of one run, padding included: a processor gains nothing by more."""
_RUN = 64  # tokens that take about as long as the beginning and end of a run


class TokenBatch(NamedTuple):
    """The texts of one run, by their numbers, and the length to which they are padded."""

    texts: Sequence[int]
    length: int


def padded_length(length: int, most: int) -> int:
    """Return the length to which so many tokens are padded: of few lengths, so that texts of several requests have the
    same one and can run together.
    """
    step = 8
    while step * 8 < length:
        step *= 2
    return min(most, -(-length // step) * step)


def batched(lengths: Sequence[int], most: int, rows: int = MOST_ROWS) -> list[TokenBatch]:
    """Return the runs of texts of these lengths, the longest texts first. `most`: tokens of a text."""
    found, texts, length, padding = list[TokenBatch](), list[int](), 0, 0
    for text in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        its = padded_length(lengths[text], most)
        padding += length - its
        if not texts or len(texts) == rows or (len(texts) + 1) * length > MOST_TOKENS or padding > _RUN:
            texts, length, padding = [], its, 0
            found.append(TokenBatch(texts, length))
        texts.append(text)
    return found


def arrays(tokens: Iterable[TextTokens], length: int, pad: int) -> dict[str, NDArray[np.int64]]:
    """Return what models take, by the names of their inputs, padded on the right."""
    its = list(tokens)
    shape = len(its), length
    ids, mask, types = np.full(shape, pad, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for n, each in enumerate(its):
        ids[n, : len(each.ids)] = each.ids
        mask[n, : len(each.ids)] = 1
        types[n, : len(each.ids)] = each.types
    positions = np.broadcast_to(np.arange(length), shape)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "position_ids": positions}
