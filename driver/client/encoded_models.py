"""Sends a model's bytes once: what a device was asked about last is encoded, and prepared from the same memory.

Encoding copies the constants of a model that are not in frozen pools. `supported_operations` and `prepare` of the same
model share one copy, and so do several devices that are asked in turn. The copy is dropped when the model is prepared,
when another model is asked about, or with the model.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from driver.protocol.model_codec import encode

if TYPE_CHECKING:
    from driver.nn import Model
    from driver.protocol.model_codec import EncodedModel


class LatestModel:
    """The encoding of the model that was asked about last. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may come while this thread holds it
        self._model: weakref.ref[Model] | None = None
        self._encoded: EncodedModel | None = None

    def asked(self, model: Model, most_handles: int) -> EncodedModel:
        """Encode a model, and keep that for `prepared`."""
        encoded = encode(model, most_handles, self._of(model))
        with self._lock:
            self._model, self._encoded = weakref.ref(model, self._forget), encoded
        return encoded

    def prepared(self, model: Model, most_handles: int) -> EncodedModel:
        """Encode a model. Compare bytes instead of copying them if it was asked about just now."""
        return encode(model, most_handles, self._of(model))

    def forget(self, model: Model) -> None:
        """Drop what is kept of a model: a device has it."""
        with self._lock:
            if self._model is not None and self._model() is model:
                self._model = self._encoded = None

    def _of(self, model: Model) -> EncodedModel | None:
        with self._lock:
            return self._encoded if self._model is not None and self._model() is model else None

    def _forget(self, reference: weakref.ref[Model]) -> None:
        with self._lock:
            if self._model is reference:
                self._model = self._encoded = None


latest = LatestModel()
