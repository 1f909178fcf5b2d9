"""The protocol, written down a second time for the model checker Spin, which tries everything: csrc/model."""

import re
import shutil
import subprocess
import time

import pytest

pytestmark = pytest.mark.integration

PATIENCE = 600  # seconds; each search takes less than 180 of one idle core, and less than 2 GB (MEMLIM)
SHORT = ("-O0",)
LONG = ("-O2", "-DCOLLAPSE")


def config(**defines):
    return [f"-D{name}={value}" for name, value in defines.items()]


ONE = {"CAPACITY": 1, "MOST_WRITTEN": 1}
NOBODY_DIES = {"DEATHS": 0, "HEIRS": 0}
TWO_READERS = {"READERS": 2, "CAPACITY": 1, "WORDS": 1, "MOST": 1}
ONE_LISTENER = {"READERS": 1, "JOINS": 1, "DEATHS": 0}
# Together they reach every step of a model; the full configurations are larger, not different.
SMALL = {
    "queue": [
        config(CAPACITY=2, ELEMENTS=4, WORDS=2, TIMEOUTS=1, **NOBODY_DIES),
        config(CAPACITY=2, ELEMENTS=3, MOST_WRITTEN=1, MOST_READ=2, **NOBODY_DIES),
        config(ELEMENTS=2, STOPS=3, **ONE, **NOBODY_DIES),
        config(ELEMENTS=1, DEATHS=1, HEIRS=1, **ONE),
        config(ELEMENTS=0, DEATHS=1, HEIRS=0, STOPS=2, **ONE),
        config(ELEMENTS=0, DEATHS=1, HEIRS=0, WATCHERS=2, MORTAL=1, **ONE),
        config(ELEMENTS=0, DEATHS=1, HEIRS=0, BELLS=1, MORTAL=1, **ONE),
        config(ELEMENTS=1, BELLS=1, **ONE, **NOBODY_DIES),
    ],
    "event": [config(WAITERS=1, WAITS=2), config(WAITERS=1, WAITER_DEATHS=1)],
    "death": [
        config(),
        config(FAULTS=1),
        config(ENTRIES=3, FAULTS=1, RELEASES=1),
        config(NEIGHBOUR=0, FAULTS=1, HEIRS=1, RELEASES=1),
        config(HEIRS=1),
    ],
    "told": [
        config(DEATHS=1),
        config(CALLS=1),
        config(STOPS=1),
        config(DEATHS=1, CALLS=1, STOPS=1),
    ],
    "broadcast": [
        config(ELEMENTS=2, DEATHS=1, JOINS=1, READERS=1),
        config(ELEMENTS=2, EVICTIONS=1, **ONE_LISTENER),
        config(ELEMENTS=1, DEATHS=0, WRITER_DIES=1),
        config(ELEMENTS=3, MOST=2, CAPACITY=2, MOST_READ=2, SEATS=1, **ONE_LISTENER),
    ],
    "overwrite": [
        config(ELEMENTS=4, **NOBODY_DIES),
        config(ELEMENTS=2, WORDS=1, MOST=2, CAPACITY=2),
        config(ELEMENTS=1, STOPS=1, **TWO_READERS, **NOBODY_DIES),
        config(ELEMENTS=2, **TWO_READERS, **NOBODY_DIES),
    ],
}
FULL = {
    "death, a fault, a release and an heir": ("death", config(ENTRIES=3, FAULTS=1, RELEASES=1, HEIRS=1)),
    "queue, transfers of two": ("queue", config(ELEMENTS=4, TIMEOUTS=1)),
    "queue, reads of two": ("queue", config(ELEMENTS=4, MOST_WRITTEN=1, MOST_READ=2)),
    "queue, two words in an element": ("queue", config(ELEMENTS=3, WORDS=2)),
    "queue, two deaths and two heirs": ("queue", config(ELEMENTS=2, DEATHS=2, HEIRS=2, **ONE)),
    "queue, an heir with the dead one's number": ("queue", config(ELEMENTS=3, NEW_TID=0)),
    "queue, stop or death, and an heir": ("queue", config(ELEMENTS=1, STOPS=3, **ONE)),
    "queue, the same, with the same number": ("queue", config(ELEMENTS=1, STOPS=3, NEW_TID=0, **ONE)),
    "queue, a watch and an heir": ("queue", config(ELEMENTS=2, WATCHERS=1, MORTAL=1, **ONE)),
    "queue, a watch and a stop": ("queue", config(ELEMENTS=1, HEIRS=0, WATCHERS=1, STOPS=2, MORTAL=1, **ONE)),
    "queue, a watch that is taken down": ("queue", config(ELEMENTS=1, HEIRS=0, WATCHERS=2, **ONE)),
    "queue, two bells": ("queue", config(ELEMENTS=2, BELLS=2, **ONE, **NOBODY_DIES)),
    "queue, a bell and a death": ("queue", config(ELEMENTS=2, HEIRS=0, BELLS=1, **ONE)),
    "queue, a bell and an heir": ("queue", config(ELEMENTS=1, BELLS=1, MORTAL=1, **ONE)),
    "event, two bits": ("event", config(WAITERS=2)),
    "event, a waiter is killed": ("event", config(WAITERS=2, WAITER_DEATHS=1)),
    "broadcast, two elements": ("broadcast", config(ELEMENTS=2, DEATHS=0)),
    "broadcast, one seat after another": ("broadcast", config(ELEMENTS=2, SEATS=1, DEATHS=0)),
    "broadcast, a death and then its seat": ("broadcast", config(ELEMENTS=1, SEATS=1)),
    "broadcast, a death and an eviction": ("broadcast", config(ELEMENTS=2, READERS=1, SEATS=1, EVICTIONS=1)),
    "broadcast, two readers and an eviction": ("broadcast", config(ELEMENTS=1, DEATHS=0, EVICTIONS=1)),
    "overwrite, an heir": ("overwrite", config(ELEMENTS=4)),
    "overwrite, a ring of three": ("overwrite", config(ELEMENTS=5, CAPACITY=3, **NOBODY_DIES)),
    "overwrite, two readers": ("overwrite", config(ELEMENTS=3, **{**TWO_READERS, "CAPACITY": 2}, **NOBODY_DIES)),
    "overwrite, two readers and an heir": ("overwrite", config(ELEMENTS=1, **TWO_READERS)),
    "overwrite, two readers, an heir with the dead one's number": (
        "overwrite",
        config(ELEMENTS=1, NEW_TID=0, **TWO_READERS),
    ),
    "overwrite, two readers and a stop": ("overwrite", config(ELEMENTS=2, STOPS=1, **TWO_READERS, **NOBODY_DIES)),
}
ANNOUNCE = "    d_step { is_odd[me] = 1; as_announced[me] = 1 }; /* pairs: SLEEP */\n"
GREET = "        greet_peer();\n"
PASSES_ON = "        futex_wait_either();\n        pass_on_death(PEER);\n"
OVERWRITE_PASSES_ON = """        if /* pass_on_death */
        :: life == DEAD -> futex_wake_all(on_life) /* pairs: DEAD */
        :: else
        fi;
"""
BELL_PASSES_ON = """                    if
                    :: seen_life == DEAD -> futex_wake_life_all(WRITER)
                    :: else
                    fi;
"""
BELL_ANNOUNCES = """                if
                :: bell_has_wait -> d_step { is_odd[READER] = 1; as_bell_announced = 1 } /* pairs: SLEEP */
                :: else
                fi;
"""
WHOLE_RELEASE = """    atomic {
        note_last_words(role);
        life[role] = RELEASED; /* pairs: DEAD */
        futex_wake_life_all(role)
    }
"""
BEGIN = """    d_step { /* a dead writer may have begun more than we do */
        assert(begin >= position && begin - position <= MOST);
        begin = (begin > position + n -> begin : position + n) /* pairs: BEGIN */
    };
"""
COPIED = "    i = 0;\n    d_step { position = position + n; n = 0 };\n"
SET_BITS = "    bits = bits | (mask); /* pairs: EVENT_SLEEP */\n"
ASK_SLEEPERS = "    :: sleepers -> futex_wake(mask) /* pairs: EVENT_SLEEP */\n"
ASK_BUSY = """            if
            :: !busy[role] -> break /* pairs: STOP */
            :: else
            fi
"""
WAIT_FOR_BUSY = "            !busy[role]; break\n"
STOP_LOOKS = "        if\n        :: !busy[0] -> break /* pairs: STOP */\n        :: else\n        fi\n"
WITH_OLD = [("    byte round;\n", "    byte round, old;\n"), ("    byte mask;\n", "    byte mask, old;\n")]
RING_OF_ONE = config(ELEMENTS=2, **ONE)
WATCH = config(ELEMENTS=1, HEIRS=0, WATCHERS=2, MORTAL=1, **ONE)
BELL = config(ELEMENTS=2, BELLS=1, **ONE, **NOBODY_DIES)
NO_DEATH = config(ELEMENTS=2, **ONE, **NOBODY_DIES)
OVERRUNS = config(ELEMENTS=4, **NOBODY_DIES)
SHARED_WORD = config(ELEMENTS=2, **TWO_READERS, **NOBODY_DIES)
# name -> model, configuration, and what is replaced. Each breaks one step on purpose; Spin has to notice.
MUTANTS = {
    "a neighbour's page comes first": (
        "death",
        config(),
        [
            ("    :: entry < ENTRIES && entry == 0 ->\n", "    :: entry == ENTRIES - 1 ->\n"),
            ("    :: entry < ENTRIES && entry > 0 ->\n", "    :: entry < ENTRIES - 1 ->\n"),
            ("        :: entry == ENTRIES - 1 && truncated -> break\n", "        :: truncated -> break\n"),
        ],
    ),
    "there is no second way": ("death", config(FAULTS=1), [("life == seen -> lose()\n", "life == seen -> skip\n")]),
    "a loss wakes no thread": ("death", config(FAULTS=1), [("    ended++;\n    wake()\n", "    ended++\n")]),
    "a loss leaves the word as it was": ("death", config(FAULTS=1), [("    ended++;\n    wake()\n", "    wake()\n")]),
    "the lock is asked for at the event alone": (
        "death",
        config(FAULTS=1),
        [("-> freed && !is_locked || good_order || heir_came /*", "-> true /*")],
    ),
    "the lock is asked for once": (
        "death",
        config(FAULTS=1, HEIRS=1),
        [("(seen == TID || seen == HEIR) && !is_locked && life == seen ->", "(seen == TID || seen == HEIR) ->")],
    ),
    "a successor is lost with the dead": (
        "death",
        config(FAULTS=1, HEIRS=1),
        [("saw_ended && saw_life == lost_life ->", "saw_ended ->")],
    ),
    "a loss is told before last words": (
        "death",
        config(FAULTS=1),
        [
            ("        saw_ended = ended;\n", ""),
            ("        /* then what was lost */\n", "        saw_ended = ended;\n"),
        ],
    ),
    "one word, and no look at what is told by it": (
        "told",
        config(DEATHS=1),
        [("                :: ended != saw_ended /* pairs: TOLD */\n", "                :: false\n")],
    ),
    "one word, which who tells leaves as it was": (
        "told",
        config(DEATHS=1),
        [("    as_announced = 0; /* + 2: as odd as before.  pairs: TOLD */\n", "")],
    ),
    "one word, which is changed before what it tells of": (
        "told",
        config(CALLS=1),
        [("called = 1; tell()", "tell(); called = 1")],
    ),
    "one word, and a bridge that keeps a death to itself": (
        "told",
        config(DEATHS=1),
        [(":: saw != ALIVE -> tell(); break", ":: saw != ALIVE -> break")],
    ),
    "looks before it announces": (
        "queue",
        NO_DEATH,
        [(f"{ANNOUNCE}    ring_need();\n", f"    ring_need();\n{ANNOUNCE}")],
    ),
    "wakes before it publishes": (
        "queue",
        NO_DEATH,
        [
            (
                "            ring_publish();\n            wake_peer()\n",
                "            wake_peer();\n            ring_publish()\n",
            )
        ],
    ),
    "publishes before it copies": (
        "queue",
        NO_DEATH,
        [
            (
                "            ring_copy();\n            ring_publish();\n",
                "            counter[me] = position + n;\n            ring_copy();\n            ring_publish();\n",
            )
        ],
    ),
    "does not wake": (
        "queue",
        NO_DEATH,
        [("/* + 1, and one publisher: even now */\n        futex_wake_wait(PEER)\n", "\n")],
    ),
    "sleeps on its own word only": (
        "queue",
        RING_OF_ONE,
        [
            ("on_wait[me] = 1; on_life[me] = 1\n", "on_wait[me] = 1\n"),
            (":: !on_wait[me] || !on_life[me]", ":: !on_wait[me]"),
            ("&& on_wait[me] && on_life[me]", "&& on_wait[me]"),
        ],
    ),
    "looks at life after data": (
        "queue",
        RING_OF_ONE,
        [("    :: r == EAGAIN -> ended()\n", "    :: r == EAGAIN -> seen_life = life[PEER]; ended()\n")],
    ),
    "release and wake are two steps": (
        "queue",
        RING_OF_ONE,
        [(WHOLE_RELEASE, WHOLE_RELEASE.replace("atomic {", "").replace("\n    }\n", "\n"))],
    ),
    "an heir does not wake, and has the dead one's number": ("queue", [*RING_OF_ONE, "-DNEW_TID=0"], [(GREET, "")]),
    "an heir wakes only whom the word calls asleep": (
        "queue",
        config(ELEMENTS=2, WATCHERS=1, MORTAL=1, NEW_TID=0, **ONE),
        [
            (GREET, "        wake_peer();\n"),
            ("        life[me] = tid;\n        futex_wake_life_all(me);\n", "        life[me] = tid;\n"),
        ],
    ),
    "a sleeper keeps a death to itself": (
        "queue",
        config(ELEMENTS=1, HEIRS=0, WATCHERS=1, STOPS=2, MORTAL=1, **ONE),
        [
            (PASSES_ON, "        futex_wait_either();\n"),
            (
                "    :: r == EAGAIN -> ended()\n    :: else\n    fi;\n",
                """    :: r == EAGAIN -> ended()
    :: else
    fi;
    if
    :: r == EPIPE -> futex_wake_life_all(PEER)
    :: else
    fi;
""",
            ),
        ],
    ),
    "the bridge keeps a death to itself": ("queue", WATCH, [(BELL_PASSES_ON, "")]),
    "who takes a bell back keeps a death to itself": (
        "queue",
        WATCH,
        [("        pass_on_death(WRITER);\n        rung = 0\n", "        rung = 0\n")],
    ),
    "takes a bell back and does not wait for the bridge": (
        "queue",
        BELL,
        [("        heard >= rung; /*", "        /*")],
    ),
    "the bridge looks before it announces": (
        "queue",
        BELL,
        [
            (BELL_ANNOUNCES, ""),
            (
                "            d_step { table_locked = 0; heard",
                f"{BELL_ANNOUNCES}            d_step {{ table_locked = 0; heard",
            ),
        ],
    ),
    "stop does not wake": (
        "queue",
        [*NO_DEATH, "-DSTOPS=3"],
        [("        :: futex_wake_wait(role);\n", "        :: true;\n"), (ASK_BUSY, WAIT_FOR_BUSY)],
    ),
    "stop wakes once, in a queue with one sleeper": ("queue", [*NO_DEATH, "-DSTOPS=3"], [(ASK_BUSY, WAIT_FOR_BUSY)]),
    "stop does not wait for the call inside": (
        "queue",
        [*NO_DEATH, "-DSTOPS=3"],
        [("            :: !busy[role] -> break", "            :: true -> break")],
    ),
    "a waker skips the call when the bit was set": (
        "event",
        config(WAITERS=1),
        [
            *WITH_OLD,
            (SET_BITS, "    d_step { old = bits; bits = bits | (mask) };\n"),
            (ASK_SLEEPERS, ASK_SLEEPERS.replace("sleepers", "sleepers && !(old & (mask))")),
        ],
    ),
    "looks at sleepers before it sets bits": (
        "event",
        config(WAITERS=1),
        [
            *WITH_OLD,
            (SET_BITS, "    old = sleepers;\n" + SET_BITS),
            (ASK_SLEEPERS, ASK_SLEEPERS.replace("sleepers", "old")),
        ],
    ),
    "counts itself when it sleeps already": (
        "event",
        config(WAITERS=1),
        [
            ("        sleepers++; /* pairs: EVENT_SLEEP */\n", ""),
            ("            !(queued & (mask))\n", "            sleepers++;\n            !(queued & (mask))\n"),
        ],
    ),
    "announces the writing after it": (
        "overwrite",
        OVERRUNS,
        [(BEGIN, ""), (COPIED, COPIED.replace("d_step { position", "begin = position + n;\n    d_step { position"))],
    ),
    "publishes before it writes": (
        "overwrite",
        OVERRUNS,
        [(BEGIN, BEGIN + "    head = position + n;\n"), ("assert(position > head && ", "assert(")],
    ),
    "declares an overrun by head alone": (
        "overwrite",
        OVERRUNS,
        [("r = (begin - position > CAPACITY", "r = (head - position > CAPACITY")],
    ),
    "looks at begin before it copies": (
        "overwrite",
        OVERRUNS,
        [("        i = 0;\n        check_begin()\n", "        i = 0\n")],
    ),
    "does not look at begin at all": (
        "overwrite",
        OVERRUNS,
        [("r = (begin - position > CAPACITY -> OVERRUN : OK)", "r = OK")],
    ),
    "an heir sets begin back": (
        "overwrite",
        config(ELEMENTS=3, MOST=2, WORDS=1),
        [("begin = (begin > position + n -> begin : position + n)", "begin = position + n")],
    ),
    "an heir that overwrites does not wake": (
        "overwrite",
        config(ELEMENTS=2, WORDS=1, MOST=1, NEW_TID=0),
        [("        data_wait = data_wait + 2;\n        futex_wake_all(on_wait);\n", "")],
    ),
    "a reader writes awake back on the shared word": (
        "overwrite",
        SHARED_WORD,
        [
            (
                "d_step { seen_life = 0; announced = 0 }",
                "data_wait = data_wait & ~1; d_step { seen_life = 0; announced = 0 }",
            )
        ],
    ),
    "the shared word is only 0 or 1": (
        "overwrite",
        SHARED_WORD,
        [("        data_wait++;", "        data_wait = 0;"), ("data_wait = data_wait + 2;", "data_wait = 0;")],
    ),
    "a reader that found enough keeps the death to itself": (
        "overwrite",
        config(ELEMENTS=1, HEIRS=0, **TWO_READERS),
        [
            (OVERWRITE_PASSES_ON, ""),
            (
                "    ring_need();\n    do\n",
                "    ring_need();\n    do\n    :: r == EPIPE -> futex_wake_all(on_life); break\n",
            ),
        ],
    ),
    "stop wakes once": (
        "overwrite",
        config(ELEMENTS=2, STOPS=1, **TWO_READERS, **NOBODY_DIES),
        [(STOP_LOOKS, "        !busy[0]; break\n")],
    ),
}
JOIN = "    state[seat] = (turn << 2) | JOINING; /* pairs: SEAT */\n"
BEGINS = "    position = head; /* pairs: SEAT */\n"
WRITER_ANNOUNCES = "        d_step { space_wait = space_wait | 1; announced = space_wait }; /* pairs: SLEEP */\n"
NEEDS = "        need = position + n - CAPACITY; /* pairs: SLEEP */\n"
LISTENER = config(ELEMENTS=2, **ONE_LISTENER)
EVICTED = [*LISTENER, "-DEVICTIONS=1"]
MORTAL_LISTENER = config(ELEMENTS=2, JOINS=1, READERS=1)
MUTANTS |= {
    "a reader begins where head was before it joined": (
        "broadcast",
        LISTENER,
        [(BEGINS, BEGINS.replace("head", "tail[seat]"))],
    ),
    "a reader looks at head before it joins": ("broadcast", LISTENER, [(JOIN + BEGINS, BEGINS + JOIN)]),
    "a dead reader's state counts again": (
        "broadcast",
        config(ELEMENTS=3, SEATS=1),
        [("    state[seat] = state[seat] & ~3; /* pairs: SEAT */\n", "")],
    ),
    "a tail that is old is no tail": (
        "broadcast",
        config(ELEMENTS=3, **ONE_LISTENER),
        [("                    at = position - CAPACITY\n", "                    at = position\n")],
    ),
    "a reader does not wake": (
        "broadcast",
        LISTENER,
        [("space_wait++;\n                    writer_asleep = 0\n", "space_wait++\n")],
    ),
    "the writer looks before it announces": (
        "broadcast",
        LISTENER,
        [(f"{WRITER_ANNOUNCES}        readers_look();\n", f"        readers_look();\n{WRITER_ANNOUNCES}")],
    ),
    "the writer says what it needs when it has looked": (
        "broadcast",
        LISTENER,
        [
            (NEEDS, ""),
            (f"{WRITER_ANNOUNCES}        readers_look();\n", f"{WRITER_ANNOUNCES}        readers_look();\n{NEEDS}"),
        ],
    ),
    "the writer sleeps on its own word only": (
        "broadcast",
        MORTAL_LISTENER,
        [
            ("                writer_on_life[0] = lives[0] != 0;\n", ""),
            ("                writer_on_life[SEATS - 1] = lives[SEATS - 1] != 0;\n", ""),
        ],
    ),
    "a reader leaves and wakes in two steps": (
        "broadcast",
        MORTAL_LISTENER,
        [
            (
                "atomic { life[seat] = RELEASED; holds[me] = 0; wake_life(seat) };",
                "atomic { life[seat] = RELEASED; holds[me] = 0 };\n    wake_life(seat);",
            )
        ],
    ),
    "overwrites before the verdict": (
        "broadcast",
        EVICTED,
        [
            (
                "            verdict[seat] = turn; /* pairs: OUT */\n            out[seat] = turn;\n",
                "            out[seat] = turn;\n            verdict[seat] = turn;\n",
            )
        ],
    ),
    "a reader looks at its verdict before it reads": (
        "broadcast",
        EVICTED,
        [
            (
                "        is_out = verdict[seat] == turn; /* pairs: OUT */\n        if\n        :: is_out\n",
                "        if\n        :: is_out\n",
            )
        ],
    ),
    "an eviction does not wake the writer": (
        "broadcast",
        EVICTED,
        [("            d_step { ended++; writer_asleep = 0 }; /* sleep_look_again */\n", "")],
    ),
    "publishes to all before it writes": (
        "broadcast",
        config(ELEMENTS=1, **ONE_LISTENER),
        [
            (
                "    do\n    :: i < n -> d_step { ring[",
                "    head = position + n;\n    do\n    :: i < n -> d_step { ring[",
            )
        ],
    ),
    "a broadcast reader keeps the writer's death to itself": (
        "broadcast",
        config(ELEMENTS=1, DEATHS=0, WRITER_DIES=1),
        [("            pass_on_death()\n", "            skip\n")],
    ),
}
IN_MAKE_TEST = (
    "a reader looks at head before it joins",
    "overwrites before the verdict",
    "looks before it announces",
    "release and wake are two steps",
    "the shared word is only 0 or 1",
)


