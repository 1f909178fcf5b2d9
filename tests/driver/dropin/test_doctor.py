"""`burst doctor -- COMMAND`: what of a program runs where, said by one run of it."""

import json
import os
import subprocess
import sys

import pytest

from driver.doctor.program import of_processes

PROGRAM = """
import sys
import numpy as np
import onnxruntime
x = np.zeros((3, 64), np.float32)
onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"]).run(None, {"x": x})
options = onnxruntime.SessionOptions()
options.add_session_config_entry("session.unheard_of", "1")
onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"]).run(None, {"x": x})
print("its own output")
sys.exit(int(sys.argv[2]))
"""


def doctor(*words, status=0):
    """`burst doctor --json -- WORDS`: its findings, and what is on standard error."""
    command = [sys.executable, "-m", "burst_engine", "doctor", "--json", "--", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=os.environ)
    assert ended.returncode == status, ended.stderr
    return json.loads(ended.stdout) if status == 0 else [], ended.stderr


def test_says_what_runs_where_and_why(home, net):
    """A session in the device, one in the program with its reason, and how the program ended."""
    findings, error = doctor(sys.executable, "-c", PROGRAM, net, 3)
    assert "its own output" in error
    assert "runs in a device" not in error  # no table beside the findings
    model, reason, end = findings
    assert (model["subject"], model["state"]) == ("net.onnx", "ok")
    assert model["found"] == "1 runs in the device onnxruntime, 1 runs in the program; 2 sessions"
    assert (reason["subject"], reason["state"]) == ("net.onnx", "note")
    assert "in the program, 1 times: the options have the configuration entry 'session.unheard_of'" in reason["found"]
    assert (end["subject"], end["found"]) == ("the program", "ended with exit status 3")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ((sys.executable, "-c", "pass"), 0, "no process of it has made a session"),
        ((sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"), 0, "ended by signal 9"),
        (("/no/such/program",), 2, "/no/such/program: cannot be run: No such file or directory"),
    ],
    ids=["no session", "killed", "not there"],
)
def test_programs_of_which_nothing_is_known(words, status, said):
    """The one that runs no model, the one that is killed, and the one that does not exist are told apart."""
    findings, error = doctor(*words, status=status)
    assert any(said in text for text in (error, *(finding["found"] for finding in findings)))


def test_processes_are_added_up():
    """Eight workers of one program are one row of a model, and one of each reason."""
    row = {"model": "net.onnx", "device": "onnxruntime", "sessions": 1, "device_runs": 5}
    why = {"model": "net.onnx", "reason": "it has delegates", "remedy": "leave them out", "times": 2}
    model, reason = of_processes([{"models": [row], "in_process": [why]}] * 8)
    assert model.found == "40 runs in the device onnxruntime, 0 runs in the program; 8 sessions of 8 processes"
    assert (reason.found, reason.remedy) == ("in the program, 16 times: it has delegates", "leave them out")


def test_a_model_with_a_device_that_ran_elsewhere():
    """It has a device, and all of its runs were in the program: that is a note."""
    row = {"model": "net.onnx", "device": "onnxruntime", "sessions": 1, "process_runs": 5}
    (model,) = of_processes([{"models": [row], "in_process": []}])
    assert (model.state, model.why) == ("note", "no run of it is in a device")


def test_a_check_of_the_machine_is_none_of_a_program():
    """--start is refused beside a command, with the remedy."""
    command = [sys.executable, "-m", "burst_engine", "doctor", "--start", "--", "true"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 2
    assert "leave out --start, or the command" in ended.stderr
