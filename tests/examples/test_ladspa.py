"""The LADSPA plug-in: under Debian's applyplugin, and under a host of the test's own whose device dies."""

import ctypes
import shutil
import signal
import subprocess
import wave
from ctypes import POINTER, byref, c_char_p, c_float, c_ulong, c_void_p

import numpy as np
import pytest
from held_processes import HeldProcess
from needed_tools import give_up
from waiting import until

import driver

pytestmark = pytest.mark.integration
BLOCK, RATE = 512, 48000
INPUT, OUTPUT, WAITS, LATENCY, DRY = range(5)


class Descriptor(ctypes.Structure):
    """LADSPA_Descriptor."""

    _fields_ = (
        *(("unique_id", c_ulong), ("label", c_char_p), ("properties", ctypes.c_int)),
        *((name, c_char_p) for name in ("name", "maker", "copyright")),
        *(("port_count", c_ulong), ("port_descriptors", c_void_p), ("port_names", c_void_p), ("port_hints", c_void_p)),
        ("implementation_data", c_void_p),
        ("instantiate", ctypes.CFUNCTYPE(c_void_p, c_void_p, c_ulong)),
        ("connect_port", ctypes.CFUNCTYPE(None, c_void_p, c_ulong, c_void_p)),
        ("activate", c_void_p),
        ("run", ctypes.CFUNCTYPE(None, c_void_p, c_ulong)),
        *((name, c_void_p) for name in ("run_adding", "set_run_adding_gain", "deactivate")),
        ("cleanup", ctypes.CFUNCTYPE(None, c_void_p)),
    )


class Host:
    """A host of one instance, which is given a block at a time."""

    def __init__(self, path):
        library = ctypes.CDLL(str(path))
        library.ladspa_descriptor.restype = POINTER(Descriptor)
        self.plugin = library.ladspa_descriptor(0).contents
        assert not library.ladspa_descriptor(1)
        self.handle = self.plugin.instantiate(byref(self.plugin), RATE)
        assert self.handle
        self.sound, self.controls = (c_float * BLOCK)(), {port: c_float(0) for port in (WAITS, LATENCY, DRY)}
        for port in (INPUT, OUTPUT):  # in place, as hosts may
            self.plugin.connect_port(self.handle, port, ctypes.addressof(self.sound))
        for port, value in self.controls.items():
            self.plugin.connect_port(self.handle, port, ctypes.addressof(value))

    def hear(self, value):
        """What comes out while a block of that value goes in; then waits as long as a result may take."""
        self.sound[:] = [value] * BLOCK
        self.plugin.run(self.handle, BLOCK)
        (found,) = set(self.sound)
        return found

    @property
    def dry(self):
        return self.controls[DRY].value

    def close(self):
        self.plugin.cleanup(self.handle)


@pytest.fixture
def model(half_as_loud):
    """The effect, for blocks of this host."""
    half_as_loud(BLOCK)


@pytest.fixture
def device(model):
    """The engine that the plug-in's device has, held; killed after the test."""
    with driver.connect("onnxruntime") as connection:
        held = HeldProcess(connection.engine_pid)
    yield held
    held.end()


@pytest.mark.usefixtures("model")
def test_applyplugin_renders_a_file(ladspa_plugin, tmp_path):
    """Each sample comes out a block later, as the model makes it."""
    if shutil.which("applyplugin") is None:
        give_up("no applyplugin: apt install ladspa-sdk")
    sound = np.random.default_rng(1).integers(-(2**15), 2**15, 20 * BLOCK).astype("<i2")
    with wave.open(str(tmp_path / "in.wav"), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(sound.tobytes())
    command = ["applyplugin", tmp_path / "in.wav", tmp_path / "out.wav", ladspa_plugin, "burst_model", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with wave.open(str(tmp_path / "out.wav")) as file:
        heard = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(int)
    assert not heard[:BLOCK].any()
    assert np.abs(heard[BLOCK : len(sound)] + sound[: len(sound) - BLOCK] // 2).max() <= 2


@pytest.mark.usefixtures("model")
def test_a_block_is_heard_as_it_is_where_the_model_is_late(ladspa_plugin, device):
    """While the engine stands still; then the effect is heard again, and nothing of what was late."""
    host = Host(ladspa_plugin)
    assert host.hear(0.25) == 0.0
    until(lambda: host.hear(0.25) == -0.125)
    device.signal(signal.SIGSTOP)
    host.hear(0.5)
    before = host.dry
    assert [host.hear(0.5 + i) for i in range(6)] == [0.5, 0.5, 1.5, 2.5, 3.5, 4.5]
    assert host.dry == before + 6
    device.signal(signal.SIGCONT)
    until(lambda: host.hear(0.125) == -0.0625)
    assert host.controls[LATENCY].value == BLOCK
    host.close()


def test_sound_goes_on_when_the_device_dies(ladspa_plugin, device):
    """As it goes in, without a gap; and the effect comes back with the device, which the plug-in starts again."""
    host = Host(ladspa_plugin)
    host.hear(0.25)
    until(lambda: host.hear(0.25) == -0.125)
    device.signal(signal.SIGKILL)
    assert device.has_ended()
    heard = []
    until(lambda: heard.append(host.hear(0.25)) or (len(heard) > 4 and heard[-1] == -0.125))
    assert set(heard) == {0.25, -0.125}
    host.close()
