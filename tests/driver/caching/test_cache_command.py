"""`burst cache`: what it prints, what it removes, and how it ends."""

import json
import os
import time

import pytest
from click.testing import CliRunner
from marked_sets import COUNTS, replace, wait_never

from driver.cli.cache import _age
from driver.cli.command import burst
from driver.runtime.cache.folder import About, Folder


@pytest.fixture
def cache(folder):
    """Runs `burst cache … --dir` in this process, with 200 columns."""

    def cache(*arguments, **more):
        return CliRunner(env={"COLUMNS": "200"}).invoke(burst, ["cache", *arguments, "--dir", str(folder.path)], **more)

    return cache


@pytest.fixture
def three(folder):
    """Entries of 1, 2 and 3 MB, used 3, 2 and 1 hours ago."""
    seen = set()
    for n in (1, 2, 3):
        entry = folder.entry(bytes([n]) * 32)
        with entry.locked(wait_never, None), entry.draft(COUNTS, About(f"MODEL_{n}", "litert", "2.3", n)) as draft:
            os.truncate(draft.files.data[0], n * 10**6)
            draft.commit()
        for path in folder.path.glob("*.hits"), folder.path.glob("*.json"):
            for file in path:
                if file not in seen:
                    seen.add(file)
                    os.utime(file, (time.time() - 3600 * (4 - n),) * 2)
    return folder


def models(folder):
    return sorted(entry.model for entry in folder.entries())


def test_list_says_what_there_is(cache, three):
    """Model, device, size, age, last use and hits, those used last first; and how much all of them take."""
    three.entry(bytes([1]) * 32).note_hit()
    lines = cache("list").stdout.splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "MODEL" in line]
    assert [(row[0], row[1], row[2], row[5]) for row in rows] == [
        ("MODEL_1", "litert, version 2.3", "1.0 MB", "1"),
        ("MODEL_3", "litert, version 2.3", "3.0 MB", "0"),
        ("MODEL_2", "litert, version 2.3", "2.0 MB", "0"),
    ]
    assert [row[4] for row in rows] == ["0 s", "1 h", "2 h"]
    assert rows[0][3] == f"{int(time.time() - 1) // 86400} d"
    assert lines[-1].endswith(f"3 compilations, 6.0 MB in {three.path} (limit 2,147.5 MB)")


def test_list_as_json_is_json_alone(cache, three):
    """With all that is known."""
    result = cache("list", "--json")
    found = json.loads(result.stdout)
    assert found[0].keys() == {"token", "model", "device", "version", "nbytes", "made", "used", "hits"}
    assert [entry["nbytes"] for entry in found] == [3 * 10**6, 2 * 10**6, 10**6]
    assert found[0]["token"] == "03" * 32
    assert (result.exit_code, result.stderr) == (0, "")


def test_an_empty_folder_is_no_error(cache):
    """Nothing to list, to prune or to ask about."""
    assert cache("list").stdout.startswith("0 compilations, 0.0 kB in ")
    assert cache("list", "--json").stdout == "[]\n"
    assert cache("prune").stdout == "removed 0 compilations, 0.0 kB\n"
    assert cache("clear").stdout == "removed 0 compilations, 0.0 kB\n"


def test_a_devices_words_are_text(cache, folder):
    """Neither markup nor control characters get to the terminal."""
    replace(folder.entry(bytes(32)), "first", model="[red]x[/red]\x1b[2J")
    out = cache("list").stdout
    assert "[red]x[/red]" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ([], ["MODEL_1", "MODEL_2", "MODEL_3"]),
        (["--most-mb", "5"], ["MODEL_2", "MODEL_3"]),
        (["--most-mb", "4"], ["MODEL_3"]),
        (["--most-mb", "0"], []),
        (["--older-than", "150m"], ["MODEL_2", "MODEL_3"]),
        (["--older-than", "9000s"], ["MODEL_2", "MODEL_3"]),
        (["--older-than", "30d"], ["MODEL_1", "MODEL_2", "MODEL_3"]),
        (["--older-than", "2w", "--most-mb", "3"], ["MODEL_3"]),
    ],
)
def test_prune_leaves_what_was_asked_for(cache, three, arguments, left):
    """By size and by age, and says how many it took."""
    result = cache("prune", *arguments)
    assert models(three) == left
    count = 3 - len(left)
    assert result.stdout.startswith(f"removed {count} compilation{'s' * (count != 1)}, ")


