"""`burst serve --group --uids`: the cell of each other account has a uid of its own."""

import contextlib
import grp
import json
import os
import pwd
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import accounts as other_accounts
import pytest
from click.testing import CliRunner
from served_devices import CONNECT, FRIEND, GROUP, OTHER, SERVER, Client, folder, foreign, served, with_capabilities
from waiting import PATIENCE
from worded_files import FILER

import driver
from driver.cli.command import burst as command
from driver.doctor import running
from driver.errors import DeviceFailed
from driver.service import cell_configuration, cell_uids, subordinate_uids
from driver.service.cell_uids import CellUids, uids_in

FIRST, SECOND, LAST = 2100000000, 2100000001, 2100000008
UIDS = "--group", GROUP, "--uids", f"{FIRST}-{LAST}"
NEEDED = "setuid", "setgid", "kill"
HELPERS = str(Path(__file__).parents[1])
PIDS = "out = device.service_pid, device.engine_pid"


@pytest.fixture(scope="module")
def broker(accounts):
    """Such a device, under an account with the three capabilities: the path of its socket, and its first process."""
    with foreign(*UIDS, capabilities=NEEDED, limits="client_bursts = 1\n") as found:
        yield found


def status(pid):
    return dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())


def homes(address):
    return Path(address).parents[1] / ".local/state/burst-cells"


@pytest.mark.integration
def test_each_cell_has_a_uid_of_its_own(members, broker):
    """Both processes of a cell have one uid and gid of the range, no other group and no capability; the broker and the
    cell of the device's own account have that account's, and the broker the three capabilities that it needs.
    """
    for client, uid in zip(members, (FIRST, SECOND), strict=True):
        assert client.do("out = prepared.run(X)[0].tolist()") == [[2.0] * 4]
        for pid in client.do(PIDS):
            found = status(pid)
            assert (found["Uid"].split(), found["Gid"].split()) == ([str(uid)] * 4, [str(uid)] * 4)
            assert (found["Groups"].split(), int(found["CapPrm"], 16), int(found["CapInh"], 16)) == ([], 0, 0)
        assert all(all(layers.values()) for layers in client.do("out = device.stats()['sandbox']").values())
    with driver.connect(broker[0]) as own:
        for pid in (own.service_pid, own.engine_pid, broker[1].pid):
            assert status(pid)["Uid"].split() == [str(SERVER)] * 4
        assert [int(status(pid)["CapPrm"], 16) for pid in (own.service_pid, own.engine_pid)] == [0, 0]
    (line,) = Path(f"/proc/{broker[1].pid}/task/{broker[1].pid}/children").read_text().splitlines()
    assert {int(status(pid)["CapPrm"], 16) for pid in line.split()} == {0}  # that which closes sockets, too
    assert int(status(broker[1].pid)["CapPrm"], 16) == 0b111 << 5
    assert b"-s" in Path(f"/proc/{broker[1].pid}/cmdline").read_bytes().split(b"\0")  # nothing of the user's site


ATTACKS = f"""
import os, signal, sys
for pid in map(int, sys.argv[1].split(",")):
    for name, attack in {{
        "signal": lambda: os.kill(pid, 0),
        "slow down": lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        "limit": lambda: __import__("resource").prlimit(pid, 7, (1, 1)),
        "read the memory": lambda: open(f"/proc/{{pid}}/mem", "rb"),
        "read the environment": lambda: open(f"/proc/{{pid}}/environ", "rb").read(),
        "list the descriptors": lambda: os.listdir(f"/proc/{{pid}}/fd"),
    }}.items():
        try:
            attack()
            print(name, pid)
        except PermissionError:
            pass
for home in sys.argv[2:]:
    try:
        print(os.listdir(home))
    except PermissionError:
        pass
for name, attack in {{
    "make a home": lambda: os.mkdir(home + "/1"),
    "take a free one": lambda: os.rename(home + "/free-{LAST}", home + "/1"),
    "hold the lock": lambda: os.open(home + "/lock", os.O_RDONLY),
}}.items():
    try:
        attack()
        print(name)
    except PermissionError:
        pass
"""


