"""Make docs/pictures/live_*.jpg: the live pages of both demos, wide and light, narrow and dark.

python docs/live_pictures.py     needs the extras `web` and `test`, and a Chromium; a minute
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from browser import FLAGS, REMEDY, program

FILLED = 11e3  # milliseconds after which the plots are full
VIEWS = {"wide": (1280, 900, "light"), "narrow": (390, 844, "dark")}


@contextmanager
def demo(kind: str) -> Iterator[str]:
    """Run that demo, and yield the address of its page."""
    command = [sys.executable, "-u", "-m", "driver.cli", "demo", kind, "--web", "--device", "litert"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        yield program.stdout.readline().split()[-1]
        program.send_signal(signal.SIGINT)


def main() -> None:
    """Look at each page in each way."""
    if not (path := program()):
        sys.exit(REMEDY)
    with sync_playwright() as leading:
        browser = leading.chromium.launch(executable_path=path, args=FLAGS)
        for kind in ("camera", "audio"):
            with demo(kind) as url:
                for name, view in VIEWS.items():
                    photograph(browser, url, f"live_{kind}_{name}.jpg", *view)


def photograph(browser: Browser, url: str, name: str, width: int, height: int, scheme: str) -> None:
    """One picture of the whole page."""
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(url)
    page.wait_for_timeout(FILLED)
    path = Path(__file__).parent / "pictures" / name
    page.screenshot(path=path, full_page=True, type="jpeg", quality=75)
    page.close()
    print(f"{name}: {path.stat().st_size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
