"""`burst vts`: what it prints, what it writes, and how it ends."""

import json
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest
from case_records import ADD, QUANTISED

from burst_engine.names import install_command

WRONG = {**ADD, "name": "wrong", "expected": [[1.5, 4.5]]}
FAILING = {**ADD, "name": "must_fail", "expect_failure": True}
UNKNOWN = {**ADD, "name": "unknown", "operations": [{"type": "FUTURE_OP", "inputs": [0, 1, 2], "outputs": [3]}]}


OTHER_WAYS = ("async", "fenced", "blobs", "buffers", "deadlines")
WAYS = 3 + len(OTHER_WAYS)  # as it is, in a burst, with open outputs


def run_json(vts, *arguments):
    result = vts(*arguments, "--json")
    return json.loads(result.stdout), result


@pytest.mark.integration
def test_cases_of_a_file_are_run_in_all_their_variations(vts, write):
    """As they are, with open outputs, in a burst, as signed twins, and on all other paths."""
    found, result = run_json(vts, "reference", "--cases", write(ADD, QUANTISED), "--filter", "operations/add_*")
    assert [test["name"] for test in found["tests"]] == [
        *("operations/add_two", "operations/add_two/burst", "operations/add_two/dynamic"),
        *("operations/add_quantised", "operations/add_quantised/burst", "operations/add_quantised/dynamic"),
        "operations/add_quantised/signed",
        *(f"operations/{name}/{way}" for name in ("add_two", "add_quantised") for way in OTHER_WAYS),
    ]
    assert {test["outcome"] for test in found["tests"]} == {"passed"}
    assert result.exit_code == 0


def test_a_device_supports_both_signs_or_neither(vts, write):
    """As VTS couples TENSOR_QUANT8_ASYMM with its signed twin: a device that supports one of the two fails."""
    found, _ = run_json(
        vts, "burst_test_devices.broken:Uncoupled", "--cases", write(QUANTISED), "--filter", "*/add_quantised*/signed"
    )
    (test,) = found["tests"]
    assert test["outcome"] == "failed"
    assert test["message"] == "the device supports the unsigned form and not its signed twin"


def test_json_adds_up(vts, write):
    """Device and version, a summary, the same by category, and every test with what came of it."""
    found, result = run_json(vts, "reference", "--cases", write(ADD, WRONG, UNKNOWN), "--filter", "operations/[auw]*")
    assert found.keys() == {"device", "version", "summary", "categories", "tests"}
    assert found["device"] == "reference"
    assert found["version"].startswith("1 (numpy")
    outcomes = [test["outcome"] for test in found["tests"]]
    assert found["summary"] == {kind: outcomes.count(kind) for kind in ("passed", "failed", "skipped")}
    assert found["categories"] == {"operations": found["summary"]}
    assert found["summary"]["failed"] == WAYS
    assert found["summary"]["skipped"] == WAYS
    for test in found["tests"]:
        assert test.keys() == {"name", "category", "family", "outcome", "message", "seconds"}
        assert test["category"] == "operations"
        assert bool(test["message"]) == (test["outcome"] != "passed")
        assert test["seconds"] >= 0
    assert (result.exit_code, result.stderr) == (1, "")


OWN_CASES = """
import numpy as np
import driver
from driver.vts import Case

m = driver.ModelBuilder()
x = m.input("float32", (2, 2))
m.output(m.operation("ADD", x, x, 0))
model, feeds = m.build(), (np.arange(1, 5, dtype=np.float32).reshape(2, 2),)

def right():
    yield Case("own_array", model, feeds, (2 * feeds[0],))
    yield Case("own_list", model, feeds, [[[2, 4], [6, 8]]])

def wrong():
    yield Case("own_wrong", model, feeds, [np.array([[2, 4], [6, 9]], np.float32)])

def too_many():
    yield Case("own_too_many", model, feeds, [[2, 4, 6, 8], [1]])
"""


def test_operations_of_ones_own_are_tested_by_cases_of_ones_own(vts):
    """A function yields them, of operations of an extension: they are executed on all paths, in a burst, too."""
    place = "burst_test_devices.extended"
    found, result = run_json(vts, f"{place}:FixedPoint", "--cases", f"{place}:cases", "--filter", "operations/fixed*")
    outcomes = {test["name"]: (test["outcome"], test["message"]) for test in found["tests"]}
    assert outcomes.keys() >= {f"operations/fixed_there{way}" for way in ("", "_and_back", "/burst", "/async")}
    assert {outcome for outcome, _ in outcomes.values()} == {"passed"}, outcomes
    assert result.exit_code == 0


