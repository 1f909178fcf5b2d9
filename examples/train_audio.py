"""Train the network that `burst demo audio` runs, on sounds it will never play.

driver/demos/audio_net.npz was made by

    python examples/train_audio.py --rooms 400 --steps 5000 --seed 1

in a quarter of an hour on one core (it needs the `train` extra). Training sounds have the seeds from FIRST_SOUND on,
the check at the end has those from UNSEEN_SOUND on, and the demo those below: none of them meet.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from driver.demos.keypad import BLOCK, COLUMNS, LEVELS, RATE, ROWS, Ear, keystrokes, labels, mixed, room, section
from driver.demos.listener import BANDS, CELLS, CLASSES, DELAY, FAINT, WEIGHTS, Goertzel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

known_section = cache(section)
FIRST_SOUND, UNSEEN_SOUND = 1_000_000, 2_000_000
USUAL, SPREAD = -7.0, 3.0  # of the logarithms of the powers, roughly: so that the LSTM sees numbers around 0
GATES = ("input", "forget", "cell", "output")  # torch's order is the HAL's


class Net(nn.Module):
    """The network that listener.build_model() spells out again in the vocabulary of the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.cos, self.sin = (nn.Linear(BLOCK, BANDS, bias=False) for _ in range(2))
        self.lstm = nn.LSTM(BANDS, CELLS, batch_first=True)
        self.keys = nn.Linear(CELLS, CLASSES)
        pitches = np.concatenate([ROWS, COLUMNS, np.geomspace(250, 3500, BANDS - len(ROWS + COLUMNS))])
        waves = np.exp(2j * np.pi * pitches[:, None] * np.arange(BLOCK) / RATE) * (np.hamming(BLOCK) / BLOCK**0.5)
        for part, wave in ((self.cos, waves.real), (self.sin, waves.imag)):
            part.weight.data = torch.tensor(wave, dtype=torch.float32)

    def forward(self, blocks: torch.Tensor) -> torch.Tensor:
        """Map sounds [N, blocks, 320] to scores [N, blocks, classes]."""
        power = self.cos(blocks) ** 2 + self.sin(blocks) ** 2
        return self.keys(self.lstm((torch.log(power + FAINT) - USUAL) / SPREAD)[0])

    def weights(self) -> dict[str, np.ndarray]:
        """Return every filter and bias by name; the scaling of the logarithms goes into the LSTM."""
        lstm = self.lstm
        into = lstm.weight_ih_l0 / SPREAD
        bias = lstm.bias_ih_l0 + lstm.bias_hh_l0 - into.sum(dim=1) * USUAL
        named = {"bank.cos": self.cos.weight, "bank.sin": self.sin.weight}
        named |= {"keys.filter": self.keys.weight, "keys.bias": self.keys.bias}
        for name, all_gates in (("into", into), ("again", lstm.weight_hh_l0), ("bias", bias)):
            named |= {f"{name}.{gate}": part for gate, part in zip(GATES, all_gates.chunk(4), strict=True)}
        return {name: value.detach().numpy().astype(np.float32, order="C") for name, value in named.items()}


def batch(rooms: list[np.ndarray], random: np.random.Generator, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """New keystrokes in known rooms: blocks [N, blocks, 320], and for each the label of the block before."""
    sounds, truths = [], []
    for _ in range(size):
        tones, presses = keystrokes(random)
        rest = np.roll(rooms[random.integers(len(rooms))], int(random.integers(len(tones))))
        sounds.append(
            mixed(tones, rest, random.uniform(min(LEVELS) - 1, max(LEVELS) + 1)) * 10 ** random.uniform(-1, 0.3)
        )
        truths.append(np.roll(labels(presses), DELAY))
    shape = size, -1, BLOCK
    return torch.from_numpy(np.float32(sounds)).reshape(shape), torch.from_numpy(np.stack(truths))


def train(net: Net, rooms: list[np.ndarray], steps: int, random: np.random.Generator, size: int = 16) -> None:
    """Fit the network with Adam and a one-cycle learning rate."""
    optimiser = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=1e-2, total_steps=steps)
    start, total = time.monotonic(), 0.0
    for step in range(1, steps + 1):
        sounds, truths = batch(rooms, random, size)
        value = functional.cross_entropy(net(sounds).flatten(0, 1), truths.flatten())
        optimiser.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        total += float(value.detach())
        if step % 100 == 0:
            print(f"step {step}/{steps}  loss {total / 100:.4f}  {time.monotonic() - start:.0f} s", flush=True)
            total = 0.0


def answers(net: Net, bias: float = 0.0) -> Callable[[np.ndarray], np.ndarray]:
    """What the network thinks of blocks [N, 320], when it thinks of no key as that much less likely."""

    def label(blocks: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            scores = net(torch.from_numpy(np.float32(blocks))[None])[0].numpy()
        scores[:, 0] -= bias
        return scores.argmax(axis=1)

    return label


def count(label: Callable[[np.ndarray], np.ndarray], seeds: Iterable[int], level: float) -> np.ndarray:
    """How many keys are heard rightly, heard wrongly, and pressed, in the sections of these seeds."""
    found = np.zeros(3, int)
    for seed in seeds:
        sound, presses = known_section(seed, level)
        ear = Ear(presses)
        for one in label(sound.reshape(-1, BLOCK)):
            ear.hear(int(one))
        heard = [event.press is not None for event in ear.events if event.key]
        found += sum(heard), len(heard) - sum(heard), len(presses)
    return found


def chosen(makers: dict[float | tuple[float, float], Callable], seeds: range) -> float | tuple[float, float]:
    """Return which of several settings makes the fewest mistakes: keys missed, and keys heard that were not pressed."""

    def mistakes(label: Callable) -> int:
        right, wrong, pressed = sum(count(label, seeds, level) for level in LEVELS)
        return pressed - right + wrong

    return min(makers, key=lambda setting: mistakes(makers[setting]))


def main() -> None:
    """Make sounds, train, choose thresholds, check, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rooms", 400), ("steps", 5000), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    rooms = [room(np.random.default_rng(FIRST_SOUND + n)) for n in range(args.rooms)]
    net = Net()
    train(net, rooms, args.steps, np.random.default_rng(args.seed))
    seeds = range(FIRST_SOUND, FIRST_SOUND + min(args.rooms, 40))
    bias = chosen({bias: answers(net, bias) for bias in (-1.0, -0.5, 0.0, 0.5, 1.0)}, seeds)
    net.keys.bias.data[0] -= bias
    rules = product((0.02, 0.05, 0.1, 0.15, 0.2, 0.3), (1.3, 1.5, 2.0, 2.5, 4.0))
    rule = chosen({rule: Goertzel(*rule).labels for rule in rules}, seeds)
    lines = []
    unseen = range(UNSEEN_SOUND, UNSEEN_SOUND + len(seeds))
    for level in LEVELS:
        results = [count(label, unseen, level) for label in (answers(net), Goertzel(*rule).labels)]
        lines.append(f"{level:+} dB: {', '.join('{} right {} wrong of {}'.format(*result) for result in results)}")
    command = shlex.join(["python", "examples/train_audio.py", *sys.argv[1:]])
    facts = {"command": command, "report": "\n".join(lines), "torch": torch.__version__, "goertzel": np.array(rule)}
    np.savez_compressed(args.out, **facts, **net.weights())
    print(
        f"{args.out}: {args.out.stat().st_size} bytes; network, and then Goertzel {rule}, on unseen sounds:",
        *lines,
        sep="\n",
    )


if __name__ == "__main__":
    main()
