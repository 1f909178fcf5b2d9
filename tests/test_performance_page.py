"""docs/performance.md and other pages say what was measured: their figures are those of bench/README.md."""

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
KEPT = measured_pages.kept(README)


def test_the_figures_are_those_of_the_bench():
    """Each with its command, its machine and its commit."""
    assert written(PAGE.read_text(), README) == PAGE.read_text(), "run bench/run.py --keep"


def test_each_result_names_its_command_and_its_machine():
    """A script that is there, its conditions, its commit, and a table."""
    for name, result in KEPT.items():
        command, where = result.heading.split("\n\n")
        script = re.match(r"`bench/(\w+\.py)", command)
        assert script, name
        assert (ROOT / "bench" / script[1]).is_file(), name
        assert re.search(r"Linux .*, Python .*, commit \w+.*; \d+ rounds$", where), name
        assert all(len(row) == len(head) for head, *rows in result.tables for row in rows), name


def test_there_are_no_figures_beside_them():
    """What is written by hand has none, so it cannot be wrong after the next measurement."""
    by_hand = measured_pages.PART.sub("", PAGE.read_text())
    assert re.findall(r"\d[\d.,]*\s*(?:ns|us|ms|s|%|x|times|[kKMG]i?B)\b", by_hand) == []


def test_every_result_has_a_place():
    """What was measured is on the page, or it is said here why not; bench/README.md has what a run measures."""
    elsewhere = {
        "queue_roundtrip.py --sizes",  # the picture says it
        "queue_throughput.py",  # so does its picture
        "burst_payload.py",  # so does its picture
        # The page links to these, which answer closer questions.
        "queue_throughput.py broadcast",
        "queue_idle.py",
        "queue_idle.py number",
        "burst_many.py",
        "burst_many.py top",
        "burst_roundtrip.py queue",
        "interference.py",
        "interference.py prepare",
        "fenced.py",
        "state.py",
        "qos.py --only behind",  # for who mixes priorities in one program: the whole list
        "sentences.py",  # for who generates text on a device: the whole list
        "cold_start.py cache",
        "cold_start.py constants",
        "idle_cost.py",
        "mobilenet.py --threads 2",  # for who asks for threads: the whole list
        "mobilenet.py threads",
        "ops.py",
        "burst_roundtrip.py c",  # for who writes clients in C: the whole list
        "burst_depth.py goodput",
        "joined.py",  # docs/howto/joined.md says when it pays
        "serving.py rows",  # so it does
        "serving.py images",  # the other kind of file: the whole list
        "pipelines.py",  # docs/is-it-for-me.md has the summary
        "pipelines.py web",  # so it has
        "embeddings.py",  # gateways are for those who look for them: the whole list
        "unchanged.py",  # and the start of a program
        "unchanged.py programs",  # and the memory of eight
        "oip.py",  # gateways are for those who look for them: the whole list
        "gateways.py gstreamer",
        "gateways.py satellites",
        "gateways.py frigate",  # needs a checkout of Frigate
        "paced.py cameras",  # measured with a fake camera so far
        "paced.py hint",  # measured beside other work so far, on a kernel that takes half of it
        "serving.py",  # needs a model file
        "renewal.py",  # the page of renewals says what it costs
        "session_runs.py",  # needs packages that ship weights; "From onnxruntime" has the summary
        "neighbours.py",  # measured on a machine that was busy so far
    }
    shown = {
        key
        for match in measured_pages.PART.finditer(PAGE.read_text())
        for key in measured_pages.of_script(match[2].split(";")[0], KEPT)
    }
    assert set(KEPT) - shown - elsewhere == set()
    assert set(bench.PLAN) <= set(KEPT)


def test_a_row_that_is_gone_is_missed():
    """A page that asks for what is not measured any more cannot be written."""
    with pytest.raises(NotThere, match="has no row"):
        part("burst_roundtrip.py; rows: burst, by carrier pigeon", README)
    with pytest.raises(NotThere, match=r"bench/run.py --only pigeon.py"):
        part("pigeon.py", README)


