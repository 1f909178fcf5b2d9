"""Texts to token ids, by the tokenizer.json of a model's folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from driver.errors import DeviceFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.gateways.embeddings.model_folder import ModelFolder

_PARALLEL = "TOKENIZERS_PARALLELISM"


class TextTokens(NamedTuple):
    """The token ids of one text, and of each the number of the sentence that it is of."""

    ids: NDArray[np.int64]
    types: NDArray[np.int64]


class TextTokenizer:
    """A folder's tokenizer, which truncates texts as its model needs it. Any thread."""

    def __init__(self, folder: ModelFolder) -> None:
        """Raise DeviceFailed."""
        os.environ.setdefault(_PARALLEL, "false")  # its threads are ours: no request takes all processors
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(folder.tokenizer))
        except Exception as error:
            raise DeviceFailed(f"--embeddings: {folder.tokenizer} cannot be read: {error}") from error
        self.pad = _pad_of(self._tokenizer, folder)
        self.vocabulary = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._prefix, self._lowers, self.most = folder.prefix, folder.lowers, folder.max_tokens
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(folder.max_tokens, direction=folder.truncation_side)
        self._before, self._after = self._special()

    def encode(self, texts: Sequence[str]) -> list[TextTokens]:
        """Return the tokens of texts."""
        return [_tokens(each) for each in self._tokenizer.encode_batch_fast([self._read(each) for each in texts])]

    def _read(self, text: str) -> str:
        text = self._prefix + text
        return text.lower() if self._lowers else text

    def encode_pairs(self, query: str, texts: Sequence[str]) -> list[TextTokens]:
        """Return the tokens of the query and each text, together. The longer one is truncated first."""
        return [_tokens(each) for each in self._tokenizer.encode_batch_fast([(query, text) for text in texts])]

    def of_ids(self, ids: Sequence[int]) -> TextTokens:
        """Return token ids as a text's. Special tokens are added, as to a text, if they are not there."""
        before, after = self._before, self._after
        if before and list(ids[: len(before)]) == before:
            ids = ids[len(before) :]
        if after and list(ids[-len(after) :]) == after:
            ids = ids[: -len(after)]
        room = max(0, self.most - len(before) - len(after))
        found = np.array([*before, *ids[:room], *after], np.int64)
        return TextTokens(found, np.zeros_like(found))

    def _special(self) -> tuple[list[int], list[int]]:
        """Return the ids of special tokens before and after each text."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        found = self._tokenizer.encode("a").ids
        for begin in range(len(found) - len(plain) + 1):
            if found[begin : begin + len(plain)] == plain:
                return found[:begin], found[begin + len(plain) :]
        return [], []


def _tokens(encoding: object) -> TextTokens:
    return TextTokens(np.array(encoding.ids, np.int64), np.array(encoding.type_ids, np.int64))  # type: ignore[attr-defined]


def _pad_of(tokenizer: object, folder: ModelFolder) -> int:
    """Return the id that pads: models whose positions follow from the ids rely on it."""
    padding = tokenizer.padding  # type: ignore[attr-defined]
    for found in (
        padding and padding["pad_id"],
        folder.pad_token is not None and tokenizer.token_to_id(folder.pad_token),  # type: ignore[attr-defined]
        folder.pad_id,
    ):
        if type(found) is int:
            return found
    return 0
