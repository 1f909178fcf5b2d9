"""`burst serve --group --uids subuids`: an account without privileges gives cells its subordinate uids."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import accounts as other_accounts
import pytest
from served_devices import CONNECT, FRIEND, GROUP, OTHER, SERVER, folder, served
from waiting import PATIENCE

import driver
from driver.doctor import engine_uids
from driver.engine import sandbox
from driver.errors import DeviceFailed
from driver.service import subordinate_uids
from driver.service.cell_uids import CellUids, uids_in
from driver.service.subordinate_uids import MapWriter

FIRST, LAST = 2100100256, 2100100511
UIDS = "--group", GROUP, "--uids", "subuids"
PIDS = "out = device.service_pid, device.engine_pid"
TABLES = {
    "passwd": f"root:x:0:0::/root:/bin/sh\nburst:x:{SERVER}:{SERVER}::{{home}}:/bin/sh\n",
    "subuid": "burst:2100100000:512\n",
    "subgid": "burst:2100100000:512\n",
}
WITH_TABLES = 'for t in passwd subuid subgid; do mount --bind "$0/etc/$t" /etc/$t || exit; done; exec "$@"'
needs_commands = pytest.mark.skipif(not shutil.which("newuidmap"), reason="newuidmap (package uidmap) is missing")


def status(pid):
    return dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())


def as_account(path):
    """The command that runs another one as that account, with tables in `path` in the place of the machine's."""
    (path / "etc").mkdir(exist_ok=True)
    for name, text in TABLES.items():
        (path / "etc" / name).write_text(text.format(home=path))
        Path("/etc", name).touch()
    tables = "/usr/bin/unshare", "--mount", "/bin/sh", "-c", WITH_TABLES, str(path)
    return *tables, "/usr/bin/setpriv", f"--reuid={SERVER}", f"--regid={SERVER}", f"--groups={GROUP}"


@contextlib.contextmanager
def ordinary(limits=""):
    """`burst serve --uids subuids` of an account without privileges: the path of its socket, and its process."""
    with folder() as path:
        os.chown(path, SERVER, SERVER)
        (path / ".config/burst").mkdir(parents=True)
        (path / ".config/burst/limits.toml").write_text(limits)
        for place in (path / ".config", path / ".config/burst"):
            os.chown(place, SERVER, SERVER)
        with served(path / "run", *UIDS, account=(0, GROUP), under=as_account(path)) as process:
            yield str(path / "run/reference.sock"), process


@pytest.fixture(scope="module")
def broker(accounts):
    """Such a device."""
    with ordinary("client_bursts = 1\n") as found:
        yield found


@needs_commands
@pytest.mark.integration
def test_each_cell_has_a_subordinate_uid(members, broker):
    """Both processes of a cell have one of the last numbers of the tables as uid and gid, in a namespace where no other
    one exists, and no other group; nothing of the device has a capability, the broker neither.
    """
    for client, uid in zip(members, (FIRST, FIRST + 1), strict=True):
        assert client.do("out = prepared.run(X)[0].tolist()") == [[2.0] * 4]
        for pid in client.do(PIDS):
            found = status(pid)
            assert (found["Uid"].split(), found["Gid"].split()) == ([str(uid)] * 4, [str(uid)] * 4)
            assert (found["Groups"].split(), int(found["CapPrm"], 16)) == ([], 0)
            for table in ("uid_map", "gid_map"):
                assert Path(f"/proc/{pid}/{table}").read_text().split() == [str(uid), str(uid), "1"]
        assert all(all(layers.values()) for layers in client.do("out = device.stats()['sandbox']").values())
    with driver.connect(broker[0]) as own:
        for pid in (own.service_pid, own.engine_pid, broker[1].pid):
            assert (status(pid)["Uid"].split(), int(status(pid)["CapPrm"], 16)) == ([str(SERVER)] * 4, 0)


@needs_commands
@pytest.mark.integration
def test_accounts_are_themselves(members, broker):
    """A cell knows whose its clients are, though their numbers do not exist in its namespace: figures name the account,
    limits of the device's account hold, and it may have its engine renewed.
    """
    for client, uid in zip(members, (FRIEND, OTHER), strict=True):
        rows = "from driver.monitor import accounts_of", "out = sorted({row.uid for row in accounts_of(ask)})"
        assert client.do("ask = device.connection.call", *rows) == [uid]
        assert client.do("out = device.connection.call('renew', 'a test')[0][1]") == "asked"
        assert client.do("out = prepared.run(X)[0].tolist()") == [[2.0] * 4]
    said = members[0].do("bursts = [prepared.burst() for _ in range(2)]")
    assert said.startswith("ResourceExhaustedTransient: the limit client_bursts = 1 is reached")


ATTACKS = """
import os, sys
for pid in map(int, sys.argv[1:]):
    for name, attack in {
        "signal": lambda: os.kill(pid, 0),
        "slow down": lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        "read the memory": lambda: open(f"/proc/{pid}/mem", "rb"),
        "enter its namespace": lambda: os.listdir(f"/proc/{pid}/ns") and os.readlink(f"/proc/{pid}/ns/user"),
    }.items():
        try:
            attack()
            print(name, pid)
        except PermissionError:
            pass
"""


