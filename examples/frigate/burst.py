"""A detector of Frigate that runs its model on a device of Burst, through shared memory.

Put this file into frigate/detectors/plugins/, `pip install 'burst-engine[frigate,litert]'` into Frigate's Python, and
configure:

    detectors:
      burst:
        type: burst
        device: litert          # or the socket of a served one: /run/burst/litert.sock

The frame is written once: where the device reads it. A device that dies is started again, and has the frame once more.
All else that goes wrong raises: twenty rows of zeros would say that nothing is there.
"""

import logging
from typing import Literal

import numpy as np
from frigate.detectors.detection_api import DetectionApi
from frigate.detectors.detector_config import BaseDetectorConfig

import driver
from driver.gateways.frigate import FrameDetector

DETECTOR_KEY = "burst"
LIMIT = 8.0  # seconds; after ten, Frigate believes that its detector is stuck

logger = logging.getLogger(__name__)


class BurstDetectorConfig(BaseDetectorConfig):
    """Models on a device of Burst: in another process, through shared memory."""

    type: Literal[DETECTOR_KEY]
    device: str = "litert"


class BurstDetector(DetectionApi):
    type_key = DETECTOR_KEY

    def __init__(self, detector_config):
        super().__init__(detector_config)
        model = detector_config.model
        self._detector = FrameDetector(model.path, getattr(model.model_type, "value", model.model_type))
        self._compiled = driver.compile(self._detector.model, device=detector_config.device, progress=False)
        self._burst = self._compiled.burst(recover=True, input_shapes=self._detector.shapes)
        self._detector.approve(self._burst.run(*self._detector.blank()).outputs)
        logger.info("burst: %s on %s", model.path, detector_config.device)

    def detect_raw(self, tensor_input):
        shape = tensor_input.shape
        self._detector.check(shape, tensor_input.dtype.name)
        inputs = self._burst.inputs
        np.copyto(inputs[self._detector.frame_place], tensor_input)
        for place, array in self._detector.other_inputs(shape).items():
            inputs[place][...] = array
        return self._detector.rows(self._burst.run(timeout=LIMIT).outputs, shape)

    def close(self):
        self._burst.close()
        self._compiled.close()
