"""Boxes of detections, as tests compute with them."""


def overlap(a, b):
    """Intersection over union of two boxes of corners."""
    sides = [max(min(a[i + 2], b[i + 2]) - max(a[i], b[i]), 0) for i in range(2)]
    areas = [(x[2] - x[0]) * (x[3] - x[1]) for x in (a, b)]
    union = sum(areas) - sides[0] * sides[1]
    return sides[0] * sides[1] / union if union else 0.0
