"""A file system whose one file answers neither reads nor the close of a descriptor: what a broken server looks like.

    python silent_file.py FOLDER READ FLUSH

mounts it (root alone can), prints "mounted", and serves it until its stdin ends. FOLDER/file may be opened by all.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER = struct.Struct("IIQQIIII")  # linux/fuse.h: length, opcode, unique, node, uid, gid, pid, padding
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _WRITE, _STATFS, _RELEASE, _FLUSH = 1, 2, 3, 14, 15, 16, 17, 18, 25
_INIT, _OPENDIR, _RELEASEDIR, _BATCH_FORGET = 26, 27, 29, 42
_NO_SYSTEM_CALL, _NO_ENTRY = -38, -2
_SILENT = {"READ": _READ, "WRITE": _WRITE, "FLUSH": _FLUSH, "STATFS": _STATFS, "GETATTR": _GETATTR}
_USUAL = "READ", "WRITE", "FLUSH"
_PATIENCE = 20.0  # seconds
_ROOT, _FILE, _BYTES = 1, 2, 1 << 20
_HOURS = 1 << 20  # seconds for which the kernel believes what it was told
_DETACH = 2


def _attributes(node: int) -> bytes:
    mode, size = (0o40755, 0) if node == _ROOT else (0o100666, _BYTES)
    return struct.pack("QQQQQQIIIIIIIIII", node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _answer(opcode: int, node: int, body: bytes) -> bytes | int:
    """What the kernel gets."""
    if opcode == _INIT:
        return struct.pack("IIIIHHIIHHIIII", 7, 31, 0, 0, 0, 0, 4096, 1, 0, 0, 0, 0, 0, 0) + bytes(16)
    if opcode == _LOOKUP:
        entry = struct.pack("QQQQII", _FILE, 0, _HOURS, _HOURS, 0, 0) + _attributes(_FILE)
        return entry if body.rstrip(b"\0") == b"file" else _NO_ENTRY
    if opcode == _GETATTR:
        return struct.pack("QII", _HOURS, 0, 0) + _attributes(node)
    if opcode in (_OPEN, _OPENDIR):
        return struct.pack("QII", 0, 0, 0)
    if opcode in (_RELEASE, _RELEASEDIR):
        return b""
    return _NO_SYSTEM_CALL


def serve(fd: int, silent: dict[int, str]) -> None:
    """Answers until standard input ends; says what it leaves unanswered."""
    while 0 not in (ready := select.select([fd, 0], [], [])[0]):
        assert ready == [fd]
        raw = os.read(fd, 1 << 20)
        _, opcode, unique, node, *_ = _HEADER.unpack_from(raw)
        if opcode in (_FORGET, _BATCH_FORGET):
            continue
        if opcode in silent:
            with suppress(BlockingIOError):  # it is not read
                os.write(1, silent[opcode].encode() + b"\n")
        else:
            found = _answer(opcode, node, raw[_HEADER.size :])
            error, data = (found, b"") if isinstance(found, int) else (0, found)
            os.write(fd, struct.pack("IiQ", 16 + len(data), error, unique) + data)


def _libc(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def main() -> None:
    """Mounts and serves."""
    folder = sys.argv[1].encode()
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    _libc("mount", b"silent", folder, b"fuse.silent", 0, options)
    print("mounted", flush=True)  # who opens the file waits for the answer to INIT
    os.set_blocking(1, False)
    serve(fd, {_SILENT[name]: name for name in sys.argv[2:]})


class NoSilentFile(Exception):
    """The machine mounts no such file."""


class SilentFile(PosixPath):
    """The path of such a file."""

    server: subprocess.Popen[bytes]

    def await_asked(self, what: str) -> None:
        """Waits until a process waits for that."""
        assert self.server.stdout
        said = ""
        while what not in said.split():
            assert select.select([self.server.stdout], [], [], _PATIENCE)[0], f"no process waits for {what}"
            said += os.read(self.server.stdout.fileno(), 1 << 10).decode()


@contextmanager
def silent_file(folder: Path, *unanswered: str) -> Iterator[SilentFile]:
    """The path of such a file, and the end of all waits for it. Who opens it cannot close it until then.

    unanswered: names of `_SILENT`. None given: reads, writes, and FLUSH, which closing a descriptor asks for.
    Raises NoSilentFile.
    """
    words = [sys.executable, __file__, str(folder), *(unanswered or _USUAL)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, bufsize=0, **pipes) as server:
        if server.stdout.readline() != b"mounted\n":
            raise NoSilentFile(f"no FUSE file system can be mounted: {server.stderr.read().decode()[-300:]}")
        try:
            path = SilentFile(folder / "file")
            path.server = server
            yield path
        finally:
            server.stdin.close()
            server.wait()  # which ends all waits for the file
            _libc("umount2", bytes(folder), _DETACH)


if __name__ == "__main__":
    main()
