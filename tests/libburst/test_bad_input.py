"""What bad input gets from libburst: an error code that says which, and never a crash."""

import ctypes
import errno
import os
import signal
import socket
import threading
from ctypes import byref, c_float, c_size_t, c_uint64, c_void_p

import msgpack
import pytest
from libburst_by_ctypes import FOREVER, Options, Tensor, adder, checked, handle_of, shape, why
from waiting import until

pytestmark = pytest.mark.integration
ANY = c_uint64(FOREVER)


def calls(library, handle, other):
    """One call of every function that takes a handle, with `handle` in its place and `other` elsewhere."""
    room, tensor = c_void_p(), Tensor(other, 0, 4, 0, None)
    yield "disconnect", library.burst_disconnect(handle)
    yield "builder_free", library.burst_builder_free(handle)
    yield "operand", library.burst_builder_operand(handle, 3, 1, shape(4), c_float(0), 0)
    yield "constant", library.burst_builder_constant(handle, 3, 1, shape(4), c_float(0), 0, b"abcd", c_size_t(4))
    yield "operation", library.burst_builder_operation(handle, b"ADD", 0, None, 0, None)
    yield "finish", library.burst_builder_finish(handle, 0, None, 0, None)
    yield "prepare", library.burst_prepare(other, handle, ANY, byref(room))
    yield "compiled_free", library.burst_compiled_free(handle)
    yield "pool_free", library.burst_pool_free(handle)
    yield "open", library.burst_open(handle, None, byref(room))
    yield "close", library.burst_close(handle)
    yield "request", library.burst_request_new(handle, 1, byref(tensor), 0, None, byref(room))
    yield "request_free", library.burst_request_free(handle)
    yield "run", library.burst_run(handle, other, ANY, None)
    yield "submit", library.burst_submit(handle, other, ANY, None)
    yield "await", library.burst_await(handle, ANY, None)
    yield "try_submit", library.burst_try_submit(handle, other, ANY, None)
    yield "poll", library.burst_poll(handle, None)
    yield "cancel", library.burst_cancel(handle, c_uint64(1))
    yield "shape", library.burst_output_shape(handle, 0, None, 0)
    yield "count", library.burst_count(handle, byref((c_uint64 * 8)()))


@pytest.mark.parametrize("handle", [None, 1, 2**63, 0x7F0000001000, 2**64 - 1], ids=str)
def test_what_is_no_handle(library, handle):
    """NULL, small numbers and addresses are told from handles, in every function."""
    found = dict(calls(library, c_void_p(handle), c_void_p(handle)))
    assert set(found.values()) == {-errno.EINVAL}, found
    assert len(found) == 21
    assert why(library)


def test_handles_that_were_closed(library, adders):
    """-EBADF, as often as they are used, also after their place was taken by others."""
    burst = adders()
    handles = [burst.client, burst.model, burst.compiled, burst.controller, burst.pool, burst.request]
    burst.close()
    others = [handle_of(library, "burst_builder_new") for _ in range(100)]
    for handle in handles:
        found = dict(calls(library, handle, handle))
        assert set(found.values()) == {-errno.EBADF}, found
        assert "was closed" in why(library)
    for other in others:
        checked(library, library.burst_builder_free(other))


def test_handles_of_another_kind(library, adders):
    """-EINVAL, which names both kinds."""
    burst = adders()
    assert library.burst_run(burst.pool, burst.request, ANY, None) == -errno.EINVAL
    assert why(library) == "a pool is no controller"
    assert library.burst_pool_free(burst.controller) == -errno.EINVAL
    assert burst.adds()


def test_places_that_do_not_fit(library, adders):
    """Beyond the pool, with sums that overflow, without a shape, too many, omitted and yet somewhere."""
    burst = adders()
    for offset, length in [(0, 49), (48, 1), (2**64 - 8, 16), (2**64 - 1, 1), (16, 2**64 - 1)]:
        tensor, room = Tensor(burst.pool, offset, length, 0, None), c_void_p()
        assert library.burst_request_new(burst.controller, 1, byref(tensor), 0, None, byref(room)) == -errno.EINVAL
    room = c_void_p()
    for tensor in [
        Tensor(None, 4, 0, 0, None),
        Tensor(burst.pool, 0, 4, 2, None),
        Tensor(burst.pool, 0, 4, 2**32 - 1, shape(1)),
    ]:
        assert library.burst_request_new(burst.controller, 1, byref(tensor), 0, None, byref(room)) == -errno.EINVAL
    assert library.burst_request_new(burst.controller, 2**32 - 1, byref(tensor), 0, None, byref(room)) == -errno.EINVAL
    many = (Tensor * 1023)(*[Tensor(burst.pool, 0, 4, 0, None)] * 1023)
    assert library.burst_request_new(burst.controller, 1023, many, 0, None, byref(room)) == -errno.EMSGSIZE
    assert burst.adds()


def test_options_and_pools_that_cannot_be(library, adders):
    """A size of 0, a depth beyond the most, a spin of a minute; pools of nothing, or of memory that may shrink."""
    burst, room, base = adders(), c_void_p(), c_void_p()
    size = ctypes.sizeof(Options)
    for options in [Options(size=0), Options(size=size, depth=65), Options(size=size, spin=60 * 10**9)]:
        assert library.burst_open(burst.compiled, byref(options), byref(room)) == -errno.EINVAL
    assert library.burst_pool_new(c_size_t(0), byref(room), byref(base)) == -errno.EINVAL
    assert library.burst_pool_new(c_size_t(2**62), byref(room), byref(base)) == -errno.ENOSPC
    fd = os.memfd_create("shrinks")
    os.truncate(fd, 4096)
    assert library.burst_pool_from_fd(fd, c_size_t(4096), byref(room), byref(base)) == -errno.EINVAL
    assert library.burst_pool_from_fd(-1, c_size_t(4096), byref(room), byref(base)) == -errno.EINVAL
    os.close(fd)


