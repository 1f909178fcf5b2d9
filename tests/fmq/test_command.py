"""`python -m fmq` against real queues: as a process where that matters, else by its `main`, which is soon done."""

import contextlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from fmq_peers import control_word, hold, new_name, process, write_blocks
from waiting import until

import fmq
from fmq.command import remove, send
from fmq.command.arguments import main

COMMANDS = ("list", "info", "tail", "send", "unlink")
LIMIT = 60  # seconds; the machine may be busy


def fmq_command(*words, status=0):
    """Runs it to its end in this process; returns stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            ended = main(words)
        except SystemExit as end:  # as argparse ends a wrong call
            ended = end.code
    return checked(ended, status, out.getvalue(), err.getvalue())


def fmq_process(*words, status=0):
    """Runs it to its end in a process of its own; returns stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "fmq", *words], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    return checked(done.returncode, status, done.stdout, done.stderr)


def checked(ended, status, out, err):
    """Its outputs; it must have ended so, and told a failure in one line."""
    assert ended == status, err
    assert status == 0 or err.count("\n") == 1, err
    return out, err


def objects(text):
    return [json.loads(line) for line in text.splitlines()]


@contextlib.contextmanager
def started(*words):
    """Runs it beside the test."""
    command = [sys.executable, "-W", "error", "-m", "fmq", *words]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(LIMIT, running.kill)
    watchdog.start()
    try:
        yield running
    finally:
        watchdog.cancel()
        running.kill()
        running.communicate()


@pytest.fixture
def queue(name):
    return fmq.MessageQueue.create("i4", 10, name=name)


@pytest.fixture
def stale(queue, name):
    """The name of a queue that both sides have left with three elements in it."""
    with queue.writer() as writer, queue.reader() as reader:
        writer.write(range(5))
        reader.read(2)
    return name


# ---- list and info --------------------------------------------------------------------------------------------------


def test_list_shows_all_queues_aligned(stale):
    """Columns stand under their heads; the stale one says so."""
    other = new_name() + "-with-a-longer-name"
    fmq.MessageQueue.create([("time", "f8"), ("box", "f4", (4,))], 3, fmq.Flavour.UNSYNCHRONIZED, name=other)
    try:
        head, *rows = fmq_process("list")[0].splitlines()
        row = next(row for row in rows if row.startswith(stale + " "))
        assert row.split() == [
            stale,
            "int32",
            "10",
            "synchronized",
            "[###-------]",
            "3",
            "released",
            "released",
            "STALE",
        ]
        assert row.index("int32") == head.index("DTYPE")
        assert row.index("[###") == head.index("UNREAD")
        row = next(row for row in rows if row.startswith(other))
        assert "time, box" in row
        assert "0 written" in row
    finally:
        fmq.unlink(other)


def test_list_as_json(stale):
    """The same as fmq.queues says, one object per line."""
    found = {one["name"]: one for one in objects(fmq_command("list", "--json")[0])}
    info = fmq.inspect(stale)
    assert found[stale] == {
        "name": stale,
        "dtype": "'<i4'",
        "capacity": 10,
        "flavour": "synchronized",
        "nbytes": 8192,
        "mode": "0600",
        "uid": os.geteuid(),
        "created": info.created,
        "written": 5,
        "read": 2,
        "unread": 3,
        "writer": "released",
        "reader": "released",
        "damage": None,
        "readers": [],
        "stale": True,
    }