@pytest.fixture
def explore(csrc, tmp_path):
    """Runs Spin's search over one configuration of a model; returns what it printed, which ends with a summary."""
    tools = {"spin": "spin", "cc": "gcc libc6-dev"}
    for name, package in tools.items():
        if not shutil.which(name):
            pytest.skip(f"no '{name}', which the models need; install it (Debian: apt install {package})")

    def run(model, defines, how=SHORT, replaced=(), options=(), seconds=PATIENCE):
        text = (csrc / "model" / f"{model}.pml").read_text()
        for old, new in replaced:
            assert text.count(old) == 1, f"the mutant no longer applies to {model}.pml: {old!r}"
            text = text.replace(old, new)
        (tmp_path / "model.pml").write_text(text)
        safety = [] if "-DLIVENESS" in defines else ["-DSAFETY"]
        began = time.monotonic()
        tool(tmp_path, "spin", *defines, "-a", "model.pml")
        tool(tmp_path, "cc", "-w", *how, *safety, "-DMEMLIM=2000", "-o", "pan", "pan.c")
        table = "-w24" if how is LONG else "-w20"
        out = tool(tmp_path, "./pan", table, "-m1000000", *options, seconds=seconds)
        assert "unreached in init" in out or "errors: 1" in out, out[-4000:]
        states = re.search(r"(\d+) states, stored", out)[1]
        print(f"\n{model} {' '.join(defines)}: {states} states, {time.monotonic() - began:.1f} s", end="")
        return out

    return run