@pytest.mark.integration
def test_the_kernel_keeps_cells_apart_without_their_sandboxes(members, broker):
    """A process that has the uid of a cell and none of its confinement acts on no other cell, nor on the broker, and
    reaches no other account's records; on its own cell it does.
    """
    friend, other = (client.do(PIDS) for client in members)
    with driver.connect(broker[0]) as own:
        others = *other, broker[1].pid, own.engine_pid, own.service_pid
    places = homes(broker[0]) / str(OTHER), homes(broker[0])

    def attacked(pids):
        words = other_accounts.python_as(FIRST, (), ATTACKS, ",".join(map(str, pids)), *places)
        return subprocess.check_output(words, cwd="/", text=True)

    assert attacked(others) == ""
    assert "signal" in attacked(friend)


@pytest.mark.integration
def test_what_takes_a_cell_over_reaches_nothing_else(accounts):
    """Code in a cell's engine reaches no file of the device's account, neither its service nor another process of the
    device, and not the records of its own account's service."""
    intruder = "burst_test_devices.intruder:Intruder"
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        address, process = stack.enter_context(foreign(*UIDS, device=intruder, capabilities=NEEDED))
        sock.bind(f"\0{address}")
        sock.listen()
        home = Path(address).parents[1]
        secret = home / "secret"
        secret.write_text("secret")
        os.chown(secret, SERVER, SERVER)
        own = stack.enter_context(driver.connect(address))
        said = {"secret": str(secret), "client": process.pid, "others": [own.engine_pid, own.service_pid]}
        said |= {"abstract": address, "port": 9, "socket": str(home / "run/reference.sock")}
        assert accounts[0].do(CONNECT.format(address)) is None
        said["others"] += accounts[0].do(PIDS)
        said["records"] = [str(homes(address)), str(homes(address) / str(FRIEND)), str(home / ".local/state/burst")]
        assert all(map(os.path.isdir, said["records"]))
        (home / ".config/burst/intruder.json").write_text(json.dumps(said))
        assert accounts[1].do(f"device = driver.connect({address!r})") is None
        failure = accounts[1].do("device.prepare(model)")
        assert failure.startswith("GeneralFailure: ")
        assert failure.endswith(": []")
        assert [client.do("device.close()") for client in accounts[:2]] == [None, None]


@pytest.mark.integration
def test_the_configuration_of_the_device_holds_for_each_cell(members, broker):
    """limits.toml of the device's account, which the cell's uid cannot read, limits its clients, and is named."""
    said = members[0].do("bursts = [prepared.burst() for _ in range(2)]")
    assert said.startswith("ResourceExhaustedTransient: the limit client_bursts = 1 is reached")
    assert f"in {Path(broker[0]).parents[1]}/.config/burst/limits.toml and restart" in said


@pytest.mark.integration
def test_figures_and_doctor_see_all_cells(members, broker, monkeypatch):
    """Root asks each cell for the figures of all its clients, of its processes too; `burst doctor` finds one uid for
    each engine.
    """
    monkeypatch.setattr(running, "SERVED", Path(broker[0]).parent)
    with driver.connect(broker[0]):
        findings = {found.subject: found for found in running.devices() if broker[0] in found.subject}
    together = findings[f"{broker[0]}, engines"]
    assert (together.state, together.found) == ("ok", f"3, under uid {SERVER}, {FIRST}, {SECOND}")
    for uid in (FRIEND, OTHER):
        held = findings[f"{broker[0]}, uid {uid}, what accounts hold"]
        assert (held.state, f"uid {uid}" in held.found) == ("ok", True)


@contextlib.contextmanager
def again(path, *options, device="reference"):
    """That device in a folder of the account's, which may have served before; its socket."""
    os.chown(path, SERVER, SERVER)
    under = with_capabilities(*NEEDED)
    with served(path / "run", *options, device=device, account=(0, GROUP), under=under) as process:
        yield str(next(path.glob("run/*.sock")))
        process.terminate()
        assert process.wait(PATIENCE) == 0