def test_list_without_queues(tmp_path):
    """Is no error, and says how one comes about; `list` of a user who has none."""
    script = (
        "import os, sys, fmq.inspection as i, pathlib; i._FOLDER = pathlib.Path(sys.argv[1])\n"
        "from fmq.command.arguments import main; sys.exit(main(['list']))"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr.startswith("no queues; ")


def test_info_says_everything_and_what_to_do(stale):
    """Sizes for people, positions, who is there, and the way out for a stale one."""
    text = fmq_command("info", stale)[0]
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert lines["capacity"] == "10 elements, 40 bytes"
    assert lines["memory"] == f"8.0 KiB, mode 0600, owner uid {os.geteuid()}"
    assert (lines["written"], lines["read"]) == ("5 elements, 20 bytes", "2 elements")
    assert lines["writer"].startswith("released")
    assert f"python -m fmq unlink {stale}" in lines["stale"]
    assert objects(fmq_command("info", "--json", stale)[0])[0]["unread"] == 3


def test_info_sees_who_is_alive_and_who_was_killed(queue, name):
    """Another process holds the role."""
    ready, theirs = multiprocessing.Pipe()
    with process(hold, queue.descriptor, "writer", theirs, fails=True) as child:
        ready.recv()
        assert objects(fmq_process("info", name, "--json")[0])[0]["writer"] == "alive"
        child.kill()
        until(lambda: fmq.inspect(name).writer == "dead")
    assert "dead: its process ended without releasing" in fmq_process("info", name)[0]


# ---- tail -----------------------------------------------------------------------------------------------------------


def test_tail_shows_the_newest_and_takes_nothing(stale):
    """With their positions in the queue's life."""
    assert fmq_command("tail", stale, "-n", "2")[0] == "3  3\n4  4\n"
    assert objects(fmq_command("tail", stale, "--json")[0]) == [{"position": i, "value": i} for i in (2, 3, 4)]
    assert list(fmq.MessageQueue.open(stale).reader().read(3, 0)) == [2, 3, 4]


def test_tail_shows_what_was_taken_when_asked(stale):
    """Marked, because nothing proves that it is whole."""
    assert fmq_command("tail", stale, "--taken")[0] == "~0  0\n~1  1\n2  2\n3  3\n4  4\n"
    first = objects(fmq_command("tail", stale, "--taken", "--json")[0])[0]
    assert first == {"position": 0, "value": 0, "doubtful": True}


def test_tail_of_an_empty_queue(queue, name):
    """Says why it shows nothing."""
    out, err = fmq_command("tail", name)
    assert out == ""
    assert "nothing is unread" in err


RECORD = [("t", "f8"), ("who", "S4"), ("on", "?"), ("raw", "V2"), ("at", "M8[s]"), ("in", [("xy", "i2", (2,))])]


def test_tail_of_records(name):
    """name=value, and JSON that says the same; what JSON cannot say is a string."""
    record = np.zeros(1, RECORD)
    record[0] = (np.nan, b"cam", True, b"\x01\xff", "2026-01-02T03:04:05", (([7, 8],)))
    fmq.MessageQueue.create(RECORD, 4, name=name).writer().write(record)
    words = "t=nan who=cam on=True raw=01ff at=2026-01-02T03:04:05 in=xy=[7, 8]"
    assert fmq_command("tail", name)[0] == f"0  {words}\n"
    value = {"t": "nan", "who": "cam", "on": True, "raw": "01ff", "at": "2026-01-02T03:04:05", "in": {"xy": [7, 8]}}
    assert objects(fmq_command("tail", name, "--json")[0]) == [{"position": 0, "value": value}]


def test_tail_shortens_long_arrays(name):
    """A frame is a line with its dtype, its shape and its ends; --json has all of it."""
    dtype = [("seconds", "f8"), ("pixels", "u1", (8, 8))]
    fmq.MessageQueue.create(dtype, 2, name=name).writer().write(np.array([(1.5, np.arange(64).reshape(8, 8))], dtype))
    assert fmq_command("tail", name)[0] == "0  seconds=1.5 pixels=uint8[8, 8] [0, 1, 2, … 61, 62, 63]\n"
    (found,) = objects(fmq_command("tail", name, "--json")[0])
    assert found["value"]["pixels"][7][7] == 63


@pytest.mark.parametrize("flavour", fmq.Flavour)
def test_tail_follows_a_running_stream(name, flavour):
    """Each element is its own position, ascending; what is not shown is counted; Ctrl-C ends it with status 0."""
    queue = fmq.MessageQueue.create("i8", 1000, flavour, name=name)
    with queue.reader() as reader, started("tail", name, "--follow", "--json", "-n", "1000") as tail:
        with process(write_blocks, queue.descriptor, 0, 200, 5):
            pass  # a thousand elements, all unread for now
        expected, shown = 0, 0
        while expected < 1000:
            one = json.loads(tail.stdout.readline())
            if "missed" in one:
                expected += one["missed"]
            else:
                assert one == {"position": expected, "value": expected}
                expected, shown = expected + 1, shown + 1
        assert shown
        assert len(reader.read(1000, 10)) == 1000
        tail.send_signal(signal.SIGINT)
        out, err = tail.communicate(timeout=LIMIT)
        assert (tail.returncode, out) == (0, "")
        assert "Traceback" not in err


def test_tail_ends_when_the_queue_has_gone(queue, name):
    """Unlinked, and its last user has left: nothing will come any more."""
    with queue.writer() as writer, started("tail", name, "-f", "-n", "1") as tail:
        writer.write([8])
        assert tail.stdout.readline() == "0  8\n"
        fmq.unlink(name)
        writer.write([9])
        assert tail.stdout.readline() == "1  9\n"
        writer.close()
        assert "both sides are gone" in tail.communicate(timeout=LIMIT)[1]
        assert tail.returncode == 0


def test_looking_changes_no_byte(queue, name):
    """list, info and tail leave the memory as it was."""
    with queue.writer() as writer:
        writer.write([1, 2, 3])
        memory = queue.descriptor.region().asarray()
        before = bytes(memory)
        for words in (
            ("list",),
            ("info", name),
            ("tail", name),
            ("tail", name, "--taken"),
            ("unlink", name, "--dry-run"),
        ):
            fmq_command(*words, status=1 if words[0] == "unlink" else 0)
        assert bytes(memory) == before


# ---- unlink ---------------------------------------------------------------------------------------------------------


def test_unlink_refuses_a_queue_in_use(queue, name):
    """It says who is alive; --force removes the name, and those inside go on."""
    with queue.writer() as writer, queue.reader() as reader:
        assert (
            "in use: its writer is alive and its reader is alive; --force" in fmq_process("unlink", name, status=1)[1]
        )
        assert fmq_process("unlink", "--force", name)[0] == f"{name} removed, with no unread elements\n"
        assert not os.path.exists("/dev/shm" + name)
        writer.write([1])
        assert list(reader.read(1, 10)) == [1]


def test_unlink_refuses_an_unsynchronized_queue_that_has_a_reader(name):
    """Its readers hold no role, and are alive nevertheless."""
    queue = fmq.MessageQueue.create("i4", 10, fmq.Flavour.UNSYNCHRONIZED, name=name)
    with queue.reader():
        assert "its reader is alive" in fmq_process("unlink", name, status=1)[1]
    fmq_process("unlink", name)


def test_unlink_goes_on_after_a_refusal(stale):
    """Every name is tried; the status tells that one was refused."""
    out, err = fmq_process("unlink", "/fmq-test-no-such-queue", stale, status=1)
    assert out == f"{stale} removed, with 3 unread elements\n"
    assert "/fmq-test-no-such-queue" in err


def test_unlink_stale_takes_the_stale_alone(stale, monkeypatch, capsys):
    """Not the live, not the unused, not the damaged; --dry-run takes nothing."""
    others = live, unused, damaged = new_name(), new_name(), new_name()
    ours = {stale, *others}  # a developer's own stale queues are not ours to remove
    monkeypatch.setattr(remove, "queues", lambda: [info for info in fmq.queues() if info.name in ours])
    with fmq.MessageQueue.create("u1", 8, name=live).writer():
        fmq.MessageQueue.create("u1", 8, name=unused)
        broken = fmq.MessageQueue.create("u1", 8, name=damaged)
        broken.writer().close()
        control_word(broken, 1024)[0] = 1
        assert main(["unlink", "--stale", "--dry-run"]) == 0
        assert capsys.readouterr().out == f"{stale} would be removed, with 3 unread elements\n"
        assert main(["unlink", "--stale", "--json"]) == 0
        assert objects(capsys.readouterr().out) == [{"name": stale, "unlinked": True, "unread": 3}]
        there = os.listdir("/dev/shm")
        assert stale[1:] not in there
        assert {other[1:] for other in others} <= set(there)
        for other in others:
            fmq.unlink(other)
        assert main(["unlink", "--stale"]) == 0
        assert capsys.readouterr() == ("", "fmq unlink: nothing is stale\n")


@pytest.mark.parametrize(
    ("flavour", "written", "told"),
    [
        (fmq.Flavour.SYNCHRONIZED, 0, ", with no unread elements"),
        (fmq.Flavour.SYNCHRONIZED, 1, ", with 1 unread element"),
        (fmq.Flavour.BROADCAST, 1, ""),
    ],
)
def test_unlink_says_how_much_was_unread(name, flavour, written, told):
    """Of each queue of which that is known: of one for many readers each had a position of its own."""
    with fmq.MessageQueue.create("u1", 8, flavour, name=name).writer() as writer:
        writer.write(range(written))
    assert fmq_command("unlink", name) == (f"{name} removed{told}\n", "")


def test_unlink_does_not_take_a_name_that_has_moved_on(stale, monkeypatch):
    """Somebody makes a new queue of that name between our look and our unlink: it stays."""
    lock = remove.LockFile.lock

    def lock_and_lose(self, byte, what):
        lock(self, byte, what)
        if what == "reader":
            fmq.unlink(stale)
            fmq.MessageQueue.create("f8", 5, name=stale)

    monkeypatch.setattr(remove.LockFile, "lock", lock_and_lose)
    assert main(["unlink", stale]) == 1
    assert fmq.inspect(stale).dtype == np.float64


@pytest.mark.parametrize("force", [False, True])
def test_unlink_of_what_is_no_queue_takes_force(name, force):
    """Damaged, or somebody else's file."""
    fmq.Region.create(4096, name=name)
    if force:
        fmq_command("unlink", "--force", name)
    else:
        assert "no queue" in fmq_command("unlink", name, status=1)[1]
    assert os.path.exists("/dev/shm" + name) is not force


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), *((command,) for command in COMMANDS)])
def test_help(words):
    """Each command explains itself."""
    out = fmq_command(*words, "--help")[0]
    assert out.startswith(f"usage: {' '.join(('python -m fmq', *words))}")
    assert not words or "--json" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "required"),
        (("show",), "'show'"),
        (("info",), "NAME"),
        (("info", "frames"), "did you mean '/frames'?"),
        (("info", "/a/b"), "'/a/b'"),
        (("info", ""), "''"),
        (("tail", "/x", "-n", "-1"), "'-1': a number from 0"),
        (("tail", "/x", "-n", "many"), "'many'"),
        (("tail", "/x", "--interval", "0"), "'0'"),
        (("unlink",), "--stale"),
        (("unlink", "--stale", "/x"), "--stale"),
    ],
)
def test_a_wrong_call_is_one_line_and_status_2(words, told):
    """It names what was wrong."""
    assert told in fmq_command(*words, status=2)[1]


