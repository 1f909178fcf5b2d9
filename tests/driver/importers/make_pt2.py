"""Writes the .pt2 files of the tests, which need no PyTorch: python tests/driver/importers/make_pt2.py, with 2.13."""

import io
from pathlib import Path

import torch

from driver.formats.pt2_archive import Pt2Archive


class Trees(torch.nn.Module):
    """Results in trees, a size that is open, a buffer, and bfloat16."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x, scale):
        return {"logits": self.linear(x) * scale + self.offset, "more": (x.sum(), [x.to(torch.bfloat16)])}


class Increment(torch.nn.Module):
    """x + 1."""

    def forward(self, x):
        return x + 1


def main():
    sizes = {"x": {0: torch.export.Dim("batch")}, "scale": None}
    write("trees", torch.export.export(Trees(), (torch.ones(3, 8), torch.ones(())), dynamic_shapes=sizes))
    write("increment", torch.export.export(Increment(), (torch.ones(4),)))


def write(name, program):
    made = io.BytesIO()
    torch.export.save(program, made)
    without_paths = Pt2Archive(made.getbuffer()).cleaned()
    (Path(__file__).parent / "pt2_files" / f"{name}.pt2").write_bytes(without_paths.getvalue())


if __name__ == "__main__":
    main()