def test_expected_outputs_of_any_shape(vts, tmp_path, monkeypatch):
    """A function gives them as an array of the output's shape, or as lists; a wrong value is told, and so is a list too
    many.
    """
    (tmp_path / "own_cases.py").write_text(OWN_CASES)
    monkeypatch.syspath_prepend(str(tmp_path))
    found, _ = run_json(vts, "reference", "--cases", "own_cases:right", "--filter", "operations/own_*", "--smoke")
    assert {test["outcome"] for test in found["tests"]} == {"passed"}
    found, _ = run_json(vts, "reference", "--cases", "own_cases:wrong", "--filter", "operations/own_wrong")
    (told,) = (test["message"] for test in found["tests"])
    assert told == "output 0 (TENSOR_FLOAT32): 1 of 4 values are wrong; value 3 is 8 and should be 9"
    result = vts("reference", "--cases", "own_cases:too_many", "--list")
    assert result.exit_code == 2
    assert "the expected outputs of 'own_too_many': 2 lists of values for 1 outputs" in result.stderr


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (
            "burst_test_devices.extended:none",
            "AttributeError: module 'burst_test_devices.extended' has no attribute 'none'",
        ),
        ("math:pi", "TypeError: 'float' object is not callable"),
        ("os:listdir", "which is no driver.vts.Case"),
    ],
)
def test_a_function_that_yields_no_cases_is_told(vts, place, told):
    """In the words of its error, or with what it yields."""
    result = vts("reference", "--cases", place, "--list")
    assert result.exit_code == 2
    assert told in result.stderr


def test_a_skip_names_the_operation(vts, write):
    """That the device, or this driver, does not have."""
    found, _ = run_json(vts, "reference", "--cases", write(UNKNOWN), "--filter", "operations/unknown")
    assert found["tests"][0]["message"] == "FUTURE_OP: this driver version has no such operation"
    found, _ = run_json(vts, "burst_test_devices.odd:Picky", "--filter", "operations/generated_mul_float32_1")
    assert found["tests"][0]["message"] == "MUL: not supported by the device"


def test_a_case_that_has_to_fail_fails_when_it_does_not(vts, write):
    """And passes when it is refused at any stage."""
    refused = {**FAILING, "name": "refused", "inputs": [0, 0], "feeds": [[1, 2], [1, 2]]}
    found, _ = run_json(vts, "reference", "--cases", write(FAILING, refused), "--filter", "operations/*[fr][au][is]*")
    outcomes = {test["name"]: test for test in found["tests"]}
    assert outcomes["operations/must_fail"]["message"] == "it was executed; it must fail"
    assert outcomes["operations/refused"]["outcome"] == "passed"


def test_list_prints_names_and_starts_nothing(vts, place):
    """One a line, with its family in AOSP, or the names as a list with --json; no device was needed."""
    lines = [line.split("\t") for line in vts("reference", "--list", "--filter", "qos/*").stdout.splitlines()]
    assert ["qos/endless_loop", "InfiniteLoopTimeoutTest"] in lines
    assert ["qos/timing/burst", "-"] in lines
    names = [name for name, _ in lines]
    assert names == json.loads(vts("reference", "--list", "--filter", "qos/*", "--json").stdout)
    assert "qos/deadline_passed" in names
    assert all(name.startswith("qos/") for name in names)
    assert place.pids() == []


def test_the_summary_is_by_category(vts, write):
    """With every failure named, and what was skipped counted by its reason."""
    text = vts("reference", "--cases", write(WRONG, UNKNOWN), "--filter", "operations/[wu]*").stdout
    assert "failed operations/wrong: output 0 (TENSOR_FLOAT32): 1 of 2 values are wrong; value 1 is 3.5" in text
    assert f"skipped {WAYS}: FUTURE_OP: this driver version has no such operation" in text
    (row,) = (line for line in text.splitlines() if "│ operations" in line)
    assert row.split() == ["│", "operations", "│", "0", "│", str(WAYS), "│", str(WAYS), "│"]


@pytest.mark.integration
def test_junit_says_the_same(vts, write, tmp_path):
    """A suite for each category, a case for each test, failures and skips with their words."""
    out = tmp_path / "out.xml"
    arguments = ("reference", "--cases", write(ADD, WRONG, UNKNOWN), "--filter", "[oq][po][es]*/[aduw]*")
    found, _ = run_json(vts, *arguments, "--junit", out)
    root = ET.parse(out).getroot()
    assert [suite.get("name") for suite in root] == list(found["categories"]) == ["operations", "qos"]
    for kind, count in (("tests", len(found["tests"])), *((k, found["summary"][j]) for k, j in KINDS.items())):
        assert root.get(kind) == str(count) == str(sum(int(suite.get(kind)) for suite in root))
    cases = {f"{case.get('classname')}/{case.get('name')}": case for case in root.iter("testcase")}
    assert list(cases) == [test["name"] for test in found["tests"]]
    assert "values are wrong" in cases["operations/wrong"].find("failure").get("message")
    assert "FUTURE_OP" in cases["operations/unknown"].find("skipped").get("message")
    assert len(cases["operations/add_two"]) == 0


KINDS = {"failures": "failed", "skipped": "skipped"}


def known(path, version="1*", tests='["operations/wrong*"]', device="reference"):
    path.write_text(f'[[known]]\ndevice = "{device}"\nversion = "{version}"\ntests = {tests}\nreason = "issue 1"\n')
    return path


