"""docs/performance.md and bench/README.md say what was measured: their figures are out of bench/measured.json."""

import copy
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import measured_pages
import run as bench
from measured_pages import NotThere, part, written

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/performance.md"
README = (ROOT / "bench/README.md").read_text()
KEPT = json.loads(measured_pages.KEPT.read_text())


@pytest.mark.parametrize("page", measured_pages.PAGES, ids=lambda page: page.name)
def test_the_figures_are_those_of_the_bench(page):
    """Each with its command, its machine and its commit, as the scripts gave them."""
    assert written(page.read_text(), KEPT) == page.read_text(), "run bench/run.py --keep"


def test_there_are_no_figures_beside_them():
    """What is written by hand has none, so it cannot be wrong after the next measurement."""
    by_hand = measured_pages.PART.sub("", PAGE.read_text())
    assert re.findall(r"\d[\d.,]*\s*(?:ns|us|ms|s|%|x|times|[kKMG]i?B)\b", by_hand) == []


def test_every_result_has_a_place():
    """What was measured is in bench/README.md in full, and on the page or it is said here why not."""
    elsewhere = {
        "queue_roundtrip.py --sizes",  # the picture says it
        "queue_throughput.py",  # so does its picture
        "mobilenet.py --threads 2",  # for who asks for threads: the whole list
        "thread_count.py",
        "ops.py",
        "burst_from_c.py",  # for who writes clients in C: the whole list
        "goodput.py",
        "oip.py",  # gateways are for those who look for them: the whole list
        "gstreamer.py",
        "satellites.py",
        "frigate.py",  # needs a checkout of Frigate
        "cameras.py",  # measured with a fake camera so far
        "serving.py",  # needs a model file
        "neighbours.py",  # measured on a machine that was busy so far
    }
    shown = {
        page: {
            key
            for match in measured_pages.PART.finditer(page.read_text())
            for key in measured_pages.of_script(match[2].split(";")[0], KEPT["results"])
        }
        for page in measured_pages.PAGES
    }
    assert set(KEPT["results"]) - shown[ROOT / "bench/README.md"] == set()
    assert set(KEPT["results"]) - shown[PAGE] - elsewhere == set()


def test_a_row_that_is_gone_is_missed():
    """A page that asks for what is not measured any more cannot be written."""
    with pytest.raises(NotThere, match="has no row"):
        part("burst_roundtrip.py; rows: burst, by carrier pigeon", KEPT)
    with pytest.raises(NotThere, match=r"bench/run.py --only pigeon.py"):
        part("pigeon.py", KEPT)


def test_rows_of_another_machine_stand_below_ours():
    """With its conditions; a table with other columns is left out, and so is a result that it lacks."""
    other = copy.deepcopy({name: KEPT["results"][name] for name in ("burst_depth.py", "fenced.py")})
    other["burst_depth.py"]["conditions"]["processor"] = "Cortex-A76"
    other["fenced.py"]["tables"][0]["head"] = ["", "something else"]
    alone = {**KEPT, "others": []}
    measured = {**alone, "others": [{"results": other}]}
    lines = part("burst_depth.py", measured).split("\n")
    ours = [number for number, line in enumerate(lines) if line.startswith("| sleeping producer, depth 1 |")]
    assert lines[ours[0] + 1].startswith("| *machine 2*, sleeping producer, depth 1 |")
    assert any(line.startswith("*machine 2*: Cortex-A76, ") for line in lines)
    verdicts = part("burst_depth.py; budgets: all", measured).split("\n")
    (verdict,) = (line for line in verdicts if line.startswith("- sleeping producer: "))
    found, beside = verdict.split("; ")
    assert found.endswith(beside.removeprefix("*machine 2*"))
    assert "| *machine 2*" not in part("fenced.py", measured)
    assert part("idle_cost.py", measured) == part("idle_cost.py", alone)


def test_rows_of_one_name_are_told_apart():
    """Each has the other machine's row of the same place below it, and none if that has another number of them."""
    other = copy.deepcopy({"broadcast.py": KEPT["results"]["broadcast.py"]})
    measured = {**KEPT, "others": [{"results": other}]}
    table = [line for line in part("broadcast.py", measured).split("\n") if line.startswith("| ")][2:]
    assert [line.replace("*machine 2*, ", "") for line in table[1::2]] == table[::2]
    assert len({*table[::2]}) > len({line.split("|")[1] for line in table[::2]})
    other["broadcast.py"]["tables"][0]["rows"].pop()
    gone = table[-1].split("|")[1]
    assert f"|{gone}|" not in part("broadcast.py", measured)


