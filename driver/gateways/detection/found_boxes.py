"""The boxes that a model found in one frame, and which of them are left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_OVERLAP = 0.4  # of two boxes (intersection over union), from which on they are one object
_MOST_CANDIDATES = 1000
_MOST_CLASSES = 2**31


class FoundBoxes(NamedTuple):
    """The boxes in a frame. corners: x1, y1, x2, y2 in parts of the frame. is_final: the model left out overlaps."""

    corners: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[Any]
    is_final: bool = False

    def best(self, most: int, threshold: float, *, by_class: bool = True) -> FoundBoxes:
        """Return at most so many, the surest first, none below `threshold`, their corners inside the frame.

        Of boxes that overlap only the surest is left; with `by_class`, a box of another class stays beside it.
        Raise ValueError where the model's output is no number: it is worth nothing then.
        """
        sure = np.flatnonzero(~(self.scores < threshold))  # so that what is no number stays
        corners, scores, classes = self.corners[sure], self.scores[sure], self.classes[sure]
        if not (np.isfinite(scores).all() and np.isfinite(corners).all() and (abs(classes) < _MOST_CLASSES).all()):
            raise ValueError("the model found boxes whose scores, places or classes are no finite numbers")
        order = np.argsort(-scores, kind="stable")[:_MOST_CANDIDATES]
        if not self.is_final and order.size:
            order = order[_apart(corners[order], classes[order] if by_class else None)]
        order = order[:most]
        return FoundBoxes(np.clip(corners[order], 0, 1), scores[order], classes[order].astype(np.int64), is_final=True)


def corners_of_centres(centres: NDArray[np.float32]) -> NDArray[np.float32]:
    """x1, y1, x2, y2 from centre and size."""
    half = centres[:, 2:4] / 2
    return np.concatenate([centres[:, :2] - half, centres[:, :2] + half], axis=1)


def _apart(corners: NDArray[np.float32], classes: NDArray[Any] | None) -> NDArray[np.intp]:
    """Return the boxes that overlap no surer one. `boxes` has the surest first."""
    import cv2  # not needed to say which gateways there are

    sizes = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1).tolist()
    ranks = [float(rank) for rank in range(len(sizes), 0, -1)]  # OpenCV leaves out scores of 0
    if classes is None:
        kept = cv2.dnn.NMSBoxes(sizes, ranks, 0.0, _OVERLAP)
    else:
        kept = cv2.dnn.NMSBoxesBatched(sizes, ranks, classes.astype(np.int32).tolist(), 0.0, _OVERLAP)
    return np.asarray(kept, np.intp).reshape(-1)