def test_a_known_failure_is_skipped(vts, write, tmp_path):
    """With its reason and what it was; the command ends well."""
    arguments = ("reference", "--cases", write(ADD, WRONG), "--filter", "operations/[aw]*")
    found, result = run_json(vts, *arguments, "--known-failures", known(tmp_path / "known.toml"))
    assert found["summary"] == {"passed": len(found["tests"]) - WAYS, "failed": 0, "skipped": WAYS}
    wrong = next(test for test in found["tests"] if test["name"] == "operations/wrong")
    assert wrong["message"].startswith("known failure (issue 1): output 0")
    assert result.exit_code == 0


@pytest.mark.parametrize("other", [{"version": "2*"}, {"device": "litert"}, {"tests": '["burst/*"]'}])
def test_what_is_known_of_others_does_not_count(vts, write, tmp_path, other):
    """Of another version, another device or another test."""
    arguments = ("reference", "--cases", write(WRONG), "--filter", "operations/wrong")
    assert vts(*arguments, "--known-failures", known(tmp_path / "known.toml", **other)).exit_code == 1


def test_a_known_failure_that_is_none_any_more_is_told(vts, write, tmp_path):
    """On standard error: the entry is to be removed."""
    arguments = ("reference", "--cases", write(ADD), "--filter", "operations/add_two")
    result = vts(*arguments, "--known-failures", known(tmp_path / "known.toml", tests='["operations/add*"]'))
    assert "operations/add* (issue 1) no longer fails: remove the entry" in result.stderr
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[[known]", "cannot be read"),
        ("known = 1", "it must consist of [[known]] tables"),
        ("[[knwon]]", "it must consist of [[known]] tables"),
        ('[[known]]\ndevice = "a"', "entry 1: it must have device, reason, tests, version"),
        (
            '[[known]]\ndevice="a"\nversion="1"\nreason=""\ntests="x"',
            "entry 1: tests='x': it must be a list of globs",
        ),
    ],
)
def test_a_bad_file_of_known_failures_is_bad_usage(vts, tmp_path, content, words):
    """With the entry and what it has to be."""
    path = tmp_path / "known.toml"
    path.write_text(content)
    result = vts("reference", "--filter", "device/name", "--known-failures", path)
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing argument 'DEVICE'"),
        (["referenc"], "no such device; the devices are"),
        (["no.such.module:Device"], "No module named"),
        (["reference", "--filter", "nothing/*"], "matches none of"),
        (["reference", "--cases", "none.jsonl"], "none.jsonl: cannot be read: [Errno 2] No such file"),
        (["reference", "--known-failures", "none.toml", "--filter", "device/name"], "none.toml: cannot be read"),
        (["reference", "--timeout", "0"], "--timeout 0.0"),
        (["reference", "--fliter", "x"], "No such option"),
    ],
)
def test_bad_usage_is_told_and_ends_with_2(vts, arguments, words):
    """What was wrong, and nothing on standard output."""
    result = vts(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


def test_a_malformed_case_is_bad_usage(vts, write):
    """With the number of its line."""
    result = vts("reference", "--cases", write(ADD, "{}"))
    assert result.exit_code == 2
    assert "line 2: the field" in result.stderr


def test_a_device_that_does_not_start_is_a_failure(vts):
    """Its log is named."""
    result = vts("burst_test_devices.odd:Broken", "--json")
    assert (result.exit_code, json.loads(result.stdout)["status"]) == (1, 1)
    assert "its log is" in result.stderr


def test_scopes_are_larger_and_larger(vts):
    """--smoke, nothing, --all."""
    smoke, usual, everything = (
        len(vts("reference", "--list", *scope).stdout.splitlines()) for scope in (["--smoke"], [], ["--all"])
    )
    assert smoke < usual < everything


@pytest.fixture
def process(shared, monkeypatch):
    """The command as a program, its outputs piped."""
    shared.enter(monkeypatch)

    def process(*arguments, code="from driver.cli import main; main()"):
        command = [sys.executable, "-W", "error", "-c", code, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    return process


@pytest.mark.integration
def test_a_pipe_gets_the_json_and_nothing_else(process):
    """No progress where nobody watches."""
    done = process("vts", "reference", "--filter", "device/version", "--json")
    assert json.loads(done.stdout)["summary"] == {"passed": 1, "failed": 0, "skipped": 0}
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_its_libraries_the_command_says_what_to_install(process, missing):
    """By the name of the extra."""
    code = f"import sys; sys.modules[{missing!r}] = None; from driver.cli import main; main()"
    # None in sys.modules: as if it were not installed
    done = process("vts", "reference", code=code)
    assert done.returncode == 2
    assert done.stderr == f"Error: {missing} is not installed: {install_command('cli')}\n"


def test_only_the_command_needs_its_libraries():
    """driver.vts can be used from a program that has neither click nor rich."""
    code = "import sys; sys.modules['click'] = sys.modules['rich'] = None; import driver.vts"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=60, check=False).returncode == 0
