"""The command as a whole: what it promises of every sub-command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from driver.cli.command import COMMANDS, burst
from driver.cli.output import print_json, spelled

SHELLS = ("bash", "zsh", "fish")


def all_commands(group=burst, words=()):
    """Each with the words that call it, groups left out."""
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if isinstance(found, click.Group):
            yield from all_commands(found, (*words, name))
        else:
            yield " ".join((*words, name)), found


EACH = pytest.mark.parametrize("found", [pytest.param(found, id=name) for name, found in all_commands()])


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_table_says_what_the_docstring_says(name):
    """A summary in the table is the first sentence of the sub-command's own help."""
    found = burst.get_command(click.Context(burst), name)
    assert found.help.startswith(COMMANDS[name].summary)
    assert found.name == name


@EACH
def test_every_command_speaks_json(found):
    """All but `completion`, which prints a program for a shell, and `exec`, which becomes one: its report is JSON."""
    options = {option for parameter in found.params for option in parameter.opts}
    assert "--json" in options or found.name in {"completion", "exec"}


@EACH
def test_every_option_is_explained(found):
    """Each has a word of help, or choices that speak for themselves."""
    options = [parameter for parameter in found.params if isinstance(parameter, click.Option)]
    assert [o.name for o in options if not (o.help or isinstance(o.type, click.Choice))] == []


@EACH
def test_every_command_helps(found, command):
    """-h prints its help, and ends well."""
    words = next(name for name, other in all_commands() if other is found).split()
    assert "Usage: " in command(*words, "-h").out


def test_the_page_has_everything():
    """docs/command.md names every sub-command, and every option of those that it is the guide to."""
    page = (Path(__file__).parents[3] / "docs/command.md").read_text()
    assert [name for name in COMMANDS if f"burst {name}" not in page] == []
    guided = {name: found for name, found in all_commands() if name in ("devices", "run", "bench", "completion")}
    options = {parameter.opts[0] for found in guided.values() for parameter in found.params}
    assert [option for option in options if option.startswith("-") and option not in page] == []


@pytest.mark.integration
def test_help_imports_no_sub_command():
    """`burst --help` and the completion of a name stay quick, however much the sub-commands need."""
    for environment in ({}, {"COMP_WORDS": "burst d", "COMP_CWORD": "1", "_BURST_COMPLETE": "bash_complete"}):
        code = (
            "import sys\nfrom driver.cli import main\nsys.argv[1:] = ['--help']\n"
            "try: main()\nfinally: print([name for name in sys.modules if name in "
            f"{[place.attribute.partition(':')[0] for place in COMMANDS.values()]}], 'rich.table' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        assert done.stdout.endswith("[] False\n"), done.stdout + done.stderr
        assert "devices" in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["devces"], "no such command: 'devces'"),
        (["devces"], "did you mean 'devices'?"),
        (["nothing-like-it"], "choose from bench, cache"),
        (["vts", "refernce"], "did you mean 'reference'?"),
        (["serve", "litrt"], "did you mean 'litert'?"),
        (["bench", "--device", "onnxruntme"], "did you mean 'onnxruntime'?"),
        (["run", "x.onnx", "--device", "cpuu"], "no such device; the devices are"),
        (["run", "x.onnx", "--devise", "cpu"], "No such option"),
        (["vts", "no_module:Device"], "No module named 'no_module'"),
    ],
)
def test_a_mistyped_name_is_told_with_the_nearest(command, words, told):
    """It ends with 2, prints nothing on standard output, and says what there is."""
    found = command(*words, ends=2)
    assert told in found.err
    assert found.out == ""


@pytest.mark.integration
def test_what_fails_is_a_line(command, tmp_path, monkeypatch):
    """A runtime directory that cannot be used is no traceback, but a line on stderr, and ends with 1."""
    monkeypatch.setenv("BURST_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o755)
    assert "must be a directory of mode 0700" in command("vts", "reference", "--smoke", ends=1).err


@pytest.mark.parametrize("shell", SHELLS)
def test_prints_the_program_of_a_shell(command, shell):
    """As click has it, with the variable that it asks for."""
    assert "_BURST_COMPLETE" in command("completion", shell).out


def test_knows_the_shell(command, monkeypatch):
    """By $SHELL, when none is named; another one is told."""
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert command("completion").out.startswith("#compdef burst")
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert "unsupported $SHELL 'tcsh': pass one of" in command("completion", ends=2).err


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("burst d", {"devices", "doctor"}),
        ("burst run x.onnx --device ", {"litert", "onnxruntime", "reference", "cpu"}),
        ("burst vts ref", {"reference"}),
        ("burst serve li", {"litert"}),
        pytest.param("burst vts reference --filter q", {"qos/"}, marks=pytest.mark.integration),
        pytest.param(
            "burst vts reference --filter qos/preference/l", {"qos/preference/low_power"}, marks=pytest.mark.integration
        ),
        ("burst bench queue_t", {"queue_throughput"}),
        ("burst run x.onnx --pri", {"--priority"}),
    ],
)
def test_the_shell_completes(line, found, monkeypatch, capsys):
    """Sub-commands, devices, tests, scripts and options."""
    words = line.split(" ")
    for name, value in (
        ("COMP_WORDS", line),
        ("COMP_CWORD", str(len(words) - 1)),
        ("_BURST_COMPLETE", "bash_complete"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        burst(prog_name="burst")
    told = {row.partition(",")[2] for row in capsys.readouterr().out.splitlines()}
    assert found <= told
    assert all(name.startswith(words[-1]) for name in told if name)


@pytest.mark.integration
@pytest.mark.skipif(not os.path.exists("/bin/bash"), reason="needs bash")
def test_the_program_for_bash_is_one():
    """bash takes what is printed for it."""
    printed = subprocess.run(
        [sys.executable, "-m", "driver.cli", "completion", "bash"], capture_output=True, check=True
    )
    subprocess.run(["/bin/bash", "-n"], input=printed.stdout, check=True)


def test_json_has_no_numbers_of_its_own(capsys):
    """What JSON does not know is null, wherever it stands."""
    print_json({"a": [float("nan"), (float("inf"), 1.5)], "b": {"c": None}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, [None, 1.5]], "b": {"c": None}}


def test_times_are_spelled_with_three_digits():
    """In the unit of the figure, which the interval shares."""
    assert [spelled(us) for us in (None, 0.1234, 12.34, 4567, 1_500_000)] == [
        "-",
        "0.123 us",
        "12.3 us",
        "4.57 ms",
        "1.50 s",
    ]
    assert spelled(999.4, 10, 12345) == "999 us [10.0 .. 12345]"


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("run", "/nonexistent.onnx", "--json"), 2),
        (("devcies", "--json"), 2),
        (("devices", "--json", "--wings"), 2),
        (("run", "--json"), 2),
        (("cache", "verify", "--json", "--path", "/proc/none"), None),
    ],
)
def test_an_error_below_json_is_json(words, status):
    """An object with the text and the status, which is that of the process; the text is on standard error, too."""
    done = subprocess.run(
        [sys.executable, "-m", "driver.cli", *words], capture_output=True, text=True, timeout=60, check=False
    )
    if status is None:  # whichever way it ends, standard output is JSON
        json.loads(done.stdout)
        return
    told = json.loads(done.stdout)
    assert told["status"] == done.returncode == status
    assert f"Error: {told['error']}" in done.stderr


def test_a_command_that_is_run_may_have_a_json_of_its_own():
    """What comes after -- belongs to it."""
    words = [sys.executable, "-m", "driver.cli", "exec", "--", "/nonexistent/program", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
