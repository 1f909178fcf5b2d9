"""Gives a parser one hostile input after the other, guided by coverage if there is atheris, and says what became of it.

    python fuzz_parsers.py request2 --seconds 60            # guided by coverage; needs the extra `fuzz`
    python fuzz_parsers.py request2 --inputs 1000000        # as many, or for 60 s
    python fuzz_parsers.py request2 --seconds 5 --plain     # the same mutations and checks, without coverage

What is claimed of every input: within 5 s it is refused with the documented error, or it is the encoding of the value
that comes out, and that value keeps the rules of the format. No input takes more memory than ROOM, none leaves a file
descriptor behind, and all together leave no more memory than GROWTH behind. An input that breaks one of these ends the
program with exit status other than 0, the input in hex and a traceback.
"""

import argparse
import faulthandler
import functools
import inspect
import os
import random
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import msgpack

sys.path.insert(0, str(Path(__file__).parent))

import wire_oracle
from mutator import MessageMutator, PacketMutator
from wire_packets import DIRECTIONS, GOLDEN, SHAPED, U32, U64, outcome_of

import fmq
from burst import (
    GeneralFailure,
    InvalidArgument,
    Malformed,
    Memory,
    ResourceExhaustedTransient,
    channel,
    memory,
    server,
    wire,
)
from burst.channel import MAX_BYTES, Message

MIB = 2**20
ROOM, GROWTH = 256 * MIB, 48 * MIB  # the second has to hold the fuzzer's own corpus, too
MOST_BYTES = 960  # of an input: 40 elements; lists in lists are not too deep for repr then
PATIENCE = 5  # seconds for an input; libFuzzer needs up to half as much again
WARM_UP = 2**14  # inputs, before memory is looked at


# ---- the parsers -----------------------------------------------------------------------------------------------------


class Packets:
    """decode_request or decode_result of one version, and the same of the oracle, which is what coverage guides by."""

    modules = (wire_oracle,)

    def __init__(self, direction, seed):
        self.name, self._direction = str(direction), direction
        self.seeds = [golden.data for golden in GOLDEN if golden.direction == direction]
        self.mutate = PacketMutator(direction, seed)
        self._decode = direction.by_oracle[1]

    def check(self, data):
        """Whether it was accepted."""
        direction = self._direction
        due = outcome_of(self._decode, data, direction.version)
        packet = outcome_of(direction.decode, data)
        assert packet == due, f"C says {packet}, and the oracle {due}"
        if isinstance(packet, str):
            return False
        assert direction.encode(packet) == data, "accepted, but not canonical"
        (check_request if direction.kind == "request" else check_result)(packet, direction.version)
        return True


def check_request(packet, version):
    """The rules of the table, apart from those of the decoder."""
    for argument in (*packet.inputs, *packet.outputs):
        assert isinstance(argument.has_no_value, bool)
        if argument.has_no_value:
            assert argument == (True, 0, 0, 0, ()), "an omitted argument that lies somewhere"
        else:
            assert argument.pool < len(packet.slots), "an argument in no pool"
    for slot in packet.slots:
        if isinstance(slot, wire.Token):
            assert version > 1, "a token in version 1"
            assert 0 < slot.token <= U32, "token out of range"
        else:
            assert 0 <= slot < 2**31, "slot out of range"
    assert isinstance(packet.measure, bool)
    assert (packet.id > 0) == (version > 1), "a request without an id"
    assert version > 1 or packet.deadline is packet.loop_timeout is None, "times in version 1"


def check_result(packet, version):
    """The rules of the table, apart from those of the decoder."""
    assert 0 <= packet.status <= (4 if version == 1 else 8), "status out of range"
    assert not packet.output_shapes or packet.status in SHAPED, "shapes with an error"
    times = [time for time in packet.timing if time is not None]
    assert not times or packet.status == 0, "times with an error"
    assert all(a <= b < U64 for a, b in zip(times, times[1:] or times, strict=False)), "times in the wrong order"
    assert packet.id == 0 or version > 1, "an id in version 1"


