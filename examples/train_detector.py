"""Train the detector that `burst demo camera` runs, on scenes it will never show.

driver/demos/detector.npz was made by

    python examples/train_detector.py --scenes 400 --frames 15 --epochs 24 --seed 1

in a quarter of an hour on one core (it needs the `train` extra). Training scenes have the seeds from FIRST_SCENE on,
the check at the end has those from UNSEEN_SCENE on, and the demo starts at 0: none of them meet.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from driver.demos.boxes import Agreement, Box
from driver.demos.detector import CELL, GRID, STRIDE, WEIGHTS, decode
from driver.demos.scene import NAMES, Scene

FIRST_SCENE, UNSEEN_SCENE = 1_000_000, 2_000_000


class Block(nn.Module):
    """A 3x3 convolution with TensorFlow's SAME padding, batch normalisation and RELU."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        # SAME puts an odd row of padding below and an odd column to the right.
        self.padding = (0, 1, 0, 1) if stride == 2 else (1, 1, 1, 1)
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor, after: bool = True) -> torch.Tensor:
        """Apply the block; `after` says whether RELU follows."""
        x = self.norm(self.conv(functional.pad(x, self.padding)))
        return functional.relu(x) if after else x

    def folded(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the filter [out, height, width, in] and bias that do the same without normalisation."""
        gain = self.norm.weight / torch.sqrt(self.norm.running_var + self.norm.eps)
        weight = self.conv.weight * gain[:, None, None, None]
        bias = self.norm.bias - self.norm.running_mean * gain
        return weight.detach().permute(0, 2, 3, 1).numpy(), bias.detach().numpy()


class Detector(nn.Module):
    """The network that detector.build_model() spells out again in the vocabulary of the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Block(3, 12, 2)
        self.down = Block(12, 24, 2)
        self.fine = Block(24, 32)
        self.coarse = Block(32, 48, 2)
        self.wide1 = Block(48, 48)
        self.wide2 = Block(48, 48)
        self.lift = nn.Conv2d(48, 32, 1)
        self.join = Block(32, 40)
        self.classes = nn.Conv2d(40, len(NAMES), 1)
        self.edges = nn.Conv2d(40, 4, 1)
        nn.init.constant_(self.classes.bias, -4.0)
        nn.init.constant_(self.edges.bias, 2.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map thinned-out frames [N, 3, 120, 160] in 0..1 to class logits and distances to the box's edges."""
        fine = self.fine(self.down(self.stem(x)))
        coarse = self.coarse(fine)
        coarse = functional.relu(coarse + self.wide2(self.wide1(coarse), after=False))
        lifted = functional.interpolate(self.lift(coarse), scale_factor=2, mode="bilinear", align_corners=False)
        joined = self.join(functional.relu(fine + lifted))
        return self.classes(joined), self.edges(joined)

    def weights(self) -> dict[str, np.ndarray]:
        """Return every filter and bias by name, normalisation folded in."""
        named = {}
        for name, part in self.named_children():
            if isinstance(part, Block):
                named[name + ".filter"], named[name + ".bias"] = part.folded()
            else:
                named[name + ".filter"] = part.weight.detach().permute(0, 2, 3, 1).numpy()
                named[name + ".bias"] = part.bias.detach().numpy()
        return {name: np.ascontiguousarray(value, np.float32) for name, value in named.items()}


def film(first: int, scenes: int, frames: int) -> tuple[np.ndarray, list[list[Box]]]:
    """Render frames from many scenes, thinned out as the network's first operation does it."""
    images, truths = np.empty((scenes * frames, 480 // STRIDE, 640 // STRIDE, 3), np.uint8), []
    frame = np.empty((480, 640, 3), np.uint8)
    for i in range(scenes):
        scene = Scene(first + i)
        for j in range(frames):
            scene.advance(29)
            truths.append(scene.render(frame))
            images[i * frames + j] = frame[::STRIDE, ::STRIDE]
    return images, truths


def as_input(images: torch.Tensor) -> torch.Tensor:
    """Frames as the network takes them: [N, 3, rows, columns] in 0..1."""
    return images.permute(0, 3, 1, 2).float() / 255


def targets(truth: list[Box]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return heat [classes, rows, columns], edges [4, rows, columns] and which cells must know the edges."""
    rows, columns = GRID
    y, x = (np.mgrid[:rows, :columns] + 0.5) * CELL
    heat, edges = np.zeros((len(NAMES), rows, columns), np.float32), np.zeros((4, rows, columns), np.float32)
    nearest = np.full((rows, columns), np.inf)
    for box in truth:
        middle = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
        far = (((x - middle[0]) / (box.x1 - box.x0)) ** 2 + ((y - middle[1]) / (box.y1 - box.y0)) ** 2) * 50
        kind = heat[NAMES.index(box.name)]
        np.maximum(kind, np.exp(-far), out=kind)
        peak = min(int(middle[1] / CELL), rows - 1), min(int(middle[0] / CELL), columns - 1)
        kind[peak] = 1
        distance = np.maximum(abs(x - middle[0]), abs(y - middle[1])) / CELL
        mine = (distance < 1.5) & (distance < nearest)
        nearest[mine] = distance[mine]
        edges[:, mine] = np.stack([x - box.x0, y - box.y0, box.x1 - x, box.y1 - y])[:, mine] / CELL
    return heat, edges, np.isfinite(nearest)


def loss(logits: torch.Tensor, edges: torch.Tensor, truth: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Penalty-reduced focal loss for the heat (as in CenterNet) plus relative overlap loss for the edges."""
    heat, wanted, near = truth
    p = logits.sigmoid()
    peaks = heat == 1
    hit = functional.logsigmoid(logits) * (1 - p) ** 2
    calm = functional.logsigmoid(-logits) * p**2 * (1 - heat) ** 4
    focal = -torch.where(peaks, hit, calm).sum() / peaks.sum()
    got, wanted = (t.permute(0, 2, 3, 1)[near] for t in (edges, wanted))
    shared = area(torch.minimum(got, wanted))
    union = area(got) + area(wanted) - shared
    return focal + (1 - shared / union.clamp(min=1e-3)).mean() + 0.1 * functional.l1_loss(got, wanted)


def area(edges: torch.Tensor) -> torch.Tensor:
    """Area of boxes given by the distances [N, 4] to their edges."""
    return (edges[:, 0] + edges[:, 2]).clamp(min=0) * (edges[:, 1] + edges[:, 3]).clamp(min=0)


def mirrored(batch: list[torch.Tensor], random: np.random.Generator) -> list[torch.Tensor]:
    """Flip a batch at random, its boxes' edges along with it, and tint it at random.

    Of every STRIDE pixels the first was taken; in a mirror it would be the last, so flipping moves what one sees.
    """
    images, heat, edges, near = batch
    moved = (STRIDE - 1) / CELL
    for axis, swap, shift in ((-1, [2, 1, 0, 3], (moved, 0, -moved, 0)), (-2, [0, 3, 2, 1], (0, moved, 0, -moved))):
        if random.random() < 0.5:
            images, heat, edges, near = (t.flip(axis) for t in (images, heat, edges, near))
            edges = edges[:, swap] + torch.tensor(shift)[:, None, None]
    images = images[:, random.permutation(3).tolist()] * float(random.uniform(0.85, 1.1))
    return [images, heat, edges, near]


def train(net: Detector, data: list[torch.Tensor], epochs: int, random: np.random.Generator, batch: int = 32) -> None:
    """Fit the network with Adam and a one-cycle learning rate."""
    steps = len(data[0]) // batch
    optimiser = torch.optim.AdamW(net.parameters(), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=6e-3, total_steps=epochs * steps)
    start = time.monotonic()
    for epoch in range(epochs):
        total = 0.0
        for rows in random.permutation(len(data[0]))[: steps * batch].reshape(steps, batch):
            images, *truth = mirrored([as_input(data[0][rows]), *(t[rows] for t in data[1:])], random)
            value = loss(*net(images), truth)
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            schedule.step()
            total += float(value.detach())
        print(f"epoch {epoch + 1}/{epochs}  loss {total / steps:.3f}  {time.monotonic() - start:.0f} s", flush=True)


def check(net: Detector, scenes: int = 30, frames: int = 10) -> Agreement:
    """Compare what the network finds with the truth on scenes it has not seen."""
    net.eval()
    images, truths = film(UNSEEN_SCENE, scenes, frames)
    agreement = Agreement()
    with torch.no_grad():
        for image, truth in zip(images, truths, strict=True):
            logits, edges = net(as_input(torch.from_numpy(image)[None]))
            agreement.count(decode([t.permute(0, 2, 3, 1).numpy() for t in (logits.sigmoid(), edges)]), truth)
    return agreement


def main() -> None:
    """Film, train, check, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("scenes", 400), ("frames", 15), ("epochs", 24), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    images, truths = film(FIRST_SCENE, args.scenes, args.frames)
    data = [torch.from_numpy(images)]
    data += [torch.from_numpy(np.stack(parts)) for parts in zip(*map(targets, truths), strict=True)]
    net = Detector()
    train(net, data, args.epochs, np.random.default_rng(args.seed))
    agreement = check(net)
    report = f"precision {agreement.precision:.3f} recall {agreement.recall:.3f} on unseen scenes"
    command = shlex.join(["python", "examples/train_detector.py", *sys.argv[1:]])
    np.savez_compressed(args.out, command=command, report=report, torch=torch.__version__, **net.weights())
    print(f"{args.out}: {args.out.stat().st_size} bytes, {report}")


if __name__ == "__main__":
    main()
