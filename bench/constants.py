"""What does a device take to say what it supports of a model with large constants, and to prepare it?

    python bench/constants.py [--devices reference litert onnxruntime] [--megabytes 256] [--json FILE]

The constants lie in one pool. "Frozen": no process can write it any more, so it travels as its handle. "Written": its
client can still write it, so its bytes are copied once. Each round calls `supported_operations` and then `prepare`, on
a device that runs and has no such model. EMBEDDING_LOOKUP reads rows of one table: no library makes anything of it
beforehand. FULLY_CONNECTED is four square matrices, which LiteRT and ONNX Runtime pack for their kernels while they
prepare. Beside it, in the same round: the SHA-256 of the constants, which is the cache's token of a model, and one copy
of them into new shared memory.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from measure import conditions
from own_device import installed, own_device
from verdict import Budget, Report, arguments, parse, progress, publish, spell

import driver
from driver.cli.timing import estimate

if TYPE_CHECKING:
    import argparse

    from measure import Block

QUESTION = "From a model with constants in a pool to a prepared model, in ms"
DEVICES = ("reference", "litert", "onnxruntime")
OPERATIONS = ("EMBEDDING_LOOKUP", "FULLY_CONNECTED")
LIMIT, LAYERS = 1.1, 4
POOLS = ("frozen", "written")


class Row(NamedTuple):
    """What is measured: a device, an operation, and the pool of its constants."""

    device: str
    operation: str
    pool: str


def side(nbytes: int) -> int:
    """Of each of the matrices."""
    return int(np.sqrt(nbytes / 4 / LAYERS)) // 16 * 16


def model(operation: str, pool: driver.Memory) -> driver.Model:
    """A model whose constants fill the pool."""
    m, n = driver.ModelBuilder(), side(pool.nbytes)
    if operation == "EMBEDDING_LOOKUP":
        table = m.constant(pool.asarray(np.float32, (LAYERS * n, n)), by_reference=True)
        m.output(m.operation(operation, m.input("int32", (8,)), table))
        return m.build()
    x = m.input("float32", (1, n))
    for layer in range(LAYERS):
        weights = m.constant(pool.asarray(np.float32, (n, n), 4 * layer * n * n), by_reference=True)
        x = m.operation(operation, x, weights, np.zeros(n, np.float32), 0)
    m.output(x)
    return m.build()


def pools(nbytes: int) -> dict[str, driver.Memory]:
    """Equal bytes in both."""
    values = np.random.default_rng(1).standard_normal(nbytes // 4, np.float32)
    written = driver.Memory.create(values.nbytes)
    written.asarray(np.float32)[:] = values
    return {"frozen": driver.Memory.frozen(values), "written": written}


def milliseconds(begin: float) -> float:
    """Since then."""
    return (time.perf_counter() - begin) * 1e3


def copied(pool: driver.Memory) -> float:
    """One copy into new shared memory, in ms."""
    begin = time.perf_counter()
    with open(os.memfd_create("copy"), "wb") as file:
        file.write(pool.asarray().data)
        return milliseconds(begin)


def hashed(pool: driver.Memory) -> float:
    """SHA-256 of the constants, in ms."""
    begin = time.perf_counter()
    hashlib.sha256(pool.asarray().data).digest()
    return milliseconds(begin)


def asked(device: driver.RemoteDevice, wanted: driver.Model) -> Block:
    """Both calls, in ms."""
    begin = time.perf_counter()
    supported = device.supported_operations(wanted)
    first = milliseconds(begin)
    if not all(supported):
        raise SystemExit(f"bench: {device.name} does not support this model")
    begin = time.perf_counter()
    prepared = device.prepare(wanted)
    second = milliseconds(begin)
    prepared.close()
    return {"supported": first, "prepare": second, "both": first + second}


def measure(args: argparse.Namespace, stack: ExitStack) -> dict[Row, list[Block]]:
    """All rounds, of which the first is not kept."""
    devices = {name: stack.enter_context(own_device(name)) for name in args.devices}
    memory = pools(args.megabytes << 20)
    rows = [Row(*row) for row in np.array(np.meshgrid(args.devices, OPERATIONS, POOLS)).T.reshape(-1, 3).tolist()]
    blocks: dict[Row, list[Block]] = {row: [] for row in rows}
    for number in range(args.pairs + 1):
        progress(f"round {number} of {args.pairs}")
        for row in rows[:: -1 if number % 2 else 1]:
            pool = memory[row.pool]
            beside = {"SHA-256": hashed(pool), "copy": copied(pool)}
            found = asked(devices[row.device], model(row.operation, pool)) | beside
            if number:
                blocks[row].append(found)
    progress("")
    return blocks


def of_hashing(row: Row, block: Block) -> float:
    """What both calls take, without the one copy of a pool that can be written, by what hashing takes."""
    return (block["both"] - (block["copy"] if row.pool == "written" else 0.0)) / block["SHA-256"]


def budgets(blocks: dict[Row, list[Block]]) -> list[Budget]:
    """Both calls beside hashing."""
    found = []
    for row, of in blocks.items():
        what = "SHA-256, and one copy" if row.pool == "written" else "SHA-256"
        ratios = estimate([of_hashing(row, block) for block in of])
        found.append(Budget(f"{', '.join(row)}: both <= {LIMIT} x {what}", ratios, LIMIT))
    return found


def main() -> None:
    """Measures, prints, writes."""
    parser = arguments(__doc__)
    parser.add_argument("--devices", nargs="+", default=[*DEVICES], metavar="DEVICE")
    parser.add_argument("--megabytes", type=int, help="of constants (default 256, with --quick 4)")
    args = parse(parser)
    args.devices, missing = installed(args.devices)
    args.megabytes = args.megabytes or (4 if args.quick else 256)
    found = conditions()
    with ExitStack() as stack:
        blocks = measure(args, stack)
    stages = ("supported", "prepare", "SHA-256", "copy")
    lines = []
    for row, of in blocks.items():
        medians = (f"{float(np.median([block[stage] for block in of])):.1f}" for stage in stages)
        lines.append((", ".join(row), *medians, spell(estimate([block["both"] for block in of]))))
    lines += [(device, *["-"] * len(stages), "not installed") for device in missing]
    rows = [{"name": ", ".join(row), "rounds": of} for row, of in blocks.items()]
    body = {"subjects": rows, "megabytes": args.megabytes, "missing": missing}
    publish(args, Report(QUESTION, found, lines, budgets(blocks), body, ("", *stages, "supported and prepare")))


if __name__ == "__main__":
    main()
