"""docs/source-documents.md has each requirement of the source documents, with code and tests.

`tests/test_docs.py` holds it, as every page, to code and tests that exist.
"""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.sources

PAGE = Path(__file__).parents[1] / "docs/source-documents.md"
REQUIREMENTS = 38
SECTIONS = {
    "Bursts and fast message queues": range(1, 11),
    "Memory pools": range(11, 20),
    "Compilation caching": range(20, 26),
    "Quality of service": range(26, 30),
    "Driver": range(30, REQUIREMENTS + 1),
}


def rows(text):
    """(number, requirement, code, tests) of each row of a part of the page."""
    found = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    return [(int(number), *rest) for number, *rest in found]


def test_each_requirement_has_its_row():
    """Once, in its document, in order."""
    _, *parts = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    found = {part.partition("\n")[0]: [number for number, *_ in rows(part)] for part in parts}
    assert found == {section: list(numbers) for section, numbers in SECTIONS.items()}


@pytest.mark.parametrize("row", rows(PAGE.read_text()), ids=lambda row: str(row[0]))
def test_each_row_says_where_it_is_and_what_shows_it(row):
    """Nothing stands in its last two columns but names, at least one in each."""
    _, _, code, tests = row
    assert re.fullmatch(r"`[\w/]+\.(py|[ch]): [\w.]+`(, `[\w/]+\.(py|[ch]): [\w.]+`)*", code), code
    assert re.fullmatch(r"`tests/[\w/]+\.py(::\w+)*`(, `tests/[\w/]+\.py(::\w+)*`)*", tests), tests
