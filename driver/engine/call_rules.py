"""The arguments that system calls may have in a process which serves clients: it acts on itself alone.

Processes of one account may end each other, and set each other's limits and priorities. So of the calls that name a
process, the filter lets pass those that name the caller: what has taken an engine over reaches no other engine, no
broker, and no program of the account. No process gets a namespace of its own, in which it would have all capabilities,
or a socket of a family that no device needs. Calls that only read, as sched_getaffinity, are not compared.

A filter sees numbers, not what pointers lead to, and not which threads are the caller's. So a thread of it is refused
like one of another process, unless it is the first: a thread schedules itself, with 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection


class Rule(NamedTuple):
    """A rule on one argument: what the mask leaves of it is one of these values; or none of them, with `is_refused`."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    is_refused: bool = False
    is_range: bool = False  #: the values are the first and the last of a range


Rules = dict[str, tuple[Rule, ...]]

_UNIX, _INTERNET, _NAMES = 1, 2, 10  # AF_UNIX, AF_INET, AF_INET6
_STREAM, _SEQPACKET, _TYPES = 1, 5, 0xF
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_NEW_USERS = 0x10000000  # CLONE_NEWUSER
_FOR_OTHERS = 0x8000 | 0x2000  # CLONE_PARENT: a child of the parent's; CLONE_PTRACE
_SIGNALS_AND_LEASES = (8, 10, 15, 1024, 1026, 1040)
"""F_SETOWN, F_SETSIG and F_SETOWN_EX: the kernel signals any process in the caller's place. F_SETLEASE, F_NOTIFY,
F_SETDELEG: others wait 45 s for a file."""

_TERMINALS = (0x540E, 0x5410, 0x5412, 0x541C, 0x541D, 0x8901, 0x8902)
"""TIOCSCTTY, TIOCSPGRP, TIOCSTI (types into it), TIOCLINUX, TIOCCONS; FIOSETOWN, SIOCSPGRP: as F_SETOWN."""

_SCHED_CORE = 62  # PR_SCHED_CORE: on which core a process runs, and with which others
_PROCESS, _THREAD = 0, 1  # PRIO_PROCESS, IOPRIO_WHO_PROCESS

_FOR_ALL: Rules = {
    "clone": (Rule(0, (0,), _NEW_NAMESPACES | _FOR_OTHERS),),  # clone3 does not exist, for its flags are in memory
    "socket": (Rule(0, (_UNIX,)),),
    "socketpair": (Rule(0, (_UNIX,)), Rule(1, (_STREAM, _SEQPACKET), _TYPES)),  # a datagram can go to any address
    "fcntl": (Rule(1, _SIGNALS_AND_LEASES, is_refused=True),),
    "ioctl": (Rule(1, _TERMINALS, is_refused=True),),
    "prctl": (Rule(0, (_SCHED_CORE,), is_refused=True),),
}
_EVEN_IF_NEEDED: Rules = {
    **{name: _FOR_ALL[name] for name in ("clone", "fcntl", "ioctl", "prctl")},
    "socket": (Rule(0, (_UNIX, _INTERNET, _NAMES)),),
}

_ACTING = ("prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler", "get_robust_list")
_SIGNALLING = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
_ADDRESSING = ("socket", "connect", "bind", "listen")


class Reach(NamedTuple):
    """The processes and addresses beyond itself that a process may reach."""

    pid: int
    signals: Collection[int] = ()  #: processes that it may signal
    connects: bool = False  #: to sockets that have a path, or listens there
    watches: bool = False  #: the life of other processes, by a descriptor

    @property
    def rules(self) -> Rules:
        """The rules for its calls, beyond those for all processes."""
        itself = (0, self.pid)
        rules: Rules = dict.fromkeys(_ACTING, (Rule(0, itself),))
        rules |= dict.fromkeys(_SIGNALLING, (Rule(0, (self.pid, *self.signals)),))
        rules |= {"setpriority": (Rule(0, (_PROCESS,)), Rule(1, itself))}
        rules |= {"ioprio_set": (Rule(0, (_THREAD,)), Rule(1, itself))}
        if not self.watches:
            rules |= {"pidfd_open": (Rule(0, (self.pid,)),)}
        if not self.connects:
            rules |= dict.fromkeys(_ADDRESSING, (Rule(0, ()),))
        return rules


def of_broker(needed: Collection[str], uids: range | None, *, takes_namespaces: bool = False) -> Rules:
    """Return the rules for a broker's calls, beyond those for all processes. It and what it forks have their sockets.

    `needed`: by the device. `uids`: as of `becoming`, for one that begins cells of other accounts. `takes_namespaces`:
    each in a user namespace of its own.
    """
    alone = {} if "socket" in needed else dict.fromkeys(_ADDRESSING, (Rule(0, ()),))
    own = {"unshare": (Rule(0, (_NEW_USERS,)),)} if takes_namespaces else {}
    return alone | own | (becoming(uids) if uids else {})


def becoming(uids: range) -> Rules:
    """Return the rules for the calls by which a process becomes an account of a range, without supplementary groups.

    The numbers are uids and gids. None of these calls may leave one as it is, which is -1.
    """
    one_of = (uids[0], uids[-1])
    every = tuple(Rule(argument, one_of, is_range=True) for argument in range(3))
    return {"setgroups": (Rule(0, (0,)),), "setresgid": every, "setresuid": every}


def becoming_alone(uids: range) -> Rules:
    """Return the rules by which a process that may become any account becomes those of a range alone."""
    return becoming(uids) | {"clone": _FOR_ALL["clone"]}


def rules_for(needed: Collection[str], reach: Reach | None) -> Rules:
    """Return the rules by call. `reach`: None for a process that forks others, for all of which its filter holds.

    Calls that a device says it needs have few or none. One that starts programs ends them, too.
    """
    lifted = {*needed, *(_SIGNALLING if "execve" in needed else ()), *(_ADDRESSING if "socket" in needed else ())}
    rules = _FOR_ALL | (reach.rules if reach else {})
    return {name: rule for name, rule in rules.items() if name not in lifted} | {
        name: rule for name, rule in _EVEN_IF_NEEDED.items() if name in lifted
    }
