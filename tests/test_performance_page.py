"""docs/performance.md says what was measured; run this file as a program to write its figures from bench/README.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE, SOURCE = ROOT / "docs/performance.md", (ROOT / "bench/README.md").read_text()
PART = re.compile(r"(<!-- from (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def scripts(name):
    """The lines of each mark that a script's `--markdown` left in bench/README.md, whatever else it was told."""
    blocks = re.findall(r"<!-- (.*?) --markdown: begin -->\n\n(.*?)\n\n<!--", SOURCE, re.DOTALL)
    found = [text for mark, text in blocks if mark == name] or [text for mark, text in blocks if of(mark) == name]
    return [text.split("\n") for text in found]


def of(mark):
    return mark.partition(" ")[0]


def section(title):
    """A part that no script prints, as it stands there."""
    return re.search(rf"^### {re.escape(title)}\n\n(.*?)\n\n(?:###|<!--)", SOURCE, re.DOTALL | re.MULTILINE)[1]


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def tables(lines):
    """Header, then rows, of each table."""
    text = "\n".join(line if line.startswith("|") else "" for line in lines)
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        header, _, *rows = table.strip().split("\n")
        yield cells(header), [cells(row) for row in rows]


def cut(header, rows, columns, wanted):
    """A table with these columns and rows alone, and everything where none are named."""
    places = [0] + [header.index(column) for column in columns] if columns else list(range(len(header)))
    kept = [row for row in rows if not wanted or row[0] in wanted]
    lines = [[header[n] for n in places], ["---"] * len(places), *([row[n] for n in places] for row in kept)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def part(order):
    """What belongs between the marks: command, machine, the tables with those columns, what came of the budgets."""
    name, *options = order.split("; ")
    if name.startswith("section: "):
        return section(name.removeprefix("section: "))
    asked = dict(option.split(": ", 1) for option in options)
    columns, rows = (asked[key].split(" | ") if key in asked else [] for key in ("columns", "rows"))
    found = scripts(name)
    assert found, f"{name} has no figures in bench/README.md"
    there = {row[0] for lines in found for _, those in tables(lines) for row in those}
    assert set(rows) <= there, f"{name} has no row {set(rows) - there}"
    return "\n\n".join(shown(lines, columns, rows, asked.get("budgets") == "all") for lines in found)


def shown(lines, columns, rows, with_budgets):
    blocks = [f"`bench/{lines[0].strip('`')}`", lines[2]]
    blocks += [cut(*table, columns, rows) for table in tables(lines) if set(columns) <= set(table[0])]
    budgets = "\n".join(line for line in lines if line.startswith("- "))
    return "\n\n".join([*blocks, budgets] if with_budgets and budgets else blocks)


def written(page):
    return PART.sub(lambda match: f"{match[1]}\n{part(match[2])}\n\n{match[4]}", page)


def test_the_figures_are_those_of_the_bench():
    """Each with its command and its machine, as bench/README.md has them, which the scripts print."""
    assert written(PAGE.read_text()) == PAGE.read_text(), f"run {Path(__file__).name} as a program"


def test_there_are_no_figures_beside_them():
    """What is written by hand has none, so it cannot be wrong after the next measurement."""
    by_hand = PART.sub("", PAGE.read_text())
    assert re.findall(r"\d[\d.,]*\s*(?:ns|us|ms|s|%|x|times|[kKMG]i?B)\b", by_hand) == []


def test_every_script_of_the_bench_has_a_place():
    """What bench/README.md measured is on the page, or it is said here why not."""
    elsewhere = {
        "queue_roundtrip.py --sizes",  # the picture says it
        "queue_throughput.py",  # so does its picture
        "mobilenet.py --threads 2",  # for who asks for threads: the whole list
        "thread_count.py",
        "ops.py",
        "oip.py",  # gateways are for those who look for them: the whole list
        "gstreamer.py",
        "satellites.py MODELS",
        "frigate.py",  # needs a checkout of Frigate
        "cameras.py",  # measured with a fake camera so far
        "serving.py MODEL.onnx --shape 1,1,64,160",  # needs a model file
        "neighbours.py",  # measured on a machine that was busy so far
    }
    measured = set(re.findall(r"<!-- (.*?) --markdown: begin -->", SOURCE))
    here = {match[2].split(";")[0] for match in PART.finditer(PAGE.read_text())}
    left = {
        mark for mark in measured - here if mark not in elsewhere and (of(mark) not in here or of(mark) in measured)
    }
    assert left == set()


def test_a_row_that_is_gone_is_missed():
    """A page that asks for what is not measured any more cannot be written."""
    with pytest.raises(AssertionError, match="has no row"):
        part("burst_roundtrip.py; rows: burst, by carrier pigeon")


def measured(anchor):
    """Every number in the section of bench/README.md that has this anchor."""
    parts = re.split(r"^#+ (.*)$", SOURCE, flags=re.MULTILINE)
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        if re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") == anchor:
            return [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e[+-]\d+)?", text)]
    raise AssertionError(f"bench/README.md has no heading for #{anchor}")


def unmeasured(cells, anchor):
    """The cells that no number of that section rounds to."""
    known = measured(anchor)
    return [
        cell
        for cell in cells
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


def test_a_figure_that_was_not_measured_is_found():
    """So that silence above means something."""
    anchor = "what-do-the-parts-of-a-service-on-many-nodes-cost"
    assert unmeasured(["3.76", "3.77 or 791"], anchor) == ["3.77 or 791"]
    with pytest.raises(AssertionError, match="no heading"):
        measured("what-does-the-moon-cost")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