def test_results_take_the_place_of_those_before():
    """With command, machine, tables and budgets; what was not measured stays."""
    conditions = {
        "processor": "Cortex-A76",
        "processors": 4,
        "kernel": "Linux 6.18",
        "governor": "-",
        "load": [0.1] * 3,
    }
    found = {"median": 1.0, "low": 0.9, "high": 1.2, "confidence": 0.96}
    result = {
        "command": "fenced.py",
        "rounds": 9,
        "commit": "0123abcd",
        "conditions": {**conditions, "python": "3.14", "numpy": "2.4", "at": "2027-01-01"},
        "tables": [{"head": ["", "us"], "rows": [["fenced", "1.00"]]}],
        "budgets": [{"text": "as fast", "found": found, "unit": "x", "verdict": "met"}],
    }
    page = measured_pages.with_results(README, {"fenced.py": result})
    now = measured_pages.kept(page)
    assert now["fenced.py"].heading.startswith("`bench/fenced.py`\n\nCortex-A76")
    assert now["fenced.py"].tables == [[["", "us"], ["fenced", "1.00"]]]
    assert now["fenced.py"].budgets == "- as fast: 1.00 x [0.90 .. 1.20] -> met"
    assert {name: result for name, result in now.items() if name != "fenced.py"} == {
        name: result for name, result in KEPT.items() if name != "fenced.py"
    }
    shown = part("fenced.py; columns: us", page)
    assert "| fenced | 1.00 |" in shown
    assert "as fast" not in shown


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


@pytest.fixture
def pages(monkeypatch, tmp_path):
    """A README with a place for either script, and a page that shows one of them."""
    (tmp_path / "docs").mkdir()
    for name in ("README", "PAGE"):
        monkeypatch.setattr(bench, name, tmp_path / name)
    (tmp_path / "README").write_text(
        "".join(f"<!-- from {name} -->\n`bench/{name}`\n\nhere\n<!-- end -->\n" for name in ("one.py", "two.py"))
    )
    (tmp_path / "PAGE").write_text("<!-- from one.py -->\n<!-- end -->\n")
    return tmp_path


def test_a_quick_run_is_not_kept(monkeypatch, plan, pages):
    """It measures nothing, and nothing is written."""
    (plan / "mended").touch()
    before = (pages / "README").read_text()
    called(monkeypatch, plan, "--quick")
    with pytest.raises(SystemExit, match="--quick measures nothing"):
        called(monkeypatch, plan, "--keep")
    assert (pages / "README").read_text() == before


def test_what_is_kept_is_on_the_pages(monkeypatch, plan, pages):
    """With the picture of a script that draws; a result without a place is an error that says how to make one."""
    (plan / "mended").touch()
    monkeypatch.setattr(bench, "PICTURES", {"one.py": {"--plot": "docs/one.png"}})
    monkeypatch.setattr(measured_pages, "in_words", lambda _: "a machine")
    called(monkeypatch, plan)
    called(monkeypatch, plan, "--keep")
    assert (pages / "docs/one.png").read_text() == "a picture"
    assert "| one | 1.00 |" in (pages / "PAGE").read_text()
    assert "| two | 1.00 |" in (pages / "README").read_text()
    (pages / "README").write_text("")
    with pytest.raises(SystemExit, match=r"<!-- from one\.py --> <!-- end -->"):
        called(monkeypatch, plan, "--keep")


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
    there = "It takes 3 ms ([`bench/burst_many.py top`](performance.md#memory))."
    assert list(unlinked(f"{there}\n\nIt takes 3 ms (`bench/burst_many.py top`).\n\nIt waits 3 ms.")) == [
        "It takes 3 ms (`bench/burst_many.py top`)."
    ]


def test_a_figure_that_was_not_measured_is_found():
    """So that silence above means something."""
    anchor = "what-do-the-parts-of-a-service-on-many-nodes-cost"
    assert unmeasured(["3.76", "3.77 or 791"], anchor) == ["3.77 or 791"]
    with pytest.raises(AssertionError, match="no heading"):
        numbers_under("what-does-the-moon-cost")
