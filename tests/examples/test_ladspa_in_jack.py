"""The LADSPA plug-in in a graph of JACK, at 48 kHz: Debian's ecasound has it there, behind a client of the test's own.

No sound card is needed: the server has JACK's driver "dummy". It waits for its clients (`--sync`), so none misses a
period on a busy machine, and what is fed is heard, or the plug-in has lost it.
"""

import ctypes
import os
import shutil
import subprocess
from collections import Counter, deque
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_uint32, c_ulong, c_void_p

import numpy as np
import pytest
from needed_tools import give_up
from waiting import PATIENCE, until

pytestmark = pytest.mark.integration
RATE, HEARD, SAID = 48000, 100, 2000
AUDIO, INPUT, OUTPUT, NO_START_SERVER = b"32 bit float mono audio", 1, 2, 1
LATER = 2  #: periods until a block is back: one of the plug-in's, and one of the loop through JACK
PROCESS = ctypes.CFUNCTYPE(c_int, c_uint32, c_void_p)
MESSAGE = ctypes.CFUNCTYPE(None, c_char_p)
SIGNATURES = {
    "jack_client_open": (c_void_p, c_char_p, c_int, POINTER(c_int)),
    "jack_client_close": (c_int, c_void_p),
    "jack_port_register": (c_void_p, c_void_p, c_char_p, c_char_p, c_ulong, c_ulong),
    "jack_port_get_buffer": (c_void_p, c_void_p, c_uint32),
    "jack_set_process_callback": (c_int, c_void_p, PROCESS, c_void_p),
    "jack_get_sample_rate": (c_uint32, c_void_p),
    "jack_activate": (c_int, c_void_p),
    "jack_set_error_function": (None, MESSAGE),
    "jack_set_info_function": (None, MESSAGE),
}


class JackClient:
    """A client that plays noise to its port `out`, a new block each period, and notes what comes to its port `in`.

    `heard`: for each block, how it came back: "model", "dry", "silence", or "lost", which is none of them.
    """

    def __init__(self):
        self.jack = ctypes.CDLL("libjack.so.0")
        for name, (result, *arguments) in SIGNATURES.items():
            function = getattr(self.jack, name)
            function.restype, function.argtypes = result, arguments
        self.said, self.played, self.heard = [], deque(maxlen=LATER), []
        self.random = np.random.default_rng(1)
        self.callbacks = MESSAGE(self.said.append), PROCESS(self.process)
        self.jack.jack_set_error_function(self.callbacks[0])
        self.jack.jack_set_info_function(self.callbacks[0])
        status = c_int()
        self.client = until(
            lambda: self.jack.jack_client_open(b"test", NO_START_SERVER, byref(status)), lambda: self.said[-3:]
        )
        self.out, self.input = (
            self.jack.jack_port_register(self.client, name, AUDIO, kind, 0)
            for name, kind in ((b"out", OUTPUT), (b"in", INPUT))
        )
        assert self.jack.jack_get_sample_rate(self.client) == RATE
        self.jack.jack_set_process_callback(self.client, self.callbacks[1], None)
        assert self.jack.jack_activate(self.client) == 0

    def process(self, frames, _):
        """What JACK calls each period."""
        out, came = (
            np.ctypeslib.as_array((c_float * frames).from_address(self.jack.jack_port_get_buffer(port, frames)))
            for port in (self.out, self.input)
        )
        if len(self.played) == LATER:
            self.heard.append(said_of(came, self.played[0]))
        out[:] = self.random.uniform(-1, 1, frames).astype(np.float32)
        self.played.append(out.copy())
        return 0

    def wait_for_model(self):
        """Until it has been heard for as many blocks as are enough, or a block is lost."""
        until(lambda: "lost" in self.heard or self.heard.count("model") >= HEARD, lambda: Counter(self.heard))

    def close(self):
        self.jack.jack_client_close(self.client)


def said_of(came, played):
    """How a block came."""
    kinds = {"silence": np.zeros_like(played), "dry": played, "model": played * np.float32(-0.5)}
    return next((kind for kind, block in kinds.items() if np.array_equal(came, block)), "lost")


@contextmanager
def program(log, *command):
    """One that runs until the block ends. What it says is in a file: a pipe that no one reads would stop it."""
    with log.open("w") as said, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said) as it:
        try:
            yield
        finally:
            it.terminate()
            try:
                it.wait(PATIENCE)
            finally:
                it.kill()
                print(log.read_text()[-SAID:])  # pytest shows it where the test fails


@pytest.fixture
def jack(monkeypatch, tmp_path, ladspa_plugin, half_as_loud):
    """jack(period, wait): in a block, a client whose sound goes through the plug-in in ecasound, and back to it."""
    for command, package in {"jackd": "jackd2", "ecasound": "ecasound"}.items():
        if shutil.which(command) is None:
            give_up(f"no {command}: apt install --no-install-recommends {package}")
    server = f"burst-test-{os.getpid()}"
    monkeypatch.setenv("JACK_DEFAULT_SERVER", server)
    monkeypatch.setenv("LADSPA_PATH", str(ladspa_plugin.parent))

    @contextmanager
    def graph(period, wait):
        half_as_loud(period)
        dummy = "-d", "dummy", "--rate", str(RATE), "--period", str(period)
        ports = "-f:32,1,48000", "-i", "jack,test", "-o", "jack,test"
        with program(tmp_path / "jackd.log", "jackd", "--no-realtime", "--sync", "-t", "10000", "-n", server, *dummy):
            client = JackClient()
            try:
                with program(tmp_path / "ecasound.log", "ecasound", "-q", *ports, f"-el:burst_model,{wait}"):
                    yield client
            finally:
                client.close()

    return graph


@pytest.mark.parametrize("period", [64, 128])
def test_a_graph_of_jack_hears_the_model(jack, period):
    """A block later than it was played, and each sample as the model makes it, where the plug-in waits for it."""
    with jack(period, wait=1) as client:
        client.wait_for_model()
        heard = [*client.heard]
    assert set(heard[heard.index("model") :]) == {"model"}


def test_a_graph_of_jack_keeps_its_pace(jack):
    """Where the plug-in does not wait, each block is heard in its turn, as the model makes it or as it was played."""
    with jack(128, wait=0) as client:
        client.wait_for_model()
        heard = [kind for kind in client.heard if kind != "silence"]
    assert set(heard) <= {"model", "dry"}
