"""Mutants of model files in file form: what a runtime crashes over ends a process that is thrown away, and no client.

    python fuzz_file_form.py --count 1000000 --seed 7 FOLDER

Every mutant of the .onnx and .tflite files in FOLDER is loaded and run once by its own runtime, as a trial does it. A
process takes one after the other until one ends it: those crashes are the runtime's own, and are counted by signal.
Then each mutant that crashed, and a sample of the others, is brought to a device by a client, which also runs it on
inputs other than zeros, while another client uses the device and checks each of its answers.

Prints the counts; exits with 1 if the other client got a wrong answer or an error. `--keep DIR` keeps the mutants that
crashed.
"""

import argparse
import contextlib
import mmap
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "importers"))

import numpy as np
import onnx
from fuzz_onnx import Mutator

import driver
from burst import PeerDied, StatusError, Timeout
from driver.devices import device_class
from driver.devices.files import RUNTIMES
from driver.interface import Preparation
from driver.nn import validate
from driver.nn.file_form import FILE
from driver.service.trials import run_once

AT_ONCE = 1000
"""Mutants that one process takes."""
SECONDS = 20
"""Of time that one mutant may take."""
ROOM = 2 << 30
"""Bytes of address space that one process may take."""
LARGEST = 2 << 20
OUTCOMES = ("no model", "refused by its runtime", "fails when it runs", "runs")


class FileMutator(Mutator):
    """Edits of the files of a folder, by byte or, of .onnx files, by field."""

    def __init__(self, files):
        super().__init__(0)
        self._by_kind = {kind: [path.read_bytes() for path in files if path.suffix == f".{kind}"] for kind in RUNTIMES}
        self._kinds = [kind for kind, found in self._by_kind.items() if found]

    def mutant(self, seed):
        """Its kind and its bytes, always the same for a seed."""
        self._random = pick = random.Random(seed)
        kind = pick.choice(self._kinds)
        self._files = self._by_kind[kind]
        data, times = pick.choice(self._files), pick.choice((1, 1, 1, 2, 3, 4))
        if kind != "onnx" or pick.random() < 0.3:
            mutant = bytearray(data)
            for _ in range(times):
                pick.choice(self._bytes)(mutant)
            return kind, bytes(mutant)
        model = onnx.load_from_string(data)
        for _ in range(times):
            with contextlib.suppress(ValueError, TypeError):  # protocol buffers refuse the edit
                pick.choice(self._fields)(model.graph, model)
        return kind, model.SerializeToString()


class Tally:
    """The number of the mutant in progress, and the outcomes, in memory that the processes share."""

    def __init__(self):
        self._memory = mmap.mmap(-1, 4096)
        self.counts = np.frombuffer(self._memory, np.int64)
        self.crashes = Counter()

    @property
    def at(self):
        return int(self.counts[0])

    def report(self):
        found = {name: int(n) for name, n in zip(OUTCOMES, self.counts[1:], strict=False)}
        return found | {f"ends its process: {how}": n for how, n in sorted(self.crashes.items())}


def outcome(path, kind, devices):
    """What a runtime makes of a file: a place in OUTCOMES."""
    try:
        model = driver.load(path, form="file")
        validate(model)
    except (driver.ImportFailed, driver.DriverError, ValueError):
        return 0
    device = devices[kind]
    if not all(device.supported_operations(model)):
        return 1
    try:
        prepared = device.prepare(model, Preparation())
    except Exception:  # noqa: BLE001 (a refusal, whatever it is)
        return 1
    try:
        run_once(prepared, model)
    except Exception:  # noqa: BLE001
        return 2
    return 3


def work(mutator, devices, tally, options, last, folder):
    """Takes mutants until `last`. In a process of its own."""
    null = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(null, fd)
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    while tally.at < last:
        signal.alarm(SECONDS)
        kind, data = mutator.mutant(f"{options.seed} {tally.at}")
        path = folder / f"mutant.{kind}"
        path.write_bytes(data)
        tally.counts[1 + outcome(path, kind, devices)] += 1
        tally.counts[0] += 1


def bulk(mutator, devices, options, folder):
    """All mutants, in processes that are thrown away. The tally, and the numbers of those that ended theirs."""
    tally, crashed = Tally(), []
    while tally.at < options.count:
        last = min(options.count, tally.at + AT_ONCE)
        if not (pid := os.fork()):
            try:
                work(mutator, devices, tally, options, last, folder)
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code or tally.at < last:
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            tally.crashes[how] += 1
            crashed.append(tally.at)
            tally.counts[0] += 1
        if options.progress:
            print(tally.at, tally.report(), flush=True)
    return tally, crashed


