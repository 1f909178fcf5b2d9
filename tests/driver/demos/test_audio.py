"""The audio demo as people start it, and what it keeps in buffers of the device."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import wave
from importlib.util import find_spec

import numpy as np
import pytest
from by_hand import by_hand
from click.testing import CliRunner
from inside import controller_of

import driver
from driver.cli.command import burst
from driver.demos import audio
from driver.demos.audio_report import write_sound
from driver.demos.keypad import BLOCK, section
from driver.demos.listener import CLASSES, build_model

AUDIO = [sys.executable, "-u", "-m", "driver.cli", "demo", "audio"]
UNSEEN_SOUND = 3_000_000  # far from the seeds that train_audio.py trains and checks on
EVENT = re.compile(r"^ +([\d.]+) s   (\S)(?:   (?:not )?pressed.*(right|wrong|missed))?", re.MULTILINE)


def listen(*arguments):
    """Run the demo; return its exit status and what it printed."""
    command = [*AUDIO, "--fast", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def heard(text):
    """The lines with keys: (time, key), without what was missed."""
    return [(at, key) for at, key, _ in EVENT.findall(text) if key != "-"]


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """What a run of eight seconds printed, and the folder that it wrote to."""
    folder = tmp_path_factory.mktemp("audio")
    status, text = listen("--seconds", 8, "--device", "reference", "--out", folder)
    assert status == 0, text
    return text, folder


@pytest.fixture
def invoke(tmp_path):
    """Runs the demo in this process."""

    def run(*arguments):
        return CliRunner().invoke(burst, ["demo", "audio", "--fast", *map(str, ("--out", tmp_path, *arguments))])

    return run


class TestProgram:
    """As a program."""

    @pytest.mark.integration
    def test_it_hears_the_keys_and_says_so_as_they_come(self, generated):
        """Of the keys in eight seconds at 5 and 0 dB nine in ten are right, each on a line with its truth."""
        verdicts = [verdict for *_, verdict in EVENT.findall(generated[0])]
        assert len(verdicts) > 20
        assert verdicts.count("right") >= 0.9 * len(verdicts)

    @pytest.mark.integration
    def test_both_paths_answer_alike_and_are_tabulated(self, generated):
        """400 blocks on each path, to the bit; with percentiles, missed deadlines and the real-time factor."""
        text, folder = generated
        assert "400 on each path; they differ by at most 0 " in text
        assert "420 runs in the burst (20 warm-up), 0 fallbacks" in text
        for word in ("burst", "plain RPC", "p50", "p99", "p99.9", "real-time", "Goertzel", "+0 dB", "pressed"):
            assert word in text
        assert {path.name for path in folder.iterdir()} == {"audio.png", "audio.wav"}
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}

    @pytest.mark.integration
    def test_the_summary_comes_as_json_and_alone(self, invoke, tmp_path):
        """With --json, standard output is one object; what it says of keys, calls and files is so."""
        done = invoke("--seconds", 2, "--device", "reference", "--json")
        summary = json.loads(done.stdout)
        assert summary["blocks"] == summary["latency_ms"]["plain RPC"]["whole call"]["calls"] == 100
        assert 0 < summary["another_process_costs_ms"] < summary["latency_ms"]["burst"]["whole call"]["p99.9"]
        assert summary["largest_difference"] == 0
        assert summary["runs"] == {"burst": 120, "plain": 0, "warm_up": 20}
        assert summary["keys"]["network"] == {"right": len(summary["heard"]), "wrong": 0, "missed": 0}
        assert summary["files"] == [str(tmp_path / name) for name in ("audio.png", "audio.wav")]
        assert heard(done.stderr)

    @pytest.mark.integration
    def test_the_sound_it_wrote_sounds_the_same_to_it(self, generated, tmp_path):
        """A WAV file goes through, and the same keys are heard in it at the same time."""
        text, folder = generated
        status, again = listen("--wav", folder / "audio.wav", "--device", "reference", "--out", tmp_path)
        assert status == 0, again
        assert heard(again) == heard(text)
        assert {path.name for path in tmp_path.iterdir()} == {"audio.png"}

    @pytest.mark.integration
    @pytest.mark.parametrize("blocks", [1, 7])
    def test_a_moment_of_silence_is_enough(self, invoke, tmp_path, blocks):
        """A file of so little sound, without any key, ends in tables and a picture all the same."""
        write_sound(tmp_path / "short.wav", np.zeros(blocks * BLOCK))
        text = invoke("--wav", tmp_path / "short.wav", "--device", "reference", "--out", tmp_path / "out").stdout
        assert f"{blocks} on each path" in text
        assert "nothing" in text
        assert (tmp_path / "out" / "audio.png").exists()

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (("--wav", "/nowhere.wav"), "--wav /nowhere.wav: no such file; pass a WAV file"),
            (("--wav", __file__), "test_audio.py: cannot be read as sound"),
            (("--microphone", "nonesuch"), "--microphone nonesuch: ALSA cannot open it"),
            (("--microphone", "default", "--wav", "x.wav"), "--wav and --microphone: pass at most one of them"),
            (("--device", "nonesuch"), "name='nonesuch': no such device"),
            (("--seconds", "0"), "'--seconds': 0.0 is not in the range 0.02<=x<=600"),
            (("--seconds", "nan"), "'--seconds': nan is not a number"),
            (("--seed", "-1"), "'--seed': -1 is not in the range 0<=x<=999"),
            (("--out", "/dev/null/out"), "--out /dev/null/out: cannot create the folder (Not a directory); pass one"),
        ],
    )
    def test_bad_argument_is_named_with_its_remedy(self, invoke, arguments, complaint):
        """A bad argument ends the program at once with 2, with the argument, its value and what to do."""
        done = invoke(*arguments)
        assert done.exit_code == 2
        assert complaint in done.stderr

    def test_a_file_without_a_sample_is_refused(self, invoke, tmp_path):
        """It is named: there is nothing to report on."""
        with wave.open(str(tmp_path / "empty.wav"), "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
        done = invoke("--wav", tmp_path / "empty.wav")
        assert done.exit_code == 2
        assert "empty.wav" in done.stderr

    @pytest.mark.integration
    def test_a_device_that_dies_is_named(self, tmp_path):
        """When the device is killed in the middle, the program says that, and that what it remembered is lost."""
        command = [*AUDIO, "--seconds", "60", "--out", str(tmp_path), "--device", "reference"]
        with (
            driver.connect("reference") as device,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program,
        ):
            while not EVENT.match(program.stdout.readline()):
                pass
            os.kill(device.engine_pid, signal.SIGKILL)
            text = "".join(program.communicate(timeout=60))
        assert program.returncode != 0
        assert "the device process died and its state is lost; run the command again" in text
        assert "Traceback" not in text


class TestState:
    """What the network remembers, in buffers of the device."""

    @pytest.fixture(params=["reference", "litert"])
    def prepared(self, request):
        """The network on a device."""
        if request.param == "litert" and not find_spec("ai_edge_litert"):
            pytest.skip("no ai-edge-litert")
        with driver.connect(request.param) as device, device.prepare(build_model()) as found:
            yield found

    @pytest.mark.parametrize("path", ["burst", "plain RPC"])
    def test_it_is_handed_on_as_by_hand(self, prepared, path):
        """Sixty blocks: the answers, and both states afterwards, are those of the interpreter in this process, but for
        the last bits of sums of products: what a BLAS adds first depends on the processor, and on where it lies.
        """
        blocks = np.float32(section(UNSEEN_SOUND, 0)[0]).reshape(-1, BLOCK)[:60]
        tolerance = {"rtol": 1e-5, "atol": 1e-5 if prepared.device.name == "reference" else 1e-3}
        expected, states = by_hand(blocks)
        with prepared.burst() as fast:
            listener = audio.Listener(prepared, fast.execute if path == "burst" else prepared.execute)
            np.testing.assert_allclose([hear(listener, block) for block in blocks], expected, **tolerance)
            for buffer, state in zip(listener._states[0], states, strict=True):
                found = np.empty_like(state)
                buffer.copy_to(found)
                np.testing.assert_allclose(found, state, **tolerance)

    def test_nothing_but_blocks_and_answers_is_in_the_client_s_memory(self, prepared):
        """A listener gives the device 1,280 + 68 bytes of its own, whatever the network remembers."""
        listener = audio.Listener(prepared, prepared.execute)
        assert listener._memory.nbytes == 4 * BLOCK + 4 * CLASSES
        assert [pool for pool in listener._requests[0].pools if isinstance(pool, driver.Memory)] == [listener._memory]

    def test_what_is_forgotten_does_not_show(self, prepared):
        """After an odd number of blocks and `forget`, a sound gets the answers that it got at first."""
        blocks = np.float32(section(UNSEEN_SOUND, 0)[0]).reshape(-1, BLOCK)[:31]
        listener = audio.Listener(prepared, prepared.execute)
        first = [hear(listener, block) for block in blocks]
        assert not np.array_equal(hear(listener, blocks[0]), first[0])  # it remembers
        listener.forget()
        np.testing.assert_array_equal([hear(listener, block) for block in blocks], first)

    def test_a_burst_encodes_both_requests_once(self, prepared):
        """However many blocks: the two requests are all that its controller keeps."""
        with prepared.burst() as fast:
            listener = audio.Listener(prepared, fast.execute)
            for _ in range(7):
                listener.step()
            kept = [request.inputs for request, _ in controller_of(fast)._packets.values()]
        assert [id(inputs) for inputs in kept] == [id(request.inputs) for request in listener._requests]


def hear(listener, block):
    """What it answers to the block."""
    listener.block[...] = block
    return listener.step()[0].copy()
