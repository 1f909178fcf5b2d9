"""A device that one account serves to a group, honest tenants of other accounts, and attackers; all real processes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import accounts
from attacks import ATTACKS
from silent_file import silent_file

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVERS, GROUP, HONEST, HOSTILE = 62000, 61910, 61102, 61103  # nobody's: numbers need no account
HERE = Path(__file__).parent
PATIENCE = 90.0  # seconds after which a tenant counts as stuck
LIMITS = "client_bytes = 268435456\ndevice_bytes = 1073741824\n"


class Stuck(AssertionError):
    """A process has not said anything for too long."""


class Talker:
    """A process that answers each line with a line."""

    def __init__(self, words: list[str], **options: Any) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}  # `select` sees no buffer of ours
        self.process = subprocess.Popen(words, cwd="/", start_new_session=True, **pipes, **options)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    def line(self, patience: float = PATIENCE) -> str:
        """The next line that it says; "" at its end. Raises Stuck."""
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], patience)[0]:
            raise Stuck(f"{self.process.args!r:.200} said nothing for {patience:g} s")
        return self.process.stdout.readline().decode()

    def tell(self, *words: object) -> None:
        """Says a line."""
        assert self.process.stdin
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        self.process.stdin.flush()

    def ask(self, *words: object, patience: float = PATIENCE) -> Any:
        """Says a line and reads the answer. Raises Stuck."""
        self.tell(*words)
        return json.loads(self.line(patience))

    def kill(self) -> None:
        """Ends it, and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, 9)
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Attacker(Talker):
    """Carries out an attack on a neighbourhood."""

    def __init__(self, hood: Neighbourhood, name: str, uid: int, **options: Any) -> None:
        self._stack, self.name = ExitStack(), name
        words = [sys.executable, str(HERE / "attacks.py"), name, hood.address]
        if "silent_file" in ATTACKS[name].needs:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="burst-h-"))
            Path(folder).chmod(0o755)
            words.append(str(self._stack.enter_context(silent_file(Path(folder)))))
        super().__init__(accounts.words_as(uid, (GROUP,), words), **options)

    def kill(self) -> None:
        """Ends it. What waits for its silent file gets an error then."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, 9)
        self._stack.close()  # first: a process cannot end while it closes a file that does not answer
        super().kill()


class Figures(NamedTuple):
    """What all processes of the device's account hold together."""

    descriptors: int
    mappings: int
    threads: int
    resident: int  #: bytes
    log: int  #: bytes


class Neighbourhood:
    """A device that is served to a group."""

    def __init__(self, folder: Path, address: str, process: subprocess.Popen[bytes], metrics: str) -> None:
        self.folder, self.address, self.process, self.metrics = folder, address, process, metrics
        self.uid = folder.stat().st_uid  #: the device's account, in which nothing else runs

    def tenant(self, uid: int = HONEST) -> Talker:
        """An honest client."""
        tenant = Talker(accounts.words_as(uid, (GROUP,), [sys.executable, str(HERE / "tenant.py"), self.address]))
        assert json.loads(tenant.line() or '"it ended"') == "ready"
        return tenant

    def attacker(self, name: str, uid: int = HOSTILE, **options: Any) -> Attacker:
        """Carries out an attack. It says "at work" after its first round, and what is refused."""
        return Attacker(self, name, uid, **options)

    @property
    def pids(self) -> list[int]:
        """Of all processes of the device's account."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == self.uid and Path(f"/proc/{name}/cmdline").read_bytes():
                    found.append(int(name))
        return found

    def figures(self) -> Figures:
        """What they hold now."""
        totals = [0, 0, 0, 0]
        for pid in self.pids:
            with suppress(OSError):
                root = Path(f"/proc/{pid}")
                found = [
                    len(os.listdir(root / "fd")),
                    (root / "maps").read_bytes().count(b"\n"),
                    len(os.listdir(root / "task")),
                    int((root / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
                ]
                totals = [sum(pair) for pair in zip(totals, found, strict=True)]
        return Figures(*totals, self.log_bytes())

    def log_bytes(self) -> int:
        """Of all its logs."""
        return (
            sum(path.stat().st_size for path in (self.folder / "run").glob("*.log*"))
            + (self.folder / "log").stat().st_size
        )

    def log_end(self) -> str:
        """The end of its logs."""
        paths = [self.folder / "log", *(self.folder / "run").glob("*.log*")]
        return "\n".join(f"{path.name}: …{path.read_text(errors='replace')[-2000:]}" for path in paths)


@contextmanager
def neighbourhood(device: str = "reference", limits: str = LIMITS) -> Iterator[Neighbourhood]:
    """`burst serve DEVICE --group` under an account of its own."""
    with ExitStack() as stack:
        name = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="burst-h-", dir="/tmp", ignore_cleanup_errors=True)
        )
        folder = Path(name)
        folder.chmod(0o755)
        (folder / ".config/burst").mkdir(parents=True)
        (folder / ".config/burst/limits.toml").write_text(limits)
        uid = SERVERS + os.getpid() % 8192
        os.chown(folder, uid, uid)
        words = [sys.executable, "-m", "driver.cli", "serve", device, "--dir", f"{folder}/run", "--group", str(GROUP)]
        metrics = f"{folder}/metrics.sock"
        log = stack.enter_context(open(folder / "log", "ab"))
        environment = os.environ | {"HOME": str(folder)}
        words += ["--metrics", metrics]
        process = stack.enter_context(
            subprocess.Popen(
                accounts.words_as(uid, (GROUP,), words),
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        )
        stack.callback(process.kill)
        assert process.stdout
        said = process.stdout.readline().decode()
        assert said.startswith(f"{device} is served at "), (folder / "log").read_text()
        found = Neighbourhood(folder, said.split()[-1], process, metrics)
        yield found
