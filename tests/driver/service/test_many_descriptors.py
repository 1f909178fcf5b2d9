"""Ten thousand descriptors that take long to close, of each kind, sent where the kernel cannot refuse them."""

import contextlib
import os
import signal
import time
from pathlib import Path

import older_kernel
import pytest
from served_devices import CONNECT, GROUP, foreign
from slow_to_close import LINGERS
from waiting import PATIENCE

pytestmark = pytest.mark.stress
EACH, BATCH = 10_000, 250  # a message has 253 at most
KINDS = f"""
{LINGERS}
import contextlib, ctypes, resource, select
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
kept, event = [], os.eventfd(0)

def small_lingering():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        with contextlib.closing(socket.socket()) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
            slow.connect(server.getsockname())
            kept.append(server.accept()[0])
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
            slow.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while slow.send(bytes(65536)):
                    pass
            return slow.detach()

def epoll():
    found = select.epoll()
    found.register(event)
    fd = os.dup(found.fileno())
    found.close()
    return fd

def io_uring():
    fd = ctypes.CDLL(None, use_errno=True).syscall(425, 2, ctypes.create_string_buffer(120))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "io_uring_setup")
    return fd

def ring():
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        socket.send_fds(near, [b"x"], [near.fileno(), far.fileno()])
        return os.dup(far.fileno())
def send(kind, number, family, where):
    sent = 0
    while sent < number:
        fds = [globals()[kind]() for _ in range(min({BATCH}, number - sent))]
        with socket.socket(socket.AF_UNIX, family) as sock:
            sock.connect(where)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was closed already
                socket.send_fds(sock, [b"GET"], fds)
        sent += len(fds)
        threading.Thread(target=lambda: [os.close(fd) for fd in fds], daemon=True).start()
    return sent
"""


@pytest.fixture(scope="module")
def device(accounts):
    """The paths of a device's socket and of its metrics, under an older kernel; an account may have two clients."""
    limits = "uid_clients = 2\n"
    options = "--group", GROUP, "--metrics", "{home}/metrics.sock"
    with foreign(*options, limits=limits, under=older_kernel.UNDER) as (address, process):
        hostile, other = accounts[:2]
        assert hostile.do(CONNECT.format(address), f"second = driver.connect({address!r})", KINDS) is None
        assert other.do(CONNECT.format(address), "burst = prepared.burst()") is None
        yield {"SEQPACKET": address, "STREAM": str(Path(address).parents[1] / "metrics.sock")}, process
        assert hostile.do("second.close(); device.close()") is None
        assert other.do("burst.close(); device.close()") is None


@pytest.mark.parametrize("family", ["SEQPACKET", "STREAM"])
@pytest.mark.parametrize("kind", ["small_lingering", "epoll", "io_uring", "ring"])
def test_ten_thousand(device, accounts, kind, family, tally):
    """Another account connects and computes within seconds while and after they are closed."""
    where, process = device
    hostile, other = accounts[:2]
    if family == "SEQPACKET":
        os.kill(process.pid, signal.SIGSTOP)  # so that the first of them are there before they are refused
    said = hostile.do(f"out = send({kind!r}, {BATCH}, socket.SOCK_{family}, {where[family]!r})")
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGCONT)
    if kind == "io_uring" and said != BATCH:  # as where the kernel sends none of them
        pytest.skip(f"no io_uring can be sent here: {said}")
    assert said == BATCH
    again = f"out = send({kind!r}, {EACH - BATCH}, socket.SOCK_{family}, {where[family]!r})"
    assert hostile.do(again) == EACH - BATCH
    begin = time.monotonic()
    connects = f"driver.connect({where['SEQPACKET']!r}).close()"
    assert other.do(connects, "out = burst.run(X).outputs[0].tolist()") == [[2.0] * 4]
    assert time.monotonic() - begin < PATIENCE
    assert hostile.do("[each.close() for each in kept]; kept.clear()") is None
    tally("descriptors that take long to close", EACH)