def test_who_is_being_made_anew_stays(cache, three):
    """And is counted, in words and in JSON."""
    with three.entry(bytes([1]) * 32).locked(wait_never, None):
        result = cache("prune", "--most-mb", "0", "--json")
        assert [entry["model"] for entry in json.loads(result.stdout)["removed"]] == ["MODEL_2", "MODEL_3"]
        assert json.loads(result.stdout)["in_use"] == 1
        assert (
            cache("clear", "--yes").stdout
            == "removed 0 compilations, 0.0 kB; kept 1 that other programs are compiling\n"
        )
    assert models(three) == ["MODEL_1"]


def test_clear_asks_first(cache, three):
    """And removes nothing without a yes; with one, everything."""
    result = cache("clear", input="n\n")
    assert f"Remove 3 compilations, 6.0 MB from {three.path}?" in result.stderr
    assert (result.exit_code, len(models(three))) == (1, 3)
    assert cache("clear", input="").exit_code == 1
    assert cache("clear", input="y\n").exit_code == 0
    assert list(three.path.iterdir()) == []


def test_clear_does_not_ask_twice(cache, three):
    """--yes is the answer."""
    result = cache("clear", "--yes", "--json")
    assert sorted(entry["model"] for entry in json.loads(result.stdout)["removed"]) == ["MODEL_1", "MODEL_2", "MODEL_3"]
    assert (models(three), result.stderr) == ([], "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prune", "--most-mb", "-1"], "--most-mb"),
        (["prune", "--most-mb", "x"], "'x' is not a valid"),
        (
            ["prune", "--older-than", "30"],
            "'--older-than': '30': expected a whole number and a unit (s, m, h, d, w), for example 30d",
        ),
        (["prune", "--older-than", "-3d"], "'-3d'"),
        (["prune", "--older-than", "1.5d"], "'1.5d'"),
        (["list", "--dir", "/nowhere/at/all"], "'--dir': Directory '/nowhere/at/all' does not exist"),
    ],
)
def test_wrong_arguments_are_named(cache, three, arguments, said):
    """With their values and what would be right, and with 2."""
    result = CliRunner().invoke(burst, ["cache", *arguments]) if "--dir" in arguments else cache(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(models(three)) == 3


def test_a_folder_of_others_is_refused(cache, folder):
    """With its path and a remedy, and with 2."""
    folder.path.chmod(0o777)
    result = cache("list")
    assert result.exit_code == 2
    assert f"--dir: {folder.path} may be written to by others; `chmod 0700`" in result.stderr


def test_what_cannot_be_removed_is_an_error(cache, three, monkeypatch):
    """Nobody is told that it is gone."""

    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "unlink", refuse)
    result = cache("clear", "--yes")
    assert result.exit_code == 2
    assert "Permission denied" in result.stderr
    assert "pass another folder with --dir" in result.stderr


def test_the_folder_is_the_users_own(monkeypatch, tmp_path):
    """When none is named: $XDG_CACHE_HOME/burst/compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    replace(Folder(tmp_path / "burst/compiled").entry(bytes(32)), "first", model="MINE")
    found = json.loads(CliRunner().invoke(burst, ["cache", "list", "--json"]).stdout)
    assert [entry["model"] for entry in found] == ["MINE"]


def test_ages_are_in_the_largest_unit():
    """Of which there is one; a clock that was put back makes nothing negative."""
    assert [_age(s) for s in (-5, 0, 59.9, 60, 3599, 3600, 86399, 86400, 10**9)] == [
        *("0 s", "0 s", "59 s", "1 m", "59 m", "1 h", "23 h", "1 d", "11574 d"),
    ]
