"""As much of the package `frigate` as a detector plug-in imports, so that plug-ins can be loaded without Frigate."""

import importlib.util
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import zmq


class DetectionApi:
    """What the plug-ins derive from: it keeps the configuration."""

    def __init__(self, detector_config):
        self.detector_config = detector_config
        self.height, self.width = detector_config.model.height, detector_config.model.width


class BaseDetectorConfig:
    """Plug-ins name their options in a class derived from this."""


_PARTS = {
    "frigate": {},
    "frigate.detectors": {},
    "frigate.detectors.detection_api": {"DetectionApi": DetectionApi},
    "frigate.detectors.detector_config": {"BaseDetectorConfig": BaseDetectorConfig},
    "frigate.const": {"MODEL_CACHE_DIR": "/nowhere"},
}


@contextmanager
def stand_ins():
    """For the block, these are what `import frigate…` finds."""
    before = {name: sys.modules.get(name) for name in _PARTS}
    for name, contents in _PARTS.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def plug_in(path, name):
    """The module at that path, as Frigate would import it."""
    with stand_ins():
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def with_contexts(module, make):
    """The module makes its ZeroMQ contexts by `make` from now on, so that they can be watched, and ended."""
    module.zmq = SimpleNamespace(**vars(zmq) | {"Context": make})
    return module


def config(path, model_type, size, **options):
    """As Frigate's own, of what plug-ins read. model_type: with name and value, as an enumeration's member."""
    kind = SimpleNamespace(name=model_type.replace("-", ""), value=model_type)
    model = SimpleNamespace(path=str(path), width=size, height=size, model_type=kind)
    return SimpleNamespace(model=model, **options)


def zmq_config(endpoint, path, model_type, size, timeout_ms=20_000):
    """Of its zmq detector."""
    options = {"endpoint": endpoint, "request_timeout_ms": timeout_ms, "linger_ms": 0}
    return config(path, model_type, size, **options)