class Neighbour:
    """Another client of each device, which checks its answers all the time."""

    def __init__(self, names, file):
        self.answers, self.wrong = 0, []
        self._model, self._names, self._stop = driver.load(file), names, threading.Event()
        self._thread = threading.Thread(target=self._use)
        self._thread.start()

    def _use(self):
        with contextlib.ExitStack() as stack:
            bursts = []
            for name in self._names:
                prepared = stack.enter_context(stack.enter_context(driver.connect(name)).prepare(self._model))
                bursts.append(stack.enter_context(prepared.burst(recover=True)))
            while not self._stop.is_set():
                for burst in bursts:
                    self._check(burst)

    def _check(self, burst):
        self.answers += 1
        x = np.full(4, self.answers % 1000, np.float32)
        try:
            if burst.run(x).outputs[0].tolist() != (-x).tolist():
                self.wrong.append("a wrong answer")
        except Exception as error:  # noqa: BLE001 (counted)
            self.wrong.append(repr(error))

    def stop(self):
        self._stop.set()
        self._thread.join()


class Bringer:
    """The client that brings mutants to devices."""

    def __init__(self, seed):
        self._random, self._devices = np.random.default_rng(seed), {}
        self.outcomes, self.engine_ends = Counter(), 0

    def bring(self, path):
        """Prepares and runs a mutant."""
        name = RUNTIMES[path.suffix[1:]]
        try:
            model = driver.load(path, form="file")
        except driver.ImportFailed:
            self.outcomes["no model"] += 1
            return
        device = self._devices.setdefault(name, driver.connect(name))
        try:
            with device.prepare(model) as prepared:
                self._run(prepared)
        except PeerDied:
            self.engine_ends += 1
            self._devices.pop(name).close()
            self.outcomes["ended the engine"] += 1
        except (StatusError, Timeout, ValueError, driver.DriverError) as error:
            is_trial = "quarantined on this device" in str(error)
            self.outcomes["quarantined after its trial" if is_trial else "an error"] += 1
        else:
            self.outcomes["runs"] += 1

    def _run(self, prepared):
        operands = [prepared.model.main.operands[i] for i in prepared.model.main.inputs]
        for size in (1, 2):
            shapes = [[d or size for d in operand.dimensions] for operand in operands]
            if sum(map(np.prod, shapes)) > 1e8:
                return
            prepared.run(*[self._of(s, o.type.dtype) for s, o in zip(shapes, operands, strict=True)], timeout=5.0)

    def _of(self, shape, dtype):
        if dtype.kind == "f":
            return self._random.standard_normal(shape).astype(dtype)
        return self._random.integers(0, 2, shape).astype(dtype)


def neighbours_file(folder):
    """-x, as an .onnx file."""
    ports = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "main", ports[:1], ports[1:])
    path = folder / "neighbour.onnx"
    path.write_bytes(onnx.helper.make_model(graph, ir_version=8).SerializeToString())
    return path


def through_devices(mutator, numbers, options, folder):
    """Brings these mutants to devices, beside another client. The bringer and the neighbour, when all is done."""
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as home:
        os.environ |= {"BURST_RUNTIME_DIR": f"{home}/run", "HOME": home}
        bringer, neighbour = Bringer(options.seed), Neighbour([RUNTIMES["onnx"]], neighbours_file(folder))
        try:
            for number in numbers:
                kind, data = mutator.mutant(f"{options.seed} {number}")
                path = folder / f"brought.{kind}"
                path.write_bytes(data)
                bringer.bring(path)
        finally:
            neighbour.stop()
    return bringer, neighbour


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--sample", type=int, default=100, help="mutants that go through a device besides those that crashed"
    )
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--progress", action="store_true")
    options = parser.parse_args()
    files = [p for p in sorted(options.folder.rglob("*")) if p.suffix[1:] in RUNTIMES and p.stat().st_size <= LARGEST]
    devices = {kind: device_class(name)(threads=1) for kind, name in RUNTIMES.items()}
    devices = {kind: device for kind, device in devices.items() if FILE in device.extensions}
    mutator = FileMutator([path for path in files if path.suffix[1:] in devices])
    folder = Path(tempfile.mkdtemp(prefix="mutants-", dir="/dev/shm"))
    try:
        tally, crashed = bulk(mutator, devices, options, folder)
        print(f"{tally.at} mutants of {len(files)} files: {tally.report()}", flush=True)
        for number in crashed if options.keep else ():
            kind, data = mutator.mutant(f"{options.seed} {number}")
            (options.keep / f"{options.seed}-{number}.{kind}").write_bytes(data)
        sample = random.Random(options.seed).sample(range(tally.at), min(options.sample, tally.at))
        bringer, neighbour = through_devices(mutator, [*crashed, *sample], options, folder)
    finally:
        shutil.rmtree(folder)
    print(f"{len(crashed) + len(sample)} of them through a device: {dict(bringer.outcomes)}")
    print(f"its other client: {neighbour.answers} answers, {len(neighbour.wrong)} wrong or lost {neighbour.wrong[:3]}")
    sys.exit(bool(neighbour.wrong))


if __name__ == "__main__":
    main()