class Memories:
    """What a client answers when a device asks for the memory behind slots."""

    name = "memories"
    modules = (channel, memory, server)

    def __init__(self, seed):
        bodies = [
            [0, [["ashmem", 200, True]]],  # of the lengths with which these two are accepted
            [0, [["ashmem", 64, True], ["mmap_fd", 64, 3, 0]]],
            [4, "no such slot"],
            [0, []],
            [[0]],
        ]
        self.seeds = [msgpack.packb(body) for body in bodies]
        self.mutate = MessageMutator(seed)
        self._memory = Memory.create(4096)
        assert [self.check(seed) for seed in self.seeds] == [True, True, False, False, False]

    def check(self, data):
        """Whether it was accepted. One or two descriptors come with it, as was asked for or not."""
        expected = 1 + len(data) % 2
        message = Message(data, [os.dup(self._memory.fd) for _ in range(1 + len(data) % 3 % 2)])
        try:
            found = server._memories(message, expected, Memory.from_wire)
        except (Malformed, GeneralFailure, InvalidArgument, ResourceExhaustedTransient):
            return False
        finally:
            message.close()
        assert len(found) == expected
        assert all(0 < one.nbytes <= self._memory.nbytes for one in found), "memory that is not there"
        return True


class Descriptors:
    """A queue's descriptor, and the queue behind it."""

    name = "descriptors"
    modules = (channel, fmq.descriptor, fmq.geometry)

    def __init__(self, seed):
        self._queue = fmq.MessageQueue.create([("seq", "u8"), ("data", "f4", (3,))], 100)
        plain, _ = self._queue.descriptor.to_wire()
        self.seeds = [
            msgpack.packb([*plain[:1], text, flavour, plain[3]])
            for text in (plain[1], "'<u4'", "[('a', '|V3'), ('b', '<f8', (2, 2))]")
            for flavour in (1, 2)
        ]
        self.mutate = MessageMutator(seed)

    def check(self, data):
        """Whether it was accepted, if only for now: the memory may hold another queue."""
        try:
            plain = Message(data, []).body
        except Malformed:
            return False
        fds = [os.dup(self._queue.descriptor.fds[0]) for _ in range(1 + (len(data) % 8 == 0))]
        try:
            made = fmq.Descriptor.from_wire(plain, fds)
        except fmq.InvalidDescriptor:
            return False
        assert made.to_wire() == (plain, fds), "accepted, but not canonical"
        assert not made.dtype.hasobject
        try:
            made.attach()
        except fmq.InvalidDescriptor:
            pass
        else:
            assert (made.dtype, made.capacity) == (self._queue.dtype, self._queue.capacity)
        return True


TARGETS = {str(direction): functools.partial(Packets, direction) for direction in DIRECTIONS}
TARGETS |= {"memories": Memories, "descriptors": Descriptors}


# ---- running them ----------------------------------------------------------------------------------------------------


class Run:
    """Called with an input; ends the program after so many, or when its time is over."""

    def __init__(self, target, inputs, seconds):
        self._target, self._inputs = target, inputs
        self._begin, self._seconds = time.monotonic(), seconds
        self.count = self.accepted = 0
        self._descriptors = self._memory = 0
        limit = _virtual_bytes() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))  # so that MemoryError names the input that asks for it

    def __call__(self, data):
        self.count += 1
        try:
            accepted = self._target.check(data)
            self.accepted += accepted
        except BaseException:
            print(f"{self._target.name}: after {self.count} inputs, found {data.hex()}", flush=True)
            raise
        if not self.count % 256:
            faulthandler.dump_traceback_later(3 * PATIENCE, exit=True)
            self._look()
        return accepted

    def _look(self):
        is_over = self.count >= self._inputs or time.monotonic() - self._begin >= self._seconds
        if self.count == WARM_UP:
            self._memory, self._descriptors = _resident_bytes(), _open_descriptors()
        elif self._memory and (is_over or not self.count % 2**16):
            assert _open_descriptors() <= self._descriptors + 4, "file descriptors are left behind"
            assert _resident_bytes() - self._memory < GROWTH, "memory is left behind"
        if is_over:
            self._finish()

    def _finish(self):
        """The fuzzer ends the process without a last word, so this is it."""
        seconds = time.monotonic() - self._begin
        growth = (_resident_bytes() - self._memory) / MIB if self._memory else 0.0
        print(
            f"{self._target.name}: {self.count} inputs in {seconds:.1f} s, {self.count / seconds:.0f}/s, "
            f"{self.accepted} accepted, {growth:+.1f} MiB",
            flush=True,
        )
        os._exit(0)


