"""Processes of other accounts, which read the interpreter and the checkout whatever folders above them are closed.

    python accounts.py UID GID,GID… WORD…

becomes that command, under that account. In a mount namespace of its own, each closed folder above what Python
needs is replaced by an open one that holds nothing else. Only root can do that.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_NEW_NAMESPACE, _BIND, _PRIVATE = 0x20000, 0x1000, 0x44000  # CLONE_NEWNS, MS_BIND, MS_REC | MS_PRIVATE


def words_as(uid: int, groups: tuple[int, ...], words: list[str]) -> list[str]:
    """The command that runs `words` under the account `uid`, whose own group has the same number."""
    return [sys.executable, "-I", "-S", __file__, str(uid), ",".join(map(str, (uid, *groups))), *words]


def python_as(uid: int, groups: tuple[int, ...], code: str, *arguments: object) -> list[str]:
    """The same for a Python program."""
    return words_as(uid, groups, [sys.executable, "-c", code, *map(str, arguments)])


@cache
def missing() -> str:
    """Why no process of another account can be started here; "": it can."""
    if os.geteuid():
        return "only root can start processes of other accounts"
    done = subprocess.run(python_as(65534, (), "import driver"), cwd="/", capture_output=True, text=True, check=False)
    return done.stderr and f"another account cannot run {sys.executable}: {done.stderr}"


def _libc(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _is_closed(folder: Path) -> bool:
    return folder.is_dir() and not folder.stat().st_mode & 0o001


def _behind(path: Path) -> tuple[Path, list[Path]] | None:
    """The topmost closed folder on the way to a path, and what is needed below it."""
    for folder in reversed((path, *path.parents)):
        if _is_closed(folder):
            return folder, [path] if folder != path else list(path.iterdir())
    return None


def _open_the_way() -> None:
    needed = {Path(sys.executable).resolve().parents[1], Path(sys.base_prefix), Path(sys.prefix), ROOT}
    closed: dict[Path, list[Path]] = {}
    for path in sorted(needed):
        if found := _behind(path):
            closed.setdefault(found[0], []).extend(found[1])
    if not closed:
        return
    _libc("unshare", _NEW_NAMESPACE)
    _libc("mount", b"none", b"/", None, _PRIVATE, None)
    for folder, paths in closed.items():
        held = {path: os.open(path, os.O_PATH) for path in paths}
        _libc("mount", b"open", bytes(folder), b"tmpfs", 0, b"mode=755")
        for path, fd in held.items():
            if path.is_dir() or path.exists():
                continue  # part of another one
            if os.path.isdir(f"/proc/self/fd/{fd}"):
                path.mkdir(parents=True)
            else:
                path.touch()
            _libc("mount", f"/proc/self/fd/{fd}".encode(), bytes(path), None, _BIND, None)
            os.close(fd)


def main() -> None:
    """Becomes the command."""
    uid, groups, words = int(sys.argv[1]), [int(group) for group in sys.argv[2].split(",")], sys.argv[3:]
    os.umask(0o022)
    _open_the_way()
    os.setgroups(groups)
    os.setresgid(groups[0], groups[0], groups[0])
    os.setresuid(uid, uid, uid)
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
