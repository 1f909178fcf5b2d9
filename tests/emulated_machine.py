"""An emulated machine for aarch64, whose kernel has what qemu's user mode lacks: robust lists and futex_waitv.

    python tests/emulated_machine.py INIT PROGRAM [ARGUMENT …]

It prints what the program prints, and ends with its exit status.
"""

import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-system-aarch64"
KERNEL = Path("/usr/lib/debian-installer/images/12/arm64/text/debian-installer/arm64/linux")
OPTIONS = "-machine virt -cpu cortex-a72 -smp 2 -m 2048 -nographic -no-reboot -nic none"
INIT = Path(__file__).parent / "csrc/machine_init.c"


def absence():
    """What this machine lacks to emulate another, with the remedy, or None."""
    if shutil.which(COMPILER) and shutil.which(EMULATOR) and KERNEL.exists():
        return None
    return (
        f"no '{COMPILER}', '{EMULATOR}' or '{KERNEL}'; install them (Debian: apt install gcc-aarch64-linux-gnu "
        "libc6-dev-arm64-cross qemu-system-arm debian-installer-12-netboot-arm64)"
    )


def compiled_init(folder):
    """The machine's first process."""
    subprocess.run([COMPILER, "-static", "-O1", "-Wall", "-o", folder / "init", INIT], check=True)
    return folder / "init"


def archive(files):
    """A cpio archive, as the kernel unpacks it at its start, of name -> a path here, or bytes of an executable file."""
    parts = []
    for number, (name, found) in enumerate([*files.items(), ("TRAILER!!!", b"")], 1):
        mode, data = 0o100755, found
        if isinstance(found, Path):
            mode = found.lstat().st_mode
            links = stat.S_ISLNK(mode)
            data = str(found.readlink()).encode() if links else b"" if found.is_dir() else found.read_bytes()
        fields = number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0
        head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
        parts += [head, bytes(-len(head) % 4), data, bytes(-len(data) % 4)]
    return b"".join(parts)


def run(init, root, *command, timeout):
    """Runs a program on a copy of the folder `root`: its exit status, and what it printed. 125: it never ended."""
    folders = dict.fromkeys(("dev", "proc", "tmp"), root)
    inside = {str(path.relative_to(root)): path for path in sorted(root.rglob("*"))}
    arguments = b"".join(f"{one}\0".encode() for one in command)
    with tempfile.NamedTemporaryFile() as initial:
        initial.write(archive({**folders, **inside, "init": init.read_bytes(), "arguments": arguments}))
        initial.flush()
        machine = [EMULATOR, *OPTIONS.split(), "-kernel", KERNEL, "-initrd", initial.name]
        machine += ["-append", "console=ttyAMA0 quiet panic=-1"]
        how = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": timeout}
        try:
            done = subprocess.run(machine, check=False, **how)
        except subprocess.TimeoutExpired as late:
            return 125, f"no end after {timeout} s: {(late.stdout or b'').decode(errors='replace')}"
    said, _, end = done.stdout.replace("\r", "").rpartition("exit status ")
    status = re.match(r"\d+\n", end)
    return (int(status[0]), said) if status else (125, done.stdout + done.stderr)


def main(init, program, *arguments):
    """Runs a program without a file system beside it."""
    with tempfile.TemporaryDirectory() as root:
        shutil.copy(program, Path(root, "program"))
        status, said = run(Path(init), Path(root), "/program", *arguments, timeout=800)  # less than a test waits for it
    print(said)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