def _virtual_bytes():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def run_plain(run, target, rng):
    """Mutations of seeds and of what was accepted, for ever."""
    pool = list(target.seeds)
    for data in target.seeds:
        run(data)
    while True:
        data = target.mutate(pool[int(rng.random() * len(pool))])
        if run(data) and len(data) <= MOST_BYTES:
            if len(pool) < 512:
                pool.append(data)
            else:
                pool[int(rng.random() * len(pool))] = data


def functions_of(module):
    """All that are defined in the module, out of their wrappers."""
    owners = [module, *(thing for _, thing in inspect.getmembers(module, inspect.isclass))]
    for owner in owners:
        for thing in vars(owner).values():
            inner = thing.fget if isinstance(thing, property) else getattr(thing, "__func__", thing)
            inner = inspect.unwrap(inner) if callable(inner) else inner
            if inspect.isfunction(inner) and inner.__code__.co_filename == module.__file__:
                yield inner


def run_guided(run, target, seed, folder):
    """As libFuzzer sees fit: half of the mutations are its own, which know what the parser compares."""
    import atheris

    for function in {one for module in target.modules for one in functions_of(module)}:
        atheris.instrument_func(function)
    rng = random.Random(seed)

    def mutate(data, most, _):
        return target.mutate(data)[:most] if rng.random() < 0.5 else atheris.Mutate(data, most)

    corpus = folder / f"{target.name}.corpus"
    corpus.mkdir(exist_ok=True)
    for i, data in enumerate(target.seeds):
        (corpus / f"seed{i}").write_bytes(data)
    options = [f"-seed={seed}", f"-max_len={MOST_BYTES}", "-len_control=0", f"-timeout={PATIENCE}", "-mutate_depth=2"]
    # A function may return anything but None here only if it is bad.
    arguments = [sys.argv[0], str(corpus), *options, f"-artifact_prefix={folder}/"]
    atheris.Setup(arguments, lambda data: run(data) and None, custom_mutator=mutate)
    atheris.Fuzz()


# ---- for tests -------------------------------------------------------------------------------------------------------


def spawn(program, target, *options, prefix=(), patience=30.0):
    """Exit status and output of such a program in a process of its own."""
    command = [sys.executable, *prefix, program, target, *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=patience, check=False)
    return done.returncode, done.stdout + done.stderr


def finds_nothing(program, target, *options, patience=30.0):
    """How many inputs the parser was given, how many it accepted, what was said of it, and all that was said."""
    status, out = spawn(program, target, *options, patience=patience)
    assert status == 0, out[-8000:]
    said = re.search(rf"^{target}: (\d+) inputs .* (\d+) accepted.*", out, re.MULTILINE)
    assert said, out[-8000:]
    return int(said[1]), int(said[2]), said[0], out


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--inputs", type=int, default=2**62)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for the corpus, and for what was found")
    parser.add_argument("--plain", action="store_true", help="without coverage")
    options = parser.parse_args()
    target = TARGETS[options.target](seed=options.seed)
    assert all(len(data) <= MAX_BYTES for data in target.seeds)
    run = Run(target, options.inputs, options.seconds)
    if options.plain:
        run_plain(run, target, random.Random(options.seed))
    run_guided(run, target, options.seed, options.folder)


if __name__ == "__main__":
    main()