def tool(folder, *command, seconds=500):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def must_hold(out):
    """No error, and nothing left out for want of depth or memory."""
    assert re.search(r"errors: 0\b", out), out[-4000:]
    assert not re.search(r"max search depth too small|reached -DMEMLIM|not completed|aborted", out), out[-4000:]


def unreached(out):
    """The steps that no execution took: (process, what Spin says of it)."""
    process, found = None, set()
    for line in out.partition("\nunreached in ")[2].splitlines():
        process = line.removeprefix("unreached in ") if not line.startswith("\t") else process
        if place := re.match(r"\t.*pml:(\d+, state \d+)", line):
            found.add((process, place[1]))
    return found


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=pytest.mark.stress if name in {"queue", "overwrite", "broadcast"} else ())
        for name in SMALL
    ],
)  # more than five seconds each
def test_a_model_holds_in_small_bounds(explore, model):
    """Every execution is tried and none breaks an assertion or leaves anybody asleep; together the configurations take
    every step that the model has."""
    never = None
    for defines in SMALL[model]:
        out = explore(model, defines)
        must_hold(out)
        never = unreached(out) if never is None else never & unreached(out)
    assert never == set()


@pytest.mark.stress
@pytest.mark.parametrize("name", FULL)
def test_a_model_holds(explore, name):
    """The same in the bounds that csrc/model/README.md states."""
    model, defines = FULL[name]
    must_hold(explore(model, defines, LONG))


@pytest.mark.stress
def test_both_ends_come_to_an_end(explore):
    """Whoever can go on for ever does go on (weak fairness): then no call goes round in circles, though a side dies."""
    must_hold(explore("queue", [*config(ELEMENTS=2, HEIRS=0, **ONE), "-DLIVENESS"], LONG, options=("-a", "-f")))


def must_be_found(explore, mutant):
    model, defines, replaced = MUTANTS[mutant]
    out = explore(model, defines, replaced=replaced)
    assert re.search(r"pan:1: (assertion violated|invalid end state)", out), out[-4000:]


@pytest.mark.parametrize("mutant", IN_MAKE_TEST)
def test_spin_finds_what_is_broken_on_purpose(explore, mutant):
    """A model with one step removed or swapped is refused, so that silence above means something."""
    must_be_found(explore, mutant)


@pytest.mark.stress
@pytest.mark.parametrize("mutant", [name for name in MUTANTS if name not in IN_MAKE_TEST])
def test_spin_finds_each_mutant(explore, mutant):
    """Each property of each model has a mutant that breaks it."""
    must_be_found(explore, mutant)
