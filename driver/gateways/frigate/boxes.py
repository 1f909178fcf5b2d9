"""Boxes that a model found become the rows that Frigate reads: class, score, y1, x1, y2, x2, the surest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS = 20
THRESHOLD = 0.4  #: Frigate asks for no less: it keeps no box below it
_OVERLAP = 0.4  # of two boxes, from which on they are one object
_MOST_CANDIDATES = 1000


class FoundBoxes(NamedTuple):
    """Of one frame. corners: x1, y1, x2, y2 in parts of the frame. is_final: the model left out what overlaps."""

    corners: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[Any]
    is_final: bool = False

    def rows(self) -> NDArray[np.float32]:
        """Raises ValueError for scores and places that are no numbers: the model's output is worth nothing then."""
        sure = np.flatnonzero(~(self.scores < THRESHOLD))  # so that what is no number stays
        sure = sure[np.argsort(-self.scores[sure], kind="stable")][:_MOST_CANDIDATES]
        if not (np.isfinite(self.scores[sure]).all() and np.isfinite(self.corners[sure]).all()):
            raise ValueError("the model found boxes whose scores or places are no finite numbers")
        if not self.is_final:
            sure = sure[_apart(self.corners[sure], self.scores[sure])]
        sure, found = sure[:ROWS], np.zeros((ROWS, 6), np.float32)
        found[: sure.size, 0] = self.classes[sure]
        found[: sure.size, 1] = self.scores[sure]
        found[: sure.size, 2:] = self.corners[sure][:, [1, 0, 3, 2]]
        return found


def corners_of_centres(centres: NDArray[np.float32]) -> NDArray[np.float32]:
    """x1, y1, x2, y2 from centre and size."""
    half = centres[:, 2:4] / 2
    return np.concatenate([centres[:, :2] - half, centres[:, :2] + half], axis=1)


def _apart(corners: NDArray[np.float32], scores: NDArray[np.float32]) -> NDArray[np.intp]:
    """The surest of boxes that overlap, whatever their classes, the surest first."""
    if not scores.size:
        return np.zeros(0, np.intp)
    sizes = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)
    return np.asarray(cv2.dnn.NMSBoxes(sizes.tolist(), scores.tolist(), THRESHOLD, _OVERLAP), np.intp).reshape(-1)
