"""The live page in a real browser: what it shows moves, its controls act, and nothing in it complains."""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest
from chromium import chromium, violations

pytestmark = pytest.mark.integration
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
PATIENCE = 20e3  # milliseconds


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@contextmanager
def demo(kind, *arguments):
    """The address of a page, whose program ends well by Ctrl-C."""
    command = [sys.executable, "-u", "-m", "driver.cli", "demo", kind, "--web", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        try:
            yield program.stdout.readline().split()[-1]
        finally:
            program.send_signal(signal.SIGINT)
            program.stdout.read()
            assert program.wait() == 0


@pytest.fixture(scope="module")
def camera(_home):
    with demo("camera", "--device", "reference") as url:
        yield url


@pytest.fixture
def look(browser):
    """Opens a page; in the end, nothing may have been complained about in its console."""
    complaints = []
    with ExitStack() as stack:

        def look(url, viewport=WIDE, **how):
            context = browser.new_context(viewport=viewport, **how)
            stack.callback(context.close)
            context.set_default_timeout(PATIENCE)
            page = context.new_page()
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.goto(url)
            page.wait_for_function("() => /[0-9]/.test(document.querySelector('#fps').textContent)")
            return page

        yield look
        assert complaints == []


def pixels(page, selector):
    return page.evaluate(f"document.querySelector('{selector}').toDataURL()")


def moves(page, selector):
    """Waits until a canvas shows something else than now."""
    before = pixels(page, selector)
    page.wait_for_function(f"(before) => document.querySelector('{selector}').toDataURL() !== before", arg=before)


def says(page, selector, pattern):
    """Waits until that text fits the pattern; the text."""
    page.wait_for_function(
        "([selector, pattern]) => RegExp(pattern).test(document.querySelector(selector).textContent)",
        arg=[selector, pattern],
    )
    return page.text_content(selector)


def field(page, label):
    """The control of exactly that label."""
    return page.get_by_label(label, exact=True)


def engine(page):
    return int(re.search(r"engine process (\d+)", page.text_content("#place"))[1])


class TestCamera:
    """The camera's page."""

    def test_the_stream_advances_and_the_plots_move(self, camera, look):
        """Picture and both plots become others; calls are tabulated for both paths; what was found is told."""
        page = look(camera)
        for selector in ("#picture", "#whole canvas", "#around canvas"):
            moves(page, selector)
        assert page.text_content("#status") == "running"
        says(page, "#results", "^Found: .*(disc|square|triangle|ring|star|cross)")
        for path in ("burst", "plain RPC"):
            says(page, f"#whole tr[data-path='{path}']", r"\d\d")

    def test_fewer_frames_per_second_are_fewer(self, camera, look):
        """From 30 to 8 and back: the rate that the page counts follows within the second that it counts."""
        page = look(camera)
        field(page, "Frames per second").fill("8")
        page.keyboard.press("Tab")
        says(page, "#fps", "^[5-9]$")
        field(page, "Frames per second").fill("30")
        page.keyboard.press("Enter")
        says(page, "#fps", "^(1[5-9]|2[0-9]|3[0-3])$")

    def test_another_device_runs_it_in_another_process(self, camera, look):
        """The place names the device and its engine; the frame's size changes the picture's shape."""
        page = look(camera)
        before = engine(page)
        field(page, "Device").select_option("litert")
        says(page, "#place", "on litert ")
        assert engine(page) != before
        moves(page, "#picture")
        field(page, "Frame size").select_option("1280x720")
        page.wait_for_function("() => document.querySelector('#picture').style.aspectRatio.startsWith('1280')")
        field(page, "Depth").select_option("4")
        moves(page, "#picture")
        field(page, "Depth").select_option("1")
        field(page, "Frame size").select_option("640x480")
        field(page, "Device").select_option("reference")
        says(page, "#place", "on reference ")

    @pytest.mark.parametrize(("width", "height", "plots"), [(1440, 900, 2), (1280, 900, 2), (390, 844, 1)])
    def test_plots_are_seen_without_scrolling(self, camera, look, width, height, plots):
        """On a desk both, on a telephone the first one: controls come after them, also for the keyboard."""
        page = look(camera, {"width": width, "height": height})
        ends = [page.locator(f"{name} canvas").bounding_box() for name in ("#whole", "#around")]
        assert max(box["y"] + box["height"] for box in ends[:plots]) <= height
        order = page.evaluate("[...document.querySelectorAll('main > *')].map((each) => each.id)")
        assert order == ["stage", "whole", "around", "controls"]

    def test_a_bad_value_is_refused_in_words_and_taken_back(self, camera, look):
        """The page says what was wrong and what to pass, and the field shows what holds."""
        page = look(camera)
        field(page, "Frames per second").fill("1000")
        page.keyboard.press("Tab")
        assert "fps=1000: pass a number from 1 to 120" in says(page, "#notice", "Refused")
        assert field(page, "Frames per second").input_value() == "30"

    def test_it_pauses_and_goes_on_by_keyboard(self, camera, look):
        """Pause is a button that says whether it is pressed; the picture stands still meanwhile."""
        page = look(camera)
        page.focus("#pause")
        page.keyboard.press("Enter")
        says(page, "#status", "paused")
        assert page.get_attribute("#pause", "aria-pressed") == "true"
        page.keyboard.press("Enter")
        says(page, "#status", "running")
        moves(page, "#picture")

    def test_a_death_of_the_device_is_told_and_survived(self, camera, look):
        """`kill -9` of the engine: the page says so in an alert, counts it, and goes on with another engine."""
        page = look(camera)
        os.kill(before := engine(page), signal.SIGKILL)
        assert "died" in says(page, "#notice", "died")
        says(page, "#deaths", "^1$")
        page.wait_for_function(f"() => !document.querySelector('#place').textContent.includes('{before}')")
        says(page, "#status", "running")
        moves(page, "#picture")

    @pytest.mark.parametrize(
        ("viewport", "scheme"), [(WIDE, "light"), (NARROW, "dark")], ids=["1280, light", "390, dark"]
    )
    def test_it_fits_and_can_be_read(self, camera, look, viewport, scheme):
        """Nothing is wider than the window; every control has a label; text stands out from its paper by 4.5 to 1;
        axe finds nothing.
        """
        page = look(camera, viewport, color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
        assert page.evaluate(
            "[...document.querySelectorAll('select, input')].every((field) => field.labels.length === 1)"
        )
        assert min(page.evaluate(CONTRASTS)) >= 4.5
        assert violations(page) == []

    @pytest.mark.stress
    def test_those_who_like_it_calm_see_it_once_a_second(self, camera, look):
        """With reduced motion two pictures are shown a second at most, and the rest is counted as not shown."""
        page = look(camera, reduced_motion="reduce")
        missed = int(says(page, "#dropped-here", r"\d"))
        page.wait_for_function(f"() => Number(document.querySelector('#dropped-here').textContent) > {missed + 20}")

    @pytest.mark.stress
    def test_competing_programs_raise_the_plot(self, camera, look):
        """With four that are more urgent the median of the last ten seconds is at least twice what it was; or where
        they keep the device busy throughout, the stream gets nothing, and the page says so. It falls again after.
        """
        page = look(camera)
        median = "Number(document.querySelector('#whole tr[data-path=\"burst\"]').cells[2].textContent)"
        full = "Number(document.querySelector('#whole tr[data-path=\"burst\"]').cells[1].textContent) > 200"
        page.wait_for_function(f"() => {full}")
        alone = page.evaluate(median)
        field(page, "Their priority").select_option("high")
        field(page, "Competing programs").select_option("4")
        starved = "document.querySelector('#notice').textContent.startsWith('no result within')"
        page.wait_for_function(f"() => {median} > {2 * alone} || {starved}", timeout=60e3)
        field(page, "Competing programs").select_option("0")
        says(page, "#status", "running")
        page.wait_for_function(f"() => {median} < {1.5 * alone}", timeout=60e3)


CONTRASTS = """() => {
    const shine = (colour) => {
        const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
        const [r, g, b] = parts.map((part) => part <= .03928 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const paper = (node) => {
        const colour = getComputedStyle(node).backgroundColor;
        return colour === "rgba(0, 0, 0, 0)" && node.parentElement ? paper(node.parentElement) : colour;
    };
    const texts = "h1, h2, small, p, span, dt, dd, th, td, label, select, input, button";
    return [...document.querySelectorAll(texts)].map((node) => {
        const [a, b] = [shine(getComputedStyle(node).color), shine(paper(node))].sort((x, y) => y - x);
        return (a + .05) / (b + .05);
    });
}"""


@pytest.mark.stress
@pytest.mark.usefixtures("_home")
def test_the_audio_page_hears_keys_and_takes_noise(look):
    """Keys are told as they are heard, the sound and both plots move, and with -30 dB of tones keys are missed."""
    with demo("audio", "--device", "reference") as url:
        page = look(url, NARROW)
        for selector in ("#picture", "#whole canvas", "#around canvas"):
            moves(page, selector)
        says(page, "#results", r"^Heard: \S")
        field(page, "Tones against noise, dB").fill("-30")
        page.keyboard.press("Tab")
        says(page, "#results", r"\(.\)")
