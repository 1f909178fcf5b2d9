"""The keypad, and who hears it: what is true about its sound, how keys are read, how well the network does."""

import re
import wave
from pathlib import Path

import numpy as np
import pytest
from by_hand import by_hand

from driver.demos import audio_sources
from driver.demos.audio_sources import KeypadSource, Pace, RecordedSource, open_source
from driver.demos.keypad import (
    BLOCK,
    COLUMNS,
    KEYS,
    LEVELS,
    NOTHING,
    RATE,
    ROWS,
    SECTION,
    Ear,
    Event,
    Press,
    keystrokes,
    labels,
    level_at,
    mixed,
    room,
    section,
)
from driver.demos.listener import CELLS, CLASSES, STATES, WEIGHTS, Goertzel, build_model

pytestmark = pytest.mark.integration

GUIDE = Path(__file__).parents[3] / "docs" / "audio.md"
UNSEEN_SOUND = 3_000_000  # far from the seeds that train_audio.py trains and checks on


def generator(seed=0):
    return np.random.default_rng(seed)


class TestSound:
    """What is generated."""

    def test_a_seed_says_it_all(self):
        """The same samples and keys for the same seed, others for another."""
        (one, keys), (same, same_keys), (other, _) = section(7, -5), section(7, -5), section(8, -5)
        np.testing.assert_array_equal(one, same)
        assert keys == same_keys
        assert not np.array_equal(one, other)

    def test_a_key_is_its_two_tones(self):
        """While a key is held, the strongest pitches are those of its row and column, within 1.5 %; else silence."""
        sound, presses = keystrokes(generator())
        assert len(presses) > 8
        for press in presses:
            strength = np.abs(np.fft.rfft(sound[press.start : press.end], RATE))
            key = KEYS.index(press.key)
            for pitch, group in ((ROWS[key // 4], slice(600, 1050)), (COLUMNS[key % 4], slice(1100, 1800))):
                assert group.start + strength[group].argmax() == pytest.approx(pitch, rel=0.015)
            sound[press.start : press.end] = 0
        assert not sound.any()

    @pytest.mark.parametrize("level", LEVELS)
    def test_tones_are_as_loud_as_is_said(self, level):
        """Power of the tones while a key is held, against that of the rest: the level, within a tenth of a dB."""
        random = generator(3)
        tones, presses = keystrokes(random)
        rest = room(random)
        held = np.concatenate([np.arange(press.start, press.end) for press in presses])
        only_tones = mixed(tones, rest, level) - mixed(np.zeros_like(tones), rest, level)
        power = np.mean(only_tones[held] ** 2) / np.mean(mixed(np.zeros_like(tones), rest, level) ** 2)
        assert 10 * np.log10(power) == pytest.approx(level, abs=0.1)

    def test_labels_are_the_keys_of_the_blocks(self):
        """A block has the label of the key that is held for at least half of it."""
        found = labels([Press("2", 161, 960), Press("D", 5 * BLOCK + 161, 8 * BLOCK + 159)])
        np.testing.assert_array_equal(found[:9], [0, 2, 2, 0, 0, 0, 16, 16, 0])
        assert len(found) == SECTION

    def test_the_source_joins_sections(self):
        """Samples, keys and levels of nine seconds are those of three sections in a row."""
        source, block = KeypadSource(2, 9), np.empty(BLOCK, np.float32)
        sound = []
        while source.read(block):
            sound.append(block.copy())
        assert len(sound) == 3 * SECTION
        step = SECTION * BLOCK
        for n in range(3):
            expected, presses = section(2000 + n, level_at(n * step))
            np.testing.assert_array_equal(np.concatenate(sound)[n * step : (n + 1) * step], np.float32(expected))
            mine = [press for press in source.presses if n * step <= press.start < (n + 1) * step]
            assert [(p.key, p.start - n * step, p.end - n * step) for p in mine] == [
                (p.key, p.start, p.end) for p in presses
            ]
        assert [level_at(n * step) for n in range(6)] == [*LEVELS, LEVELS[0]]


class TestEar:
    """How labels become keys."""

    def hear(self, text, presses=()):
        """The events after labels that are written as keys, with a dot for none."""
        ear = Ear(presses)
        for letter in text:
            ear.hear(NOTHING if letter == "." else KEYS.index(letter) + 1)
        return ear.events

    @pytest.mark.parametrize(
        ("text", "keys"),
        [
            ("..55..", "5"),
            ("..5..", ""),  # once is none
            ("5.5.5.", ""),
            ("555.555", "5"),  # a gap of one block is none
            ("55..55", "55"),
            ("5588", "58"),
            ("55855", "5"),
            ("558822", "582"),
        ],
    )
    def test_two_blocks_in_a_row_are_a_key(self, text, keys):
        """And the same key is a new one after two blocks in a row without it."""
        assert "".join(event.key for event in self.hear(text)) == keys

    def test_a_press_is_heard_once_from_its_start_until_shortly_after_its_end(self):
        """A second time, another key and a late one are mistakes; what nobody heard is missed, when it is too late."""
        press = Press("5", 2 * BLOCK, 4 * BLOCK)
        assert self.hear("...55", [press]) == [Event(5 * BLOCK, "5", press)]
        assert self.hear("...55..55", [press])[1:] == [Event(9 * BLOCK, "5", None)]
        assert self.hear("...88....", [press]) == [Event(5 * BLOCK, "8", None), Event(9 * BLOCK, None, press)]
        assert self.hear("......55", [press]) == [Event(8 * BLOCK, "5", press)]
        assert self.hear(".......55", [press]) == [Event(9 * BLOCK, "5", None), Event(9 * BLOCK, None, press)]
        assert self.hear("55..", [press]) == [Event(2 * BLOCK, "5", None)]

    def test_the_same_key_twice_is_two_presses(self):
        """Each is heard once, in their order."""
        presses = [Press("5", 0, 3 * BLOCK), Press("5", 6 * BLOCK, 9 * BLOCK)]
        assert [event.press for event in self.hear("555...555", presses)] == presses


class TestNetwork:
    """What was trained, and the classic detector beside it."""

    def test_weights_are_small_and_say_where_they_come_from(self):
        """At most 1 MB; the command that made them; nothing but float32 in what the network is built of."""
        assert WEIGHTS.stat().st_size <= 1_000_000
        with np.load(WEIGHTS) as file:
            assert str(file["command"]).startswith("python examples/train_audio.py ")
            assert {file[name].dtype for name in file.files if "." in name} == {np.dtype(np.float32)}

    def test_the_guide_says_what_training_found(self):
        """The table of docs/audio.md is the report in the weights."""
        rows = re.findall(r"^\| ([+-]?\d+) dB \| (.*) \|$", GUIDE.read_text(), re.MULTILINE)
        with np.load(WEIGHTS) as file:
            lines = [re.findall(r"[+-]?\d+", line) for line in str(file["report"]).splitlines()]
        assert [(int(level), *map(int, cells.split(" | "))) for level, cells in rows] == [
            tuple(int(line[n]) for n in (0, 1, 2, 4, 5)) for line in lines
        ]
        assert {line[n] for line in lines for n in (3, 6)} == {"600"}

    def test_states_go_in_as_they_come_out(self):
        """Inputs 1 and 2 and outputs 1 and 2 of the model are alike, so that buffers can be both."""
        graph = build_model().main
        ins, outs = ([graph.operands[i].dimensions for i in side] for side in (graph.inputs, graph.outputs))
        assert ins == [(1, BLOCK), *STATES]
        assert outs == [(1, CLASSES), *STATES]
        assert STATES == ((1, CELLS), (1, CELLS))

    @pytest.mark.parametrize(("level", "least", "most_wrong"), [(5, 0.97, 0.03), (0, 0.95, 0.05), (-10, 0.75, 0.2)])
    def test_it_hears_keys_that_it_never_heard(self, level, least, most_wrong):
        """On unseen sounds, on the interpreter; and at -10 dB better than the classic detector."""
        ears = {"network": [], "Goertzel": []}
        goertzel, pressed = Goertzel.trained(), 0
        for seed in range(UNSEEN_SOUND, UNSEEN_SOUND + 6):
            sound, presses = section(seed, level)
            blocks = np.float32(sound).reshape(-1, BLOCK)
            pressed += len(presses)
            for name, found in (("network", by_hand(blocks)[0].argmax(axis=1)), ("Goertzel", goertzel.labels(blocks))):
                ear = Ear(presses)
                for label in found:
                    ear.hear(int(label))
                ears[name] += [event.press is not None for event in ear.events if event.key]
        right, wrong = sum(ears["network"]), len(ears["network"]) - sum(ears["network"])
        assert right >= least * pressed
        assert wrong <= most_wrong * pressed
        assert level > -10 or right > 1.2 * sum(ears["Goertzel"])

    def test_goertzel_knows_clean_keys(self):
        """Tones alone: every key, and none where there is none."""
        sound, presses = keystrokes(generator(1))
        ear = Ear(presses)
        for block in sound.reshape(-1, BLOCK):
            ear.hear(Goertzel(0.1, 2.0).label(block))
        assert [event.press for event in ear.events if event.key] == presses


class TestTraining:
    """train_audio.py, where there is torch."""

    @pytest.fixture
    def train_audio(self):
        """The program."""
        pytest.importorskip("torch", reason="needs the extra 'train'")
        import train_audio

        return train_audio

    def test_a_step_changes_the_network_which_is_the_model(self, train_audio, tmp_path):
        """One step of training; then the saved network answers, on the interpreter, as torch does."""
        import torch

        torch.manual_seed(0)
        net = train_audio.Net()
        before = net.weights()
        train_audio.train(net, [room(generator())], 1, generator(), size=2)
        after = net.weights()
        assert all(not np.array_equal(before[name], after[name]) for name in before)
        np.savez(tmp_path / "net.npz", **after)
        blocks = np.float32(section(UNSEEN_SOUND, 0)[0]).reshape(-1, BLOCK)[:50]
        with torch.no_grad():
            expected = net(torch.from_numpy(blocks)[None])[0].softmax(dim=1).numpy()
        found, _ = by_hand(blocks, tmp_path / "net.npz")
        np.testing.assert_allclose(found, expected, atol=1e-4)

    def test_what_is_committed_is_what_it_writes(self, train_audio):
        """The same names and shapes."""
        weights = train_audio.Net().weights()
        with np.load(WEIGHTS) as file:
            assert {n: file[n].shape for n in file.files if "." in n} == {n: w.shape for n, w in weights.items()}
            assert set(file.files) - set(weights) == {"command", "report", "torch", "goertzel"}


class TestSources:
    """Files and microphones."""

    @pytest.fixture
    def tone(self, tmp_path):
        """A file of 1 s of 1,000 Hz, half as loud as can be, in stereo at 44.1 kHz."""
        path = tmp_path / "tone.wav"
        samples = np.sin(2 * np.pi * 1000 * np.arange(44_100) / 44_100) * 0.5
        with wave.open(str(path), "wb") as file:
            file.setparams((2, 2, 44_100, 0, "NONE", ""))
            file.writeframes(np.repeat((samples * 32767).astype("<i2"), 2).tobytes())
        return path

    def test_a_file_of_another_rate_is_resampled(self, tone):
        """A second is 50 blocks, of the same pitch and loudness; the last one is filled up with silence."""
        source, block, sound = open_source(tone, None, 0, 1), np.empty(BLOCK, np.float32), []
        while source.read(block):
            sound.append(block.copy())
        source.close()
        assert source.presses is None
        assert len(sound) in {50, 51}
        middle = np.concatenate(sound[10:40])
        assert np.abs(np.fft.rfft(middle)).argmax() * RATE / len(middle) == pytest.approx(1000, abs=3)
        assert np.sqrt(np.mean(middle**2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.02)

    def test_a_file_that_was_cut_off_ends(self, tone):
        """What is there is heard, and no more."""
        tone.write_bytes(tone.read_bytes()[:60_000])
        source, block, blocks = RecordedSource(str(tone)), np.empty(BLOCK, np.float32), 0
        while source.read(block):
            blocks += 1
        assert 15 <= blocks <= 18

    def test_a_file_without_sound_is_refused(self, tmp_path):
        """Such as text."""
        (tmp_path / "notes.txt").write_text("la la la")
        with pytest.raises(ValueError, match=r"--wav .*notes\.txt: cannot be read as sound .*; pass a WAV file"):
            open_source(tmp_path / "notes.txt", None, 0, 1)

    def test_pace_is_that_of_the_sound(self, monkeypatch):
        """Each block is handed on when it is complete; who comes after the next one is complete is late."""

        class Time:
            now = 1000.0

            def monotonic(self):
                return self.now

            def sleep(self, seconds):
                assert seconds > 0
                self.now += seconds

        time = Time()
        monkeypatch.setattr(audio_sources, "time", time)
        pace, taken = Pace(is_on=True), []
        for work in (0.005, 0.03, 0.005, 0.07, 0.0, 0.0):
            pace.wait()
            taken.append(round(time.now - 1000, 3))
            time.now += work
        assert taken == [0.02, 0.04, 0.07, 0.08, 0.15, 0.15]
        assert pace.late == 2
        hurried = Pace(is_on=False)
        hurried.wait()
        assert time.now == pytest.approx(1000.15)
        assert hurried.late == 0
