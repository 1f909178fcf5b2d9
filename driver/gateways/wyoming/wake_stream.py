"""The sound of one satellite: what has to be remembered of it, and its activations for each 80 ms.

samples            480 + 1280                 16 kHz, int16
   │ melspectrogram.onnx
frames             8 more of the latest 76
   │ embedding_model.onnx
embeddings         1 more of the latest 16, 22, …
   │ the wake word's model
activation         0 to 1
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from driver.gateways.wyoming.wake_models import BINS, CONTEXT, FRAMES, STEP

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from numpy.typing import NDArray

    from driver.gateways.wyoming.wake_models import WakeModels

_SILENT_STEPS = 5
"""Whose activations are zero, as in openWakeWord: they are still of the noise."""


class WakeStream:
    """From the beginning of a stream to its end. It changes only when a step has succeeded."""

    def __init__(self, models: WakeModels) -> None:
        self._models = models
        self._waiting: NDArray[np.int16] = np.empty(0, np.int16)
        self._context: NDArray[np.int16] = np.empty(0, np.int16)
        self._frames: NDArray[np.float32] = np.ones((FRAMES, BINS), np.float32)
        self._features = models.first_features
        self._steps = 0

    @property
    def samples(self) -> int:
        """The number of samples that were taken in steps."""
        return self._steps * STEP

    async def feed(self, samples: NDArray[np.int16], wanted: Collection[str]) -> AsyncIterator[dict[str, float]]:
        """Yield the activations of each step that these samples complete. Raise what `ModelServer.run` raises."""
        self._waiting = np.concatenate((self._waiting, samples))
        while self._waiting.size >= STEP:
            found = await self._step(self._waiting[:STEP], wanted)
            self._waiting = self._waiting[STEP:]
            yield found

    async def _step(self, block: NDArray[np.int16], wanted: Collection[str]) -> dict[str, float]:
        sound = np.concatenate((self._context, block))
        new: Any = await self._models.frames(sound.astype(np.float32))
        frames = np.concatenate((self._frames, new))[-FRAMES:]
        embedding = await self._models.embedding(frames)
        features = np.concatenate((self._features, embedding))[-len(self._models.first_features) :]
        found = await self._models.activations(features, wanted)
        self._context, self._frames, self._features = sound[-CONTEXT:].copy(), frames, features
        self._steps += 1
        return found if self._steps > _SILENT_STEPS else dict.fromkeys(found, 0.0)


__all__ = ["WakeStream"]