def test_models_that_cannot_be(library, adders):
    """Indices of no operand, a rank beyond reason, an unfinished model, one that the device refuses."""
    burst, model, room = adders(), handle_of(library, "burst_builder_new"), c_void_p()
    assert library.burst_builder_operation(model, b"ADD", 1, shape(0), 0, None) == -errno.EINVAL
    assert library.burst_builder_operation(model, None, 0, None, 0, None) == -errno.EINVAL
    assert library.burst_builder_operand(model, 3, 33, shape(*[1] * 33), c_float(0), 0) == -errno.EINVAL
    assert library.burst_prepare(burst.client, model, ANY, byref(room)) == -errno.EINVAL
    assert library.burst_builder_operand(model, 3, 1, shape(4), c_float(0), 0) == 0
    assert library.burst_builder_operand(model, 3, 1, shape(4), c_float(0), 0) == 1
    checked(library, library.burst_builder_operation(model, b"NO_SUCH", 1, shape(0), 1, shape(1)))
    checked(library, library.burst_builder_finish(model, 1, shape(0), 1, shape(1)))
    assert library.burst_prepare(burst.client, model, ANY, byref(room)) == 4
    assert "NO_SUCH" in why(library)
    assert library.burst_prepare_file(burst.client, b"no.txt", 0, None, 0, None, ANY, byref(room)) == -errno.EINVAL
    assert library.burst_prepare_file(burst.client, b"/no.onnx", 0, None, 0, None, ANY, byref(room)) == -errno.ENOENT
    assert burst.adds()


def test_a_request_of_another_controller(library, adders):
    """Its slots mean other memory there."""
    one, other = adders(), adders()
    assert one.run(request=other.request) == -errno.EINVAL
    assert one.adds()


def test_two_threads_are_kept_apart(adders, device):
    """One waits for a result; another one's wait is -EBUSY, and its request goes out all the same."""
    burst = adders()
    pool, _ = burst.new_pool()
    second = burst.new_request(pool)
    assert burst.adds()
    device["engine"].signal(signal.SIGSTOP)
    assert burst.submit()[0] == 0
    results = []

    def wait():
        while (found := burst.wait()[0]) == -errno.EBUSY:  # the other one looks just now
            pass
        results.append(found)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: burst.wait(1)[0] == -errno.EBUSY)
    assert burst.submit(second)[0] == 0
    device["engine"].signal(signal.SIGCONT)
    waiting.join(20)
    assert results == [0]
    assert burst.wait()[0] == 0


def test_closing_ends_a_wait(adders, device, library):
    """Of another thread, by -ECANCELED; its request may be freed."""
    burst = adders()
    device["engine"].signal(signal.SIGSTOP)
    assert burst.submit()[0] == 0
    results, at_it = [], threading.Event()

    def wait():
        at_it.set()
        results.append(burst.wait()[0])

    waiting = threading.Thread(target=wait)
    waiting.start()
    at_it.wait()
    checked(library, library.burst_close(burst.controller))
    waiting.join(20)
    assert results[0] in {-errno.ECANCELED, -errno.EBADF}
    checked(library, library.burst_request_free(burst.request))
    device["engine"].signal(signal.SIGCONT)


def test_a_forked_child_has_none_of_it(adders, library):
    """Every handle is -ECANCELED in the child, which may make its own; the parent goes on."""
    burst = adders()
    assert burst.adds()
    pid = os.fork()
    if not pid:
        found = [
            *(burst.run(), burst.submit()[0], burst.wait()[0]),
            *(library.burst_close(burst.controller), library.burst_disconnect(burst.client)),
        ]
        mine = adder(library)
        os._exit(0 if set(found) == {-errno.ECANCELED} and library.burst_builder_free(mine) == 0 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert burst.adds()


ANSWERS = {
    "nothing": b"",
    "no msgpack": b"\xc1\xc1",
    "a map": msgpack.packb({1: 2}),
    "too few values": msgpack.packb([1, 0]),
    "no life page": msgpack.packb([1, 0, 4, "liar", "1", "CPU", 1, 1, 0, 0, []]),
    "a status that is none": msgpack.packb([1, 99, "text"]),
    "a refusal without words": msgpack.packb([1, 4]),
    "another call's": msgpack.packb([7, 0, 4]),
    "a text longer than the message": b"\x93\x01\x04\xdb\xff\xff\xff\xff",
    "a list longer than the message": b"\xdd\xff\xff\xff\xff",
    "an ext type": b"\x93\x01\x00\xc7\xff\x01",
    "last words": msgpack.packb([-1, "tired\n\x1b"]),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_device_that_lies_at_hello(library, place, answer):
    """Whatever it answers, the client is refused with a reason, at once or when the device hangs up."""
    path = f"{place}/liar.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()

        def serve():
            for _ in range(3):  # a client whose device ends at once tries three times
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.recv(65536)
                connection.send(ANSWERS[answer])
                connection.close()

        liar = threading.Thread(target=serve)
        liar.start()
        room = c_void_p()
        result = library.burst_connect_path(path.encode(), byref(room))
        listener.shutdown(socket.SHUT_RDWR)
        liar.join(20)
    assert result in {-errno.EPIPE, -errno.EBADMSG, 4}
    assert why(library)
    assert "\x1b" not in why(library)
    assert not room.value
