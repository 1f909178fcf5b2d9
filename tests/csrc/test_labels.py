"""Every synchronisation edge has a name, written at both of its sides and explained in csrc/README.md."""

import re

import pytest


def marks(csrc):
    """label -> places, from `pairs: LABEL` comments."""
    found = {}
    for path in sorted(csrc.rglob("*.[ch]")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for label in re.findall(r"pairs: ([A-Z_]+)", line):
                found.setdefault(label, []).append(f"{path.name}:{number}")
    return found


def test_each_label_stands_at_two_places_or_more(csrc):
    """A release without its acquire orders nothing."""
    assert {label: where for label, where in marks(csrc).items() if len(where) < 2} == {}


def test_the_readme_explains_exactly_these_labels(csrc):
    """The table of edges has one row per label, and no row for an edge that is gone."""
    table = re.findall(r"^\| `([A-Z_]+)` \|", (csrc / "README.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(marks(csrc))


def test_each_relaxed_access_says_why(csrc):
    """Relaxed is the exception that needs a reason, on its line or in the comment above."""
    for path in sorted(csrc.rglob("*.c")):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if "memory_order_relaxed" not in line:
                continue
            near = "\n".join(lines[max(0, number - 4) : number + 1])
            assert re.search(r"relaxed,? (?:because|for)|no order is needed", near, re.IGNORECASE), (
                f"{path.name}:{number + 1}"
            )


def test_the_readme_has_the_map_of_the_control_block(csrc):
    """Every word of layout.h stands in the README with its offset."""
    readme = (csrc / "README.md").read_text()
    for word, offset in re.findall(r"offsetof\(fmq_control, (\w+)\) == (\d+)", (csrc / "fmq/layout.h").read_text()):
        assert re.search(rf"^\| {offset} \| `{word}", readme, re.MULTILINE), f"{word} at {offset}"


@pytest.mark.parametrize("file", ["fmq/api.h", "burst/api.h"])
def test_each_exported_function_states_its_guarantee(csrc, file):
    """The README's table of progress has a row or a name for each function of an api.h."""
    names = re.findall(r"\b((?:fmq|burst)_\w+)\(", re.sub(r"/\*.*?\*/", "", (csrc / file).read_text(), flags=re.DOTALL))
    readme = (csrc / "README.md").read_text()
    assert [name for name in names if f"`{name}`" not in readme] == []


def test_the_models_carry_the_same_labels(csrc):
    """A step of csrc/model has the label of the C line that it stands for; what no model has is listed here."""
    not_modelled = {
        "ONE_CALLER",  # one caller per end is what the models begin with
        "FREE_RUN",  # one word, which only single read-modify-writes change; plan_race.c and fuzz_listener.c try it
        "TURN",  # under one lock, and a single word for each that waits; run_queue_race.c tries it
        "BELL",  # as SLEEP, of two words; test_timed.py tries it
        "RANGE",  # an order between two words of one process, for its signal handler
    }
    texts = [path.read_text() for path in sorted((csrc / "model").glob("*.pml"))]
    assert texts
    modelled = {label for text in texts for label in re.findall(r"pairs: ([A-Z_]+)", text)}
    assert modelled == set(marks(csrc)) - not_modelled
