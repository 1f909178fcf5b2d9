"""A Chromium without a window, for tests of pages."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from needed_tools import give_up

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from browser import FLAGS, REMEDY, program


def module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        give_up(f"{error}: pip install '.[integration]'")


@contextmanager
def chromium() -> Iterator[Any]:
    """Playwright's browser."""
    playwright = module("playwright.sync_api")
    path = program() or give_up(REMEDY)
    with playwright.sync_playwright() as leading:
        browser = leading.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


def violations(page: Any) -> list[str]:
    """What axe finds against a page: rule, what it says, and the elements."""
    found = module("axe_playwright_python.sync_playwright").Axe().run(page).response["violations"]
    return [f"{each['id']}: {each['help']}: {[node['html'] for node in each['nodes']][:3]}" for each in found]
