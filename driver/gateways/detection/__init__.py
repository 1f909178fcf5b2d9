"""What the outputs of models that find objects mean, for every gateway that needs boxes.

decoder.py   `DetectionDecoder`: the outputs of one model become boxes, or are refused
model_types.py   the types of models, and what the outputs of each mean; found_boxes.py   which boxes are left
class_names.py   the names of classes, from a file
"""

from driver.gateways.detection.decoder import DetectionDecoder
from driver.gateways.detection.found_boxes import FoundBoxes

__all__ = ["DetectionDecoder", "FoundBoxes"]
