"""gunicorn, unchanged, whose workers run models in a device: made in each worker, or in the master before it forks."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import onnxruntime as real
import pytest
from needed_tools import give_up

pytestmark = pytest.mark.integration

APPLICATION = """
import os
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(os.environ["NET"], providers=["CPUExecutionProvider"])
before = os.getpid()

def application(environ, start_response):
    x = np.frombuffer(environ["wsgi.input"].read(), np.float32).reshape(-1, 64)
    y = session.run(None, {"x": x})[0].tobytes()
    start_response("200 OK", [("X-Pid", str(os.getpid())), ("X-Made-By", str(before)), ("Content-Length", str(len(y)))])
    return [y]
"""


def listens(path):
    """Whether a server takes connections there."""
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0


def asked(path, x):
    """The answer to one request of its own connection: bytes, the worker, and the process that made its session."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        head = f"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {x.nbytes}\r\n\r\n"
        connection.sendall(head.encode() + x.tobytes())
        with connection.makefile("rb") as answer:
            lines, _, body = answer.read().partition(b"\r\n\r\n")
    status, *fields = lines.decode().split("\r\n")
    assert status.endswith("200 OK"), lines
    told = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}
    return body, int(told["x-pid"]), int(told["x-made-by"])


@pytest.mark.parametrize("preload", [False, True], ids=["workers load", "the master loads"])
def test_workers_answer_from_a_device(place, kit, net, tmp_path, preload):
    """The same bits as in process from each of two workers, also after a kill of the device; then nothing is left, and
    the report has both workers.
    """
    if importlib.util.find_spec("gunicorn") is None:
        give_up("gunicorn is missing: pip install gunicorn")
    (tmp_path / "app.py").write_text(APPLICATION)
    path, report = tmp_path / "socket", tmp_path / "report.json"
    server = [sys.executable, "-m", "gunicorn", "--workers", "2", "--bind", f"unix:{path}", "--chdir", str(tmp_path)]
    words = [*server, *(["--preload"] if preload else []), "app"]
    command = [sys.executable, "-m", "burst_engine", "exec", "--report", str(report), "--", *words]
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    expected = real.InferenceSession(net, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0].tobytes()
    with (tmp_path / "log").open("w+") as log:
        program = subprocess.Popen(command, env=os.environ | {"NET": net}, stdout=log, stderr=log)
        try:
            kit.until(lambda: listens(path))
            for round_ in range(2):
                answers = {}
                while len(answers) < 2:
                    body, worker, maker = asked(path, x)
                    assert body == expected
                    assert (maker == program.pid) == preload
                    answers[worker] = maker
                if not round_:
                    for pid in place.pids():
                        os.kill(pid, signal.SIGKILL)
        finally:
            program.send_signal(signal.SIGTERM)
            status = program.wait()
        log.seek(0)
        assert status == 0, log.read()
    kit.until(lambda: not place.pids())
    rows = [row for process in json.loads(report.read_text())["processes"] for row in process["models"]]
    assert sum(row.get("device_runs", 0) for row in rows) >= 4
    assert sum(row.get("process_runs", 0) for row in rows) == 0
    assert len([row for row in rows if row.get("device_runs")]) == 2