def test_the_whole_bench_takes_less_than_45_minutes():
    """By what each script takes on two cores; each is there."""
    assert sum(seconds for seconds, _ in bench.PLAN.values()) < 45 * 60
    assert [name for name in bench.PLAN if not (ROOT / "bench" / name.split()[0]).is_file()] == []


@pytest.fixture
def plan(monkeypatch, tmp_path):
    """A bench of two scripts that count how often they ran; the second fails while there is no file `mended`."""
    program = """
import json, pathlib, sys
target, name = pathlib.Path(sys.argv[sys.argv.index("--json") + 1]), {name!r}
place = target.parent
with open(place / "ran", "a") as ran: print(name, file=ran)
if name == "two" and not (place / "mended").exists(): sys.exit("no")
if "--plot" in sys.argv: pathlib.Path(sys.argv[sys.argv.index("--plot") + 1]).write_text("a picture")
table = {{"head": ["", "us"], "rows": [[name, "1.00"]]}}
found = {{"pairs": 9, "question": "?", "conditions": {{}}, "tables": [table], "budgets": [],
          "subjects": [{{"name": name, "rounds": [1, 2]}}]}}
target.write_text(json.dumps(found))
"""
    folder = tmp_path / "bench"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.py").write_text(program.format(name=name))
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "PLAN", {"one.py": (10, ""), "two.py": (10, "")})
    return folder


def ran(folder):
    return (folder / "ran").read_text().split()


def called(monkeypatch, folder, *options):
    monkeypatch.setattr(sys, "argv", ["run.py", "--json", str(folder / "all.json"), *options])
    code = bench.main()
    return code, json.loads((folder / "all.json").read_text())["results"]


def test_the_bench_goes_on_where_it_was(monkeypatch, plan, capsys):
    """What failed runs again, what is there does not, unless it is asked for; figures of every round are dropped."""
    code, results = called(monkeypatch, plan)
    assert (code, ran(plan)) == (1, ["one", "two"])
    assert "exit status 1" in results["two.py"]["failed"]
    assert results["one.py"]["subjects"] == [{"name": "one"}]
    assert {"command", "commit", "seconds", "rounds", "tables"} <= results["one.py"].keys()
    assert "missing: two.py: exit status 1" in capsys.readouterr().out
    (plan / "mended").touch()
    code, results = called(monkeypatch, plan)
    assert (code, ran(plan)) == (0, ["one", "two", "two"])
    assert called(monkeypatch, plan)[0] == 0
    assert ran(plan) == ["one", "two", "two"]
    called(monkeypatch, plan, "--again", "--only", "one.py")
    assert ran(plan) == ["one", "two", "two", "one"]


def test_a_budget_ends_it_before_a_script_that_takes_longer(monkeypatch, plan, capsys):
    """Its name is told; the next run has it."""
    code, results = called(monkeypatch, plan, "--budget", "0.1")
    assert (code, results) == (0, {})
    assert "missing: one.py: there was no time; run this again" in capsys.readouterr().out


def test_a_quick_run_is_not_kept(monkeypatch, plan, tmp_path):
    """It measures nothing, here or on another machine; nothing is written."""
    monkeypatch.setattr(bench, "KEPT", tmp_path / "kept.json")
    (plan / "mended").touch()
    called(monkeypatch, plan, "--quick")
    with pytest.raises(SystemExit, match="--quick measures nothing"):
        called(monkeypatch, plan, "--keep")
    theirs = (plan / "all.json").rename(tmp_path / "theirs.json")
    called(monkeypatch, plan)
    with pytest.raises(SystemExit, match=r"theirs\.json: --quick measures nothing"):
        called(monkeypatch, plan, "--keep", "--other", str(theirs))
    assert not bench.KEPT.exists()


def test_pictures_are_kept_with_their_results(monkeypatch, plan, tmp_path):
    """A script that draws is told where to, and --keep puts the picture into the documentation."""
    (plan / "mended").touch()
    monkeypatch.setattr(bench, "PICTURES", {"one.py": {"--plot": "docs/one.png"}})
    monkeypatch.setattr(bench, "KEPT", tmp_path / "kept.json")
    monkeypatch.setattr(bench, "PAGES", ())
    (tmp_path / "docs").mkdir()
    called(monkeypatch, plan)
    called(monkeypatch, plan, "--keep")
    assert (tmp_path / "docs/one.png").read_text() == "a picture"
    assert set(json.loads((tmp_path / "kept.json").read_text())["results"]) == {"one.py", "two.py"}