@pytest.mark.integration
def test_an_account_has_its_uid_and_its_records_again(accounts, process):
    """The next cell of an account, also that of a device that was started anew, has the same uid, and knows what the
    one before has found out: here, that a file is quarantined.
    """
    prepared = "device.prepare(file_model({!r})).run(ONE)"
    with folder() as path:
        with again(path, *UIDS, device=FILER) as address:
            for client in accounts[:2]:
                words = f"import sys; sys.path.insert(0, {HELPERS!r})", "from worded_files import ONE, file_model"
                assert client.do(*words, f"device = driver.connect({address!r})") is None
            assert accounts[0].do(prepared.format("good")) is None
            engine = process(accounts[1].do(PIDS)[1])
            assert accounts[1].do(prepared.format("one:crash")).startswith("PeerDied")
            assert engine.has_ended()
            again_ = f"device = driver.connect({address!r})", prepared.format("one:crash")
            assert "is quarantined on this device" in accounts[1].do(*again_)
            assert os.stat(f"/proc/{accounts[1].do(PIDS)[1]}").st_uid == SECOND
            assert [client.do("device.close()") for client in accounts[:2]] == [None, None]
        with again(path, *UIDS, device=FILER):
            assert "is quarantined on this device" in accounts[1].do(*again_)
            assert os.stat(f"/proc/{accounts[1].do(PIDS)[1]}").st_uid == SECOND
            assert accounts[1].do("device.close()") is None


@pytest.mark.integration
def test_another_device_that_starts_while_cells_run(accounts):
    """Another device of the same account may begin while a cell runs, with a range that has grown, and gives an account
    the uid that it has. What it gave beyond the range of the first is refused there, with the remedy.
    """
    with folder() as path, again(path, "--group", GROUP, "--uids", f"{FIRST}-{FIRST}") as first:
        assert accounts[0].do(CONNECT.format(first)) is None
        grown = served(path / "2", *UIDS, account=(0, GROUP), under=with_capabilities(*NEEDED))
        with grown:
            second = f"{path}/2/reference.sock"
            for client, uid in zip(accounts[:2], (FIRST, SECOND), strict=True):
                assert client.do(f"other = driver.connect({second!r})") is None
                pid = client.do("out = other.engine_pid")
                assert os.stat(f"/proc/{pid}").st_uid == uid
            said = accounts[1].do(CONNECT.format(first))
            assert f"another device gave it uid {SECOND}: serve this one with the same --uids" in said
            assert accounts[0].do("out = prepared.run(X)[0].tolist()") == [[2.0] * 4]
            assert [client.do("other.close()") for client in accounts[:2]] == [None, None]
        assert accounts[0].do("device.close()") is None


@pytest.fixture
def prepared(monkeypatch):
    """Makes the homes of a range, as root, and returns them with their folder."""
    if os.geteuid():
        pytest.skip("only root may become other accounts")
    with folder() as path:
        monkeypatch.setattr(cell_uids, "listed_home", lambda: path)
        monkeypatch.setattr(cell_uids, "check_reach", lambda _: None)

        def prepare(last):
            CellUids.prepare(f"{FIRST}-{last}")
            return CellUids(range(FIRST, last + 1), path)

        yield prepare


def test_no_cell_may_write_to_the_folder_while_homes_are_made(prepared, monkeypatch):
    """At no moment of a first start, or of a later one, may others than the account write to the folder of homes."""
    modes, become, place = set(), cell_uids.setfsuid, prepared(FIRST).homes

    def watched(uid):
        modes.add(place.stat().st_mode & 0o777)
        return become(uid)

    monkeypatch.setattr(cell_uids, "setfsuid", watched)
    prepared(LAST)
    assert modes == {0o711}
    owners = {path.name: path.stat().st_uid for path in place.glob("free-*")}
    assert owners == {f"free-{uid}": uid for uid in range(FIRST, LAST + 1)}
    assert {path.name for path in place.iterdir()} == {*owners, "lock"}


def test_what_the_kernel_does_not_do_is_told(prepared, monkeypatch):
    """Where the kernel lets no files be made as another account, which it does not say, no home has the wrong owner."""
    monkeypatch.setattr(cell_uids, "setfsuid", lambda _: 0)
    with pytest.raises(DeviceFailed, match=f"may not make files of uid {FIRST}"):
        prepared(FIRST)