@needs_commands
@pytest.mark.integration
def test_the_kernel_keeps_cells_apart_without_their_sandboxes(members, broker):
    """A process with the uid of one cell and no confinement acts on no other cell, nor on the device's account."""
    other = members[1].do(PIDS)
    with driver.connect(broker[0]) as own:
        others = *other, broker[1].pid, own.engine_pid, own.service_pid
    words = other_accounts.python_as(FIRST, (), ATTACKS, *others)
    assert subprocess.check_output(words, cwd="/", text=True) == ""


@needs_commands
@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_broker_that_ends_leaves_no_process(accounts, process, number):
    """Nothing of another uid outlives a broker without privileges, nor does what has maps written for it."""
    with ordinary() as (address, broker):
        assert accounts[0].do(CONNECT.format(address)) is None
        pids = [
            *accounts[0].do(PIDS),
            *map(int, Path(f"/proc/{broker.pid}/task/{broker.pid}/children").read_text().split()),
        ]
        left = [process(pid) for pid in pids]
        broker.send_signal(number)
        broker.wait(PATIENCE)
        assert all(each.has_ended() for each in left)
        assert accounts[0].do("device.close()") is None


WRITES = f"""
import os, sys
from driver.service import subordinate_uids
from driver.service.subordinate_uids import MapWriter
uids = subordinate_uids.own_uids()
print(uids, subordinate_uids.absence() == "")
with MapWriter(uids) as writer:
    for asked in (range({FIRST} - 1, {FIRST}), range({LAST}, {LAST} + 2), range(0, 1)):
        try:
            writer.within(asked, lambda: print("written"))
        except OSError as error:
            print(type(error).__name__, error)
    def try_others():
        for uid in (0, {SERVER}, {FIRST} + 1, {FIRST}):
            try:
                os.setresuid(uid, uid, uid)
                print("became", uid, flush=True)
            except OSError:
                pass
    writer.within(range({FIRST}, {FIRST} + 1), try_others)
"""


@needs_commands
@pytest.mark.integration
def test_no_map_has_other_numbers(accounts):
    """What has maps written takes no numbers but those of the range, and in a namespace no other one can be taken."""
    with folder() as path:
        words = [*as_account(path), sys.executable, "-c", WRITES]
        said = subprocess.check_output(other_accounts.words_as(0, (GROUP,), words), cwd="/", text=True).splitlines()
    assert said[0] == f"range({FIRST}, {LAST + 1}) True"
    assert [re.sub(r"\D*are not all in.*", "", line) for line in said[1:4]] == [
        f"PermissionError {FIRST - 1} and the next 1",
        f"PermissionError {LAST} and the next 2",
        "PermissionError 0 and the next 1",
    ]
    assert said[-1] == f"became {FIRST}"
    assert sum(line.startswith("became") for line in said) == 1


def test_what_is_missing_is_told(monkeypatch, tmp_path):
    """Without the commands, or without numbers in both tables, the option is refused with the remedy."""
    monkeypatch.setattr(subordinate_uids, "TABLES", (tmp_path / "subuid", tmp_path / "subgid"))
    monkeypatch.setattr(subordinate_uids.shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(DeviceFailed, match=f"give uid {os.getuid()} no numbers: usermod --add-subuids"):
        uids_in("subuids")
    (tmp_path / "subuid").write_text(f"{os.getuid()}:300000:65536\nodd\n")
    with pytest.raises(DeviceFailed, match=r"give uid \d+ no numbers"):
        CellUids.prepare("subuids")
    (tmp_path / "subgid").write_text(f"{os.getuid()}:330000:65536\n")
    assert uids_in("subuids") == range(365536 - 256, 365536)
    monkeypatch.setattr(subordinate_uids.shutil, "which", lambda _: None)
    with pytest.raises(DeviceFailed, match="no newuidmap and no newgidmap: install the package uidmap"):
        CellUids.prepare("subuids")


@pytest.mark.parametrize(
    ("may", "absence", "systemd", "words"),
    [
        (True, "x", False, "--uids FIRST-LAST"),
        (False, "", False, "--uids subuids"),
        (False, "x", True, "--unit --uids"),
        (False, "there is no newuidmap", False, "no way, .*: there is no newuidmap"),
    ],
)
def test_the_doctor_says_which_way_there_is(monkeypatch, tmp_path, may, absence, systemd, words):
    """`burst doctor` names each way by which engines get uids of their own, or what is missing for one."""
    monkeypatch.setattr(sandbox, "has_capabilities", lambda _: may)
    monkeypatch.setattr(subordinate_uids, "absence", lambda: absence)
    monkeypatch.setattr(engine_uids, "SYSTEMD", tmp_path if systemd else tmp_path / "none")
    (found,) = engine_uids.ways()
    assert re.search(words, found.found)


def test_a_map_writer_ends():
    """It is reaped with its last user."""
    with MapWriter(range(FIRST, LAST + 1)) as writer:
        pid = writer.pid
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)