def test_each_picture_of_the_bench_is_in_the_documentation():
    """Those that a run of the bench draws, of results that it has."""
    assert set(bench.PICTURES) <= set(bench.PLAN)
    for page in (page for pictures in bench.PICTURES.values() for page in pictures.values()):
        assert f"({page.removeprefix('docs/')})" in (ROOT / "docs/performance.md").read_text()
        assert (ROOT / page).is_file()


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def tables(lines):
    """Header, then rows, of each table."""
    text = "\n".join(line if line.startswith("|") else "" for line in lines)
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        header, _, *rows = table.strip().split("\n")
        yield cells(header), [cells(row) for row in rows]


def numbers_under(anchor):
    """Every number in the section of bench/README.md that has this anchor."""
    parts = re.split(r"^#+ (.*)$", README, flags=re.MULTILINE)
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        if re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") == anchor:
            return [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e[+-]\d+)?", text)]
    raise AssertionError(f"bench/README.md has no heading for #{anchor}")


def unmeasured(wanted, anchor):
    """The cells that no number of that section rounds to."""
    known = numbers_under(anchor)
    return [
        cell
        for cell in wanted
        for number in re.findall(r"\d+(?:\.\d+)?", cell)
        if float(number) not in {round(value, len(number.partition(".")[2])) for value in known}
    ]


COMPARISONS = ROOT / "docs/is-it-for-me.md"


def test_each_comparison_links_to_its_figures():
    """Every row with a figure names the section of the bench, and each of its cells is a number there, rounded."""
    rows = [
        (cells(line)[1:], line)
        for line in COMPARISONS.read_text().split("\n")
        if line.startswith("|") and re.search(r"\|\s*\d", line)
    ]
    assert len(rows) >= 12
    for those, line in rows:
        found = re.search(r"\(\.\./bench/README\.md#([\w-]+)\)", line)
        assert found, f"no link to the bench: {line}"
        assert unmeasured(those, found[1]) == [], line


def test_the_table_of_the_readme_is_measured():
    """Each figure of the README's one table is in the section of the bench that it links to."""
    text = (ROOT / "README.md").read_text()
    (anchor,) = re.findall(r"bench/README\.md#([\w-]+)\)", text)
    (table,) = tables(text.split("\n"))
    assert unmeasured([cell for row in table[1] for cell in row[1:]], anchor) == []


FIGURE = re.compile(r"\d[\d.,]* (?:ns|us|ms|s|[kMG]B|%|times)\b")
MEASURED = re.compile(r"`bench/\w+\.py|\b[Mm]easured (?:once|on|beside)\b|\bmedians? of \d|\bAMD EPYC\b")
TO_THE_BENCH = re.compile(r"\]\([\w./]*(?:bench/README|performance)\.md#[\w-]+\)")
BY_ITSELF = {"performance.md", "real-models.md"}  # their figures stand below the command that printed them


def unlinked(text):
    """Paragraphs that have a figure, say that it was measured, and do not say where. Code is left out, and so are
    tables, whose links stand in their rows or in the words around them."""
    prose = re.sub(r"^( *)```.*?^\1```|^\|.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n(?=\* )", prose):
        if FIGURE.search(paragraph) and MEASURED.search(paragraph) and not TO_THE_BENCH.search(paragraph):
            yield paragraph


def test_a_measured_figure_links_to_its_row():
    """On every page: where words say that a figure was measured, a link leads to the section of the bench."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name not in BY_ITSELF]
    found = {str(page.relative_to(ROOT)): list(unlinked(page.read_text())) for page in pages}
    assert {page: those for page, those in found.items() if those} == {}


def test_a_figure_without_a_link_is_found():
    """So that silence above means something."""
    there = "It takes 3 ms ([`bench/top.py`](performance.md#memory))."
    assert list(unlinked(f"{there}\n\nIt takes 3 ms (`bench/top.py`).\n\nIt waits 3 ms.")) == [
        "It takes 3 ms (`bench/top.py`)."
    ]


def test_a_figure_that_was_not_measured_is_found():
    """So that silence above means something."""
    anchor = "what-do-the-parts-of-a-service-on-many-nodes-cost"
    assert unmeasured(["3.76", "3.77 or 791"], anchor) == ["3.77 or 791"]
    with pytest.raises(AssertionError, match="no heading"):
        numbers_under("what-does-the-moon-cost")