def test_subordinate_uids_have_the_home_of_their_owner(prepared, monkeypatch, tmp_path):
    """Who owns subordinate uids uses up one uid of the range, not one for each of them."""
    table = tmp_path / "subuid"
    table.write_text(f"# owners\n{FRIEND}:300000:65536\nnobody-has-this-name:400000:65536\nodd\n")
    monkeypatch.setattr(subordinate_uids, "TABLES", (table, tmp_path / "none"))
    cells = prepared(SECOND)
    for account in (300000, 300001, 365535, FRIEND, 400000):
        cells.assign(account)
    assert {path.name: path.stat().st_uid for path in cells.homes.glob("[0-9f]*")} == {
        str(FRIEND): FIRST,
        "400000": SECOND,
    }
    with pytest.raises(OSError, match=r"all 2 uids for accounts are taken; .* remove what nobody needs from"):
        cells.assign(OTHER)


def test_homes_that_are_gone_or_half_made_are_made(prepared):
    """The next start makes a home that root has removed, which is the remedy for a range that is used up, and one that
    a start which was killed has half made.
    """
    cells = prepared(FIRST)
    cells.assign(FRIEND)
    (cells.homes / str(FRIEND)).rmdir()
    (cells.homes / "new-killed/home").mkdir(parents=True)
    os.chown(cells.homes / "new-killed/home", FIRST, FIRST)
    cells = prepared(SECOND)
    for account, uid in ((OTHER, FIRST), (FRIEND, SECOND)):
        cells.assign(account)
        assert (cells.homes / str(account)).stat().st_uid == uid


def test_numbers_that_something_has_are_refused(monkeypatch, tmp_path):
    """A range that has a number of an account, a group, a table of subordinate ones or the group that is served is
    refused, and told which, before anything is made; an example is not.
    """
    subuid, subgid = tmp_path / "subuid", tmp_path / "subgid"
    subuid.write_text("alice:100000:65536\n")
    subgid.write_text("bob:300000:65536\n")
    monkeypatch.setattr(subordinate_uids, "TABLES", (subuid, subgid))
    monkeypatch.setattr(grp, "getgrall", lambda: [grp.struct_group(("staff", "x", 1999999999, []))])
    account = pwd.getpwall()[-1]
    for uids, served_group, words in (
        ((account.pw_uid, account.pw_uid), None, f"{account.pw_uid} is the account {account.pw_name}"),
        ((1999999990, 1999999999), None, "1999999999 is the group staff"),
        ((FIRST, LAST), LAST, f"{LAST} is a group that this device has or is served to"),
        ((165535, 165540), None, f"165535 is a subordinate number of alice in {subuid}"),
        ((299999, 300000), None, f"300000 is a subordinate number of bob in {subgid}"),
    ):
        with pytest.raises(DeviceFailed, match=re.escape(f"{words}: use numbers that nobody has, such as")):
            CellUids.prepare("{}-{}".format(*uids), served_group)
    assert not cell_uids.taken(uids_in(cell_uids.EXAMPLE), None)


def test_python_has_to_be_within_reach(monkeypatch):
    """An environment that other accounts may not enter is refused, not only a folder above it."""
    with folder() as path:
        (path / "venv").mkdir(0o700)
        monkeypatch.setattr(sys, "prefix", f"{path}/venv")
        with pytest.raises(DeviceFailed, match=f"may not enter .*{path}/venv"):
            cell_uids.check_reach(path)


