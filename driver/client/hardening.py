"""A device's answer about how its processes are confined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burst import GeneralFailure

if TYPE_CHECKING:
    from collections.abc import Sequence


def confinement(answer: Sequence[Any]) -> dict[str, dict[str, bool]]:
    """Return by process, "service" and "engine", whether each layer is active. `answer`: to the call "sandbox".

    Raise GeneralFailure.
    """
    try:
        service, engine = answer
        return {
            process: {str(layer): bool(is_active) for layer, is_active in layers}
            for process, layers in (("service", service), ("engine", engine))
        }
    except (TypeError, ValueError):
        raise GeneralFailure(f"the device answers {answer!r:.80}, which does not say how it is confined") from None
