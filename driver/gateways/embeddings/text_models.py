"""The model of a folder on a device: it embeds texts, or ranks them for a query."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.errors import DeviceFailed
from driver.gateways.embeddings.pooling import POOLINGS, normalized, pooled
from driver.gateways.embeddings.text_tokenizer import TextTokenizer
from driver.gateways.embeddings.token_batches import MOST_ROWS, MOST_TOKENS, arrays, batched
from driver.gateways.fair_turns import FairTurns
from driver.importers import load
from driver.options import Batch
from driver.runtime.compilation import compile as compile_model

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence
    from contextlib import AsyncExitStack

    from numpy.typing import NDArray

    from driver.gateways.embeddings.model_folder import ModelFolder
    from driver.gateways.embeddings.text_tokenizer import TextTokens
    from driver.gateways.embeddings.token_batches import TokenBatch
    from driver.nn import Model
    from driver.replicas import ModelServer
    from driver.runtime.compiled import CompiledModel

    Floats = NDArray[np.float32]

_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}
_MASK = "attention_mask"
_POOLED = "sentence_embedding"
_QUEUE = 1024  # runs of all requests that wait; each request has two at most
_SURE = np.float32(80)  # a logit beyond it is 0 or 1
_AT_ONCE = 2  # runs of one request, so that others have their turn
_TOKENS_AT_ONCE = 3 * MOST_TOKENS  # that the device has been given, so that it is never idle; then accounts alternate
_FIRST = 16, 3600.0  # tokens of the first text, and seconds for it


@dataclass
class TextCounts:
    """Counts of what was asked of a model. Of one event loop; any thread reads."""

    requests: Counter[str] = field(default_factory=Counter)  #: by outcome: success or fail
    texts: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @contextmanager
    def of_one(self) -> Iterator[None]:
        """Count a request, which is answered within the block."""
        outcome, begin = "fail", time.monotonic()
        try:
            yield
            outcome = "success"
        finally:
            self.requests[outcome] += 1
            self.seconds += time.monotonic() - begin

    def note(self, tokens: Sequence[TextTokens]) -> int:
        """Note the texts of a request; return how many tokens they have."""
        count = sum(len(each.ids) for each in tokens)
        self.texts, self.tokens = self.texts + len(tokens), self.tokens + count
        return count


class TextModel:
    """A folder's model. Of one event loop, after `open`."""

    def __init__(self, folder: ModelFolder, device: str) -> None:
        """Read the files. Raise DeviceFailed, and what `driver.load` raises."""
        self.name, self._folder, self._device = folder.name, folder, device
        self.tokenizer = TextTokenizer(folder)
        self.model: Model = load(folder.model).named(folder.name)
        self._said = f"--embeddings {folder.model}"
        self._sizes = self._checked_inputs()
        is_open = self._sizes[0] is None and all((each.shape or (0,))[0] is None for each in self.model.outputs)
        self._rows = MOST_ROWS if is_open else 1
        self._output = self._chosen_output()
        self.ranks = self._ranks()
        rank = len(self.model.outputs[self._output].shape or ())
        self._pooling = None if self.ranks or rank == 2 else self._checked_pooling()
        self.dimensions = 0  #: of a vector, once it is open
        self._turns = FairTurns(_TOKENS_AT_ONCE)
        self.counts = TextCounts()

    async def open(self, stack: AsyncExitStack) -> None:
        """Compile and serve it, and embed a first text. Raise DeviceFailed, DriverError or BurstError."""
        compiled = await asyncio.to_thread(self._compiled)
        stack.callback(compiled.close)
        rows, length = self._sizes
        shapes = {tensor.name: (rows or 1, length or _FIRST[0]) for tensor in self.model.inputs}
        serving = compiled.serve(queue=_QUEUE, batch=self._rows, shapes=shapes, name=self.name)
        self._server: ModelServer = await stack.enter_async_context(serving)
        loop = asyncio.get_running_loop()
        first = self.tokenizer.encode(["first"])
        self.dimensions = (await self.vectors(first, loop.time() + _FIRST[1])).shape[1]

    def _compiled(self) -> CompiledModel:
        """Compile it, so that its runs ride with those of other programs of this account."""
        mask = _MASK if self._sizes[1] is None and any(each.name == _MASK for each in self.model.inputs) else None
        batch = Batch(MOST_ROWS, mask=mask) if self._rows > 1 else None
        return compile_model(self.model, device=self._device, progress=False, batch=batch)

    # ---- what the file says

    def _checked_inputs(self) -> tuple[int | None, int | None]:
        """Return the rows and the tokens of a run where the file fixes them."""
        names = [tensor.name for tensor in self.model.inputs]
        if "input_ids" not in names or not _INPUTS.issuperset(names):
            raise DeviceFailed(
                f"{self._said}: its inputs are {', '.join(names)}; a model of texts has input_ids, and of "
                f"{', '.join(sorted(_INPUTS))} what it needs"
            )
        shape = next(tensor.shape for tensor in self.model.inputs if tensor.name == "input_ids")
        if shape is None or len(shape) != 2 or shape[0] not in (None, 1):
            raise DeviceFailed(f"{self._said}: input_ids is {shape}: [texts, tokens] is expected, of 1 or any number")
        return shape[0], shape[1]

    def _chosen_output(self) -> int:
        """Return the number of the output that is pooled in the model, if there is one; else the first."""
        names = [tensor.name for tensor in self.model.outputs]
        return names.index(_POOLED) if _POOLED in names else 0

    def _ranks(self) -> bool:
        output = self.model.outputs[self._output]
        shape = output.shape or ()
        if len(shape) not in (2, 3):
            raise DeviceFailed(f"{self._said}: {output} is neither [texts, size] nor [texts, tokens, size]")
        is_logit = len(shape) == 2 and shape[1] == 1
        if self._folder.ranks and not is_logit and (len(shape) == 3 or shape[1] is not None):
            raise DeviceFailed(f"{self._said}: {output}: a model that ranks has one logit for each text")
        return is_logit or bool(self._folder.ranks)

    def _checked_pooling(self) -> str:
        if (pooling := self._folder.pooling) is None:
            raise DeviceFailed(
                f"{self._said}: the folder does not tell how its tokens become one vector (1_Pooling/config.json); "
                f"say it with --pooling {', '.join(POOLINGS)}"
            )
        return pooling

    # ---- runs

    @property
    def normalizes(self) -> bool:
        """True if vectors have length 1."""
        return self._folder.normalizes

    def stats(self) -> dict[str, Any]:
        """Return the statistics of its runs, as `ModelServer.stats` has them."""
        return self._server.stats()

    async def vectors(self, tokens: Sequence[TextTokens], deadline: float, account: Hashable = None) -> Floats:
        """Return a vector for each text. `deadline`: a time.monotonic(). `account`: that asks. Raise BurstError."""
        found: list[Floats | None] = [None] * len(tokens)
        lengths = [self._sizes[1] or len(each.ids) for each in tokens]
        left = iter(batched(lengths, self._sizes[1] or self.tokenizer.most, self._rows))

        async def run_all(batches: Iterator[TokenBatch]) -> None:
            for batch in batches:
                async with self._turns.taken(account, len(batch.texts) * batch.length):
                    rows = await self._run([tokens[n] for n in batch.texts], batch.length, deadline)
                for n, row in zip(batch.texts, rows, strict=True):
                    found[n] = row

        tasks = [asyncio.create_task(run_all(left)) for _ in range(min(_AT_ONCE, len(tokens)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return np.stack([row for row in found if row is not None])

    async def scores(self, tokens: Sequence[TextTokens], deadline: float, account: Hashable = None) -> Floats:
        """Return how relevant each text is, from 0 to 1. Raise BurstError."""
        logits = (await self.vectors(tokens, deadline, account))[:, 0]
        return np.float32(1) / (np.float32(1) + np.exp(-np.clip(logits, -_SURE, _SURE)))

    async def _run(self, tokens: Sequence[TextTokens], length: int, deadline: float) -> Floats:
        given = arrays(tokens, length, self.tokenizer.pad)
        inputs = [given[tensor.name].astype(tensor.dtype, copy=False) for tensor in self.model.inputs]
        outputs = await self._server.run(*inputs, deadline=deadline)
        found = np.asarray(outputs[self._output], np.float32)
        if self._pooling:
            found = pooled(self._pooling, found, given["attention_mask"])
        return normalized(found) if self._folder.normalizes and not self.ranks else found