@pytest.mark.parametrize(
    "left", ["nothing", "a link above", "a link", "a link to a file", "a pipe", "a folder", "more"]
)
def test_what_a_cell_left_in_its_configuration(tmp_path, left):
    """The configuration is written in place of what a cell has left there, and nothing else is touched by that."""
    elsewhere, home = tmp_path / "elsewhere", tmp_path / "home"
    (elsewhere / "burst").mkdir(parents=True)
    (elsewhere / "kept").write_text("kept")
    configured = home / ".config/burst"
    if left == "a link above":
        home.mkdir()
        (home / ".config").symlink_to(elsewhere)
    elif left == "a link":
        (home / ".config").mkdir(parents=True)
        configured.symlink_to(elsewhere)
    else:
        (configured / "deep").mkdir(parents=True)
    file = configured / "limits.toml"
    if left == "a link to a file":
        file.symlink_to(elsewhere / "kept")
        (configured / "deep").rmdir()
        (configured / "deep").symlink_to(elsewhere)
    elif left == "a pipe":
        os.mkfifo(file)
    elif left == "a folder":
        (file / "within").mkdir(parents=True)
    elif left == "more":
        (configured / "more/kept").mkdir(parents=True)
        (configured / "litert.toml").write_text("left")
    files = {Path("limits.toml"): b"limits", Path("deep/1.json"): b"1"}
    cell_configuration.write(configured, files)
    assert cell_configuration.files_in(configured) == files
    assert {path.relative_to(configured) for path in configured.rglob("*")} == {*files, Path("deep")}
    assert list(home.iterdir()) == [home / ".config"]
    assert not (home / ".config").is_symlink()
    assert sorted(elsewhere.iterdir()) == [elsewhere / "burst", elsewhere / "kept"]
    assert (elsewhere / "kept").read_text() == "kept"
    assert not list((elsewhere / "burst").iterdir())


@pytest.mark.integration
def test_a_device_that_stays_has_no_capabilities(accounts):
    """What starts the service of a device with one engine again begins no cells, and keeps no capability."""
    with foreign(*UIDS, device="burst_test_devices.single:Apart", capabilities=NEEDED) as (address, first):
        assert accounts[0].do(CONNECT.format(address)) is None
        service = accounts[0].do("out = device.service_pid")
        assert service != first.pid
        assert [int(status(pid)["CapPrm"], 16) for pid in (first.pid, service)] == [0, 0]
        assert accounts[0].do("device.close()") is None


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_broker_that_ends_leaves_no_cell(accounts, process, number):
    """Nothing of another uid outlives a broker, whether that is stopped or killed."""
    with foreign(*UIDS, capabilities=NEEDED) as (address, broker):
        assert accounts[0].do(CONNECT.format(address)) is None
        pids = [process(pid) for pid in accounts[0].do(PIDS)]
        broker.send_signal(number)
        broker.wait(PATIENCE)
        assert all(each.has_ended() for each in pids)
        assert accounts[0].do("device.close()") is None


@pytest.mark.integration
def test_a_cell_that_does_not_end_is_killed(accounts, process):
    """A broker that is stopped kills a cell of another uid that stands still."""
    with foreign(*UIDS, capabilities=NEEDED) as (address, broker):
        assert accounts[0].do(CONNECT.format(address)) is None
        service = process(accounts[0].do(PIDS)[0])
        os.kill(service.pid, signal.SIGSTOP)
        broker.terminate()
        assert broker.wait(PATIENCE) == 0
        assert service.has_ended()
        assert accounts[0].do("device.close()") is None


@pytest.mark.integration
def test_root_serves_with_uids(accounts):
    """Root can give cells uids as well, which then have none of its rights."""
    with folder() as path, served(path / "run", *UIDS, account=(0, GROUP)) as broker:
        lines = CONNECT.format(f"{path}/run/reference.sock"), "out = prepared.run(X)[0].tolist()"
        assert accounts[0].do(*lines) == [[2.0] * 4]
        for pid in accounts[0].do(PIDS):
            assert (status(pid)["Uid"].split()[0], int(status(pid)["CapPrm"], 16)) == (str(FIRST), 0)
        assert accounts[0].do("device.close()") is None
        broker.terminate()
        assert broker.wait(PATIENCE) == 0


