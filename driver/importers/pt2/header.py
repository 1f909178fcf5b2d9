"""The header of a .pt2 file: the tensors that the exported program takes and returns.

An input has the name of its argument, as `torch.export` writes it; an output is `output`, `output0` (of a tuple), or
the key of a dict.
"""

from typing import NoReturn

from driver.errors import ImportFailed
from driver.formats.pt2_archive import Pt2Archive, Pt2Tensor
from driver.importers.header import Header, HeaderTensor
from driver.importers.obstacle import Obstacle


def read_header(data: memoryview) -> Header:
    """Read the header. Raise ImportFailed for a file that is damaged, or would run code of its own."""
    archive = Pt2Archive(data)
    return Header(tuple(map(_declared, archive.inputs)), tuple(map(_declared, archive.outputs)))


def as_first(data: memoryview, name: str) -> NoReturn:
    """Raise ImportFailed: a signature is what .tflite files have."""
    del data
    raise ImportFailed(f"signature={name[:64]!r}: a .pt2 file has one program", remedy="leave it out")


def _declared(tensor: Pt2Tensor) -> HeaderTensor:
    if not tensor.dtype:
        reason = f"{tensor.name[:64]!r} has elements that numpy has not, nor the file form"
        return HeaderTensor(tensor.name, "", None, refusal=Obstacle(None, None, (tensor.name,), reason, remedy=None))
    extra = {"dims": tensor.symbols} if any(tensor.symbols) else {}
    return HeaderTensor(tensor.name, tensor.dtype, tensor.shape, extra=extra)
