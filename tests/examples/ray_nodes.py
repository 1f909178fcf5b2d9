"""A program for tests/examples/test_ray.py: a cluster of four nodes on this machine, each with a device of its own.

    python ray_nodes.py MODEL ROWS [KILLS]

Without KILLS: which actors meet at which device, errors and results that come from actors, and one death of each kind
while rows pass. With it: so many kills of actors and devices while rows pass. It ends with one line of JSON. It is no
part of pytest's process, because Ray has signal handlers, threads and warnings of its own.
"""

import contextlib
import io
import json
import os
import random
import select
import signal
import socket
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import numpy as np
import ray
import ray_data
import ray_serve
from ray import serve
from ray.cluster_utils import Cluster

import burst
import driver

NODES, SHARES, STORE = 4, 4, 80 << 20
ACTORS, BATCH = 6, 16  # rows that are taken at once
GAP = 1.2  # seconds between kills: a device that dies ten times in ten seconds is given up
PATIENCE = 60.0


@contextlib.contextmanager
def cluster():
    """The first node has this program, and nothing kills it."""
    its = {"num_cpus": 1, "object_store_memory": STORE, "resources": {"burst_device": SHARES}}
    nodes = Cluster(initialize_head=True, head_node_args={**its, "include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            nodes.add_node(**its)
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


def directory(node):
    return f"/tmp/burst-{os.getuid()}-{node[:16]}"


def directories():
    """The runtime directories of the nodes."""
    return {directory(node["NodeID"]) for node in ray.nodes()}


def processes():
    """Number, command line and environment of each process that this account may look at."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            place = Path("/proc", pid)
            yield int(pid), (place / "cmdline").read_bytes(), set((place / "environ").read_bytes().split(b"\0"))


def devices(places):
    """Services and engines that run for these directories. A launcher is none; it leads its session."""
    marks = {f"BURST_RUNTIME_DIR={place}".encode() for place in places}
    found = [pid for pid, words, values in processes() if b"\0-P\0" in words and marks & values]
    return [pid for pid in found if session(pid) not in {pid, None}]


def session(pid):
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)


def actors():
    """Processes that are actors of Ray Data, in this cluster: its processes have our mark."""
    mark = f"BURST_TEST_CLUSTER={os.environ['BURST_TEST_CLUSTER']}".encode()
    return [pid for pid, words, values in processes() if words.startswith(b"ray::MapWorker") and mark in values]


def kill(pids, choice):
    """One of them, waited for. False when there was none, or it was quicker."""
    if not pids:
        return False
    pid = choice.choice(pids)
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            return bool(poll.poll(PATIENCE * 1e3))
        finally:
            os.close(fd)
    return False


def expected(model, rows):
    """What a loop in this process gets, by row."""
    info = driver.load(model).inputs[0]
    made = [ray_data.read_image(number, tuple(info.shape)) for number in range(rows)]
    with driver.connect("litert") as device, device.prepare(driver.load(model)) as prepared, prepared.burst() as opened:
        return [opened.run(image).outputs[0].copy() for image in made]


def check(batches, right):
    """Takes all rows: none is missing, none comes twice, and each has its own answer. What was wrong, in numbers."""
    count, wrong = Counter(), 0
    for batch in batches:
        for number, answer in zip(batch["id"].tolist(), batch["answer"], strict=True):
            count[number] += 1
            wrong += not np.array_equal(answer, right[number])
    return {
        "rows": len(right),
        "lost": len(set(range(len(right))) - count.keys()),
        "doubled": sum(times > 1 for times in count.values()),
        "wrong": wrong,
    }


class Told(ray_data.Classifier):
    """Says where it is."""

    def where(self):
        its = self.device
        return ray.get_runtime_context().get_node_id(), os.environ["BURST_RUNTIME_DIR"], its.service_pid, its.engine_pid

    def result(self, image):
        return self.burst.run(image)

    def fail(self, error):
        raise error


def meetings(model):
    """Sixteen actors that are made at the same moment: by node, at which directories and devices they meet."""
    actor = ray.remote(num_cpus=0, resources={"burst_device": 1})(Told)
    these = [actor.remote(model, "litert") for _ in range(NODES * SHARES)]
    found = {}
    for node, *where in ray.get([one.where.remote() for one in these]):
        found.setdefault(node, []).append(where)
    return these, found


def errors(actor):
    """The names of error classes that did not come back as themselves, with their text."""
    bad = []
    sent = [burst.errors.status_error(status, "why") for status in burst.ErrorStatus if status]
    sent += [kind("why") for kind in (burst.PeerDied, burst.Quarantined, burst.Timeout, driver.DeviceFailed)]
    sent += [driver.ImportFailed("why", "Loop", 3), driver.errors.ExecutionFailed(1, "ADD", "why")]
    for error in sent:
        try:
            ray.get(actor.fail.remote(error))
        except type(error) as caught:
            its = caught.cause
            good = type(its) is type(error) and str(its) == str(error) and vars(its) == vars(error)
            bad += [] if good else [type(error).__name__]
        except Exception as other:  # noqa: BLE001
            bad.append(f"{type(error).__name__}: {type(other).__name__}")
    return bad


def served(model, image, choice):
    """What a deployment answers by its handle, by HTTP, after its device was killed, and to what is no image."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"port": port}, proxy_location="HeadOnly")
    handle = serve.run(ray_serve.application(model, 2))
    found = {"by handle": handle.classify.remote(image).result().tolist()}
    file = io.BytesIO()
    np.save(file, image)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", file.getvalue(), timeout=PATIENCE) as reply:
        found["by http"] = np.load(io.BytesIO(reply.read())).tolist()
    kill(devices(directories()), choice)
    found["after a death"] = [handle.classify.remote(image).result().tolist() for _ in range(4)]
    try:
        handle.classify.remote(image[:, :2]).result()
    except ValueError as error:
        found["no image"] = str(error.cause)
    serve.shutdown()
    return found


def node_dies(nodes):
    """kill -9 of the processes of a node that has a device, other than the first node."""
    for node in nodes.list_all_nodes()[1:]:
        if devices([directory(node.node_id)]):
            nodes.remove_node(node, allow_graceful=False)
            return True
    return False


def rows_that_survive(nodes, model, rows, choice):
    """After a few batches each a device dies, an actor, and a node that has both."""
    right, done = expected(model, rows), []
    ways = {
        "device": lambda: kill(devices(directories()), choice),
        "actor": lambda: kill(actors(), choice),
        "node": lambda: node_dies(nodes),
    }

    def batches():
        for number, batch in enumerate(ray_data.classified(model, rows, ACTORS).iter_batches(batch_size=BATCH)):
            yield batch
            left = [way for way in ways if way not in done]
            if number % 4 == 3 and left and ways[left[0]]():
                done.append(left[0])

    return {**check(batches(), right), "deaths": done}


def rows_beside_kills(model, rows, kills, choice):
    """Data sets one after the other, until so many have been killed."""
    right, count, total = expected(model, rows), Counter(), Counter()
    last = time.monotonic()

    def batches():
        nonlocal last
        for batch in ray_data.classified(model, rows, ACTORS).iter_batches(batch_size=BATCH):
            yield batch
            if time.monotonic() - last > GAP and count.total() < kills:
                kind = choice.choice(["actor", "device"])
                count[kind] += kill(actors() if kind == "actor" else devices(directories()), choice)
                last = time.monotonic()

    while count.total() < kills:
        total.update(check(batches(), right))
    return {**total, "kills": count}


def main():
    model, rows, kills = sys.argv[1], int(sys.argv[2]), int((sys.argv[3:] or [0])[0])
    choice, found = random.Random(kills), {}
    with cluster() as nodes:
        places = directories()
        if kills:
            found["beside kills"] = rows_beside_kills(model, rows, kills, choice)
        else:
            these, found["meetings"] = meetings(model)
            found["errors"] = errors(these[0])
            image = ray_data.read_image(0, (1, 64, 64, 3))
            result = ray.get(these[0].result.remote(image))
            found["result"] = [result.status.name, list(result.outputs.keys()), result.outputs[0].tolist()]
            found["right"] = expected(model, 1)[0].tolist()
            for one in these:
                ray.kill(one)
            found["served"] = served(model, image, choice)
            found["survived"] = rows_that_survive(nodes, model, rows, choice)
    end = time.monotonic() + PATIENCE
    while (left := devices(places)) and time.monotonic() < end:
        os.sched_yield()
    print(json.dumps({**found, "left": left}))


if __name__ == "__main__":
    main()