@pytest.mark.integration
def test_a_range_that_is_used_up(accounts):
    """An account for which no uid is left is refused, and told so; the others are served."""
    with foreign("--group", GROUP, "--uids", f"{FIRST}-{FIRST}", capabilities=NEEDED) as (address, _):
        assert accounts[0].do(CONNECT.format(address)) is None
        said = accounts[1].do(CONNECT.format(address))
        assert "all 1 uids for accounts are taken; serve the device with more --uids" in said
        with Client(FIRST, GROUP) as cell:
            assert cell.is_ready()
            assert f"uid {FIRST} is one of the device's cells" in cell.do(CONNECT.format(address))
        assert accounts[0].do("out = prepared.run(X)[0].tolist()") == [[2.0] * 4]
        assert accounts[0].do("device.close()") is None


REFUSED = """\
for call, *arguments in calls:
    try:
        call(*arguments)
        print(call, arguments)
    except PermissionError:
        pass
"""
ALLOWED = f"""\
os.setgroups([])
os.setresgid({LAST}, {LAST}, {LAST})
os.setresuid({FIRST}, {FIRST}, {FIRST})
print(os.getresuid(), os.getresgid(), os.getgroups())
"""
BECOMES = f"""
import os, socket
from driver.engine import sandbox
from driver.engine.call_rules import of_broker
before = socket.socket(socket.AF_UNIX)
assert sandbox.enter(beside=of_broker((), range({FIRST}, {LAST + 1})))
outside = 0, 1, {FIRST - 1}, {LAST + 1}, 65534, -1
calls = [(os.setgroups, [number]) for number in (0, {FIRST})]
for number in outside:
    for numbers in ((number, {FIRST}, {FIRST}), ({FIRST}, number, {FIRST}), ({FIRST}, {FIRST}, number)):
        calls += [(os.setresgid, *numbers), (os.setresuid, *numbers)]
calls += [(os.setuid, {FIRST}), (os.setgid, {FIRST}), (os.setreuid, {FIRST}, {FIRST}), (os.setregid, {FIRST}, {FIRST})]
calls += [(socket.socket, socket.AF_UNIX), (before.connect, "/run/x"), (before.bind, "/run/x"), (before.listen,)]
{REFUSED}{ALLOWED}"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become other accounts")
def test_the_filter_of_the_broker_leaves_it_the_range_alone():
    """What has taken the broker over becomes no account but those of the range, in no call and by no argument, takes
    no group, and connects to no socket.
    """
    said = subprocess.check_output([sys.executable, "-c", BECOMES], text=True)
    assert said == f"{(FIRST,) * 3} {(LAST,) * 3} []\n"


KEEPS = f"""
import ctypes, os, subprocess, sys
from driver.engine import sandbox
assert sandbox.keep_uids(range({FIRST}, {LAST + 1}))
unshare = ctypes.CDLL(None, use_errno=True).unshare
assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout == b"1\\n"
calls = [(os.setuid, {FIRST}), (os.setgid, {FIRST}), (os.setgroups, [0]), (os.setresuid, 0, 0, 0)]
calls += [(os.setresgid, 0, 0, 0), (os.setresuid, {FIRST}, {FIRST}, {LAST + 1})]
calls += [(os.setreuid, {FIRST}, {FIRST}), (os.setregid, {FIRST}, {FIRST})]
{REFUSED}for flags in (0x10000000, 0x20000):
    assert (unshare(flags), ctypes.get_errno()) == (-1, 1), flags
{ALLOWED}"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become other accounts")
def test_what_loads_the_device_becomes_no_other_account():
    """The process that is to be the broker has a filter before it loads a driver: with its capabilities it takes uids
    and gids of the range alone, and no namespace in which these stand for others; programs that it starts, too.
    """
    said = subprocess.check_output([sys.executable, "-c", KEEPS], text=True)
    assert said == f"{(FIRST,) * 3} {(LAST,) * 3} []\n"


NAMESPACES = """
import ctypes
from driver.engine import sandbox
from driver.engine.call_rules import of_broker
unshare = ctypes.CDLL(None, use_errno=True).unshare
assert sandbox.enter(beside=of_broker((), range(7, 8), takes_namespaces=True))
print([unshare(flags) for flags in (0x20000, 0x10020000, 0x50000000, 0x10000000)])
"""