def test_a_wrong_call_ends_the_process_like_that():
    """What `main` does is what the program does."""
    assert "'show'" in fmq_process("show", status=2)[1]
    assert fmq_process("--help") == fmq_command("--help")


def test_an_unknown_name_suggests_the_right_one(queue, name):
    """Status 1, one line."""
    assert f"did you mean '{name}'?" in fmq_command("info", name + "x", status=1)[1]
    assert "python -m fmq list" in fmq_command("tail", "/a-quite-different-one", status=1)[1]


@pytest.mark.parametrize("command", ["info", "tail"])
def test_damaged_memory_is_named(queue, name, command):
    """With what is wrong with it, and how to get rid of it."""
    control_word(queue, 1024)[0] = 1
    told = fmq_command(command, name, status=1)[1]
    assert name in told
    assert "damaged" in told
    assert "unlink --force" in told
    assert "DAMAGED" in fmq_command("list")[0]


def test_a_folder_is_no_queue(name):
    """Nor does it make anything fail in another way."""
    os.mkdir("/dev/shm" + name)
    try:
        assert f"name={name!r}" in fmq_command("info", name, status=1)[1]
        assert name not in fmq_command("list")[0]
    finally:
        os.rmdir("/dev/shm" + name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file that is not its own")
def test_somebody_elses_queue_is_refused(queue, name):
    """It is named, and so is the owner; it is not listed."""
    os.chown("/dev/shm" + name, 65534, 65534)
    assert "belongs to uid 65534" in fmq_command("info", name, status=1)[1]
    assert name not in fmq_command("list")[0]


def test_a_broken_pipe_is_silent(name):
    """As in `python -m fmq tail /x | head -1`."""
    queue = fmq.MessageQueue.create("i8", 100_000, name=name)
    with queue.writer() as writer, started("tail", name, "-n", "100000") as tail:
        writer.write(np.arange(100_000))
        assert tail.stdout.readline()
        tail.stdout.close()
        assert tail.wait(LIMIT) == 141
        assert tail.stderr.read() == ""


# ---- send -----------------------------------------------------------------------------------------------------------


FRAME = [("at", "f8"), ("pixels", "u1", (2, 2))]


@pytest.mark.parametrize(
    ("dtype", "words", "expected"),
    [
        ("i4", ("1", "-2"), [1, -2]),
        ("f8", ("1.5", "NaN"), [1.5, np.nan]),
        ("S5", ("short", "1"), [b"short", b"1"]),
        ("U5", ('"a"',), ['"a"']),
        ("V2", ('"0aff"',), [np.void(b"\x0a\xff")]),
        (FRAME, ('{"pixels": [[1, 2], [3, 4]], "at": 0.5}',), [(0.5, [[1, 2], [3, 4]])]),
        (FRAME, ("[0.5, [[1, 2], [3, 4]]]",), [(0.5, [[1, 2], [3, 4]])]),
    ],
)
def test_elements_are_sent(name, dtype, words, expected):
    """A word is an element, and `tail --json` shows what `send` takes; the status says that all were sent."""
    queue = fmq.MessageQueue.create(dtype, 4, name=name)
    assert objects(fmq_command("send", "--json", name, *words)[0]) == [{"name": name, "sent": len(words)}]
    shown = [line["value"] for line in objects(fmq_command("tail", name, "--json")[0])]
    with queue.reader() as reader:
        found = reader.read(len(words))
    np.testing.assert_array_equal(found, np.array(expected, queue.dtype))
    with queue.writer() as writer:
        again = [send.parsed(each if queue.dtype.kind in "SU" else json.dumps(each), queue.dtype) for each in shown]
        if queue.dtype.kind != "f":  # JSON has no NaN
            writer.write(again)
            np.testing.assert_array_equal(queue.reader().read(len(words)), found)


def test_lines_are_sent_as_they_come(name):
    """From standard input, without a word: what a program prints goes into the queue line by line."""
    queue = fmq.MessageQueue.create("i8", 4, name=name)
    command = [sys.executable, "-W", "error", "-m", "fmq", "send", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as sender, queue.reader() as reader:
        for n in range(10):  # more than fit
            sender.stdin.write(f"{n}\n")
            sender.stdin.flush()
            assert reader.read(1, timeout=LIMIT) == [n]
        sender.stdin.close()
        assert sender.wait(LIMIT) == 0


@pytest.mark.parametrize(
    ("dtype", "word", "told"),
    [
        ("u1", "300", "300 would be 44"),
        ("u1", "many", "'many'"),
        ([("at", "f8"), ("x", "u1")], "1", "at, x"),
        ([("at", "f8"), ("x", "u1")], '{"at": 1}', "at, x"),
        ("V2", '"xyz"', "hex"),
    ],
)
def test_what_is_no_element_is_not_sent(name, dtype, word, told):
    """One line names the value and what the queue takes; nothing is written."""
    fmq.MessageQueue.create(dtype, 4, name=name)
    error = fmq_command("send", name, word, status=1)[1]
    assert told in error
    assert name in error
    assert fmq.inspect(name).unread == 0


def test_a_queue_that_has_a_writer_is_left_to_it(queue, name):
    """The error says so, as it does where no room comes in time."""
    with queue.writer() as writer:
        assert "writer" in fmq_command("send", name, "1", status=1)[1]
        writer.write(range(10))
    assert "timeout" in fmq_command("send", name, "1", "--timeout", "0", status=1)[1].lower()
