"""Lines of C fit beside each other on a screen."""

import pytest

pytestmark = pytest.mark.sources


@pytest.mark.parametrize("folder", ["burst", "fmq", "libburst", "libfmq"])
def test_no_line_is_longer_than_100_columns(csrc, folder):
    """Code is clang-format's (`make check`), which leaves comments and strings as they are."""
    paths = [path for path in (csrc / folder).rglob("*") if path.suffix in (".c", ".h", ".hpp")]
    assert paths
    lines = [(path.name, n, line) for path in paths for n, line in enumerate(path.read_text().splitlines(), 1)]
    assert [f"{name}:{n}" for name, n, line in lines if len(line) > 100] == []