def test_a_broker_without_privileges_makes_user_namespaces_alone():
    """Its filter lets it, and what it forks, enter a user namespace, and no other one with it."""
    done = subprocess.run([sys.executable, "-c", NAMESPACES], capture_output=True, text=True, check=True)
    assert done.stdout in ("[-1, -1, -1, 0]\n", "[-1, -1, -1, -1]\n")


WITHOUT_FILTERS = f"""
import errno, os, platform, sys
sys.path.insert(0, {str(Path(other_accounts.__file__).parent)!r})
from refused_calls import refuse
refuse(errno.ENOSYS, {{"x86_64": 317, "aarch64": 277}}[platform.machine()])
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.integration
def test_without_a_filter_there_is_no_broker_with_capabilities(accounts):
    """Where the kernel takes no filter of system calls, the device ends before it serves anybody, and says why."""
    under = sys.executable, "-c", WITHOUT_FILTERS
    with foreign(*UIDS, capabilities=NEEDED, under=under) as (address, broker):
        assert broker.wait(PATIENCE) == 1
        assert not Path(address).exists()
        assert "could become any account, as nothing filters" in (Path(address).parents[1] / "log").read_text()


@pytest.mark.parametrize("text", ["7", "7-", "9-8", "0-9", "-5-9", "4294967290-4294967295", "7-9,11", "7-5000", "own"])
def test_what_is_no_range_is_refused(text):
    """A range has two numbers that are uids and gids, and neither root's nor the device's own account's."""
    text = f"{os.getuid()}-{os.getuid() + 9}" if text == "own" else text
    with pytest.raises(DeviceFailed, match=f"--uids {text}: must be FIRST-LAST"):
        uids_in(text)


@pytest.mark.integration
def test_an_account_without_the_capabilities_is_refused(accounts):
    """It is told which one it lacks, and how it gets it, before anything is served."""
    without = foreign(*UIDS, capabilities=NEEDED[:2])
    with pytest.raises(AssertionError, match="lacks CAP_SETUID, CAP_SETGID or CAP_KILL: have systemd"), without:
        pass


@pytest.mark.integration
def test_homes_are_of_one_range_and_within_reach(accounts):
    """Homes that were made for another range, and those that no cell could reach, are refused with the remedy; a range
    may become longer.
    """
    with folder() as path:
        with again(path, *UIDS):
            pass
        another = again(path, "--group", GROUP, "--uids", f"{LAST + 1}-{LAST + 9}")
        words = f"made for other numbers, such as {FIRST}: give these, too, or remove it"
        with pytest.raises(AssertionError, match=words), another:
            pass
        with again(path, "--group", GROUP, "--uids", f"{FIRST}-{LAST + 1}"):
            assert (path / f".local/state/burst-cells/free-{LAST + 1}").stat().st_uid == LAST + 1
        (path / ".local").chmod(0o700)
        words = f"other accounts may not enter {path}/.local: chmod o[+]x {path}/.local"
        with pytest.raises(AssertionError, match=words), again(path, *UIDS):
            pass


def test_a_range_is_for_a_group():
    """Where one account alone may connect, `--uids` is refused; with `--unit` a wrong range is."""
    for words in (["reference", "--uids", f"{FIRST}-{LAST}"], ["--unit", "--uids", "1"]):
        done = CliRunner().invoke(command, ["serve", *words])
        assert (done.exit_code, "--uids" in done.output) == (2, True)


def test_the_unit_of_a_range():
    """`--unit --uids` prints the unit with the three capabilities, the option, and a home that cells may go through but
    from which Python loads nothing.
    """
    done = CliRunner().invoke(command, ["serve", "--unit", "--uids", f"{FIRST}-{LAST}", "--group", "inference"])
    assert f" serve %i --group inference --uids {FIRST}-{LAST} $BURST_OPTIONS\n" in done.output
    for setting in ("CapabilityBoundingSet", "AmbientCapabilities"):
        assert f"\n{setting}=CAP_SETUID CAP_SETGID CAP_KILL\n" in done.output
    assert "\nStateDirectoryMode=0711\n" in done.output
    assert "\nEnvironment=PYTHONNOUSERSITE=1\n" in done.output
