"""`burst demo`: a camera's frames and a telephone's sound through a burst, without hardware and with it."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack, closing, contextmanager, suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.text import Text

import burst
import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MANY = 10**9 - 1
_BLOCKS_PER_SECOND = 50
_MOST_FPS = 120  # of a page


class _Number(click.FloatRange):
    """A number that is one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return self.fail(f"{value} is not a number.", param, ctx) if math.isnan(number) else number


def _options(device: str, seeds: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """What both demos take."""
    folder: Any = click.Path(file_okay=False, path_type=Path)

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for option in (
            click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON, and nothing else."),
            click.option("--out", type=folder, default="burst-demo", help="Folder for the results."),
            click.option("--device", default=device, help="Which device runs the network."),
            click.option("--seed", type=click.IntRange(0, seeds), default=0, help="Which one is generated."),
        ):
            function = option(function)
        return function

    return add


def _web_options(function: Callable[..., None]) -> Callable[..., None]:
    """What both pages take."""
    for option in (
        click.option("--open", "opens", is_flag=True, help="With --web: open the page in the browser."),
        click.option("--port", type=click.IntRange(0, 65535), default=0, help="With --web; 0: any that is free."),
        click.option("--web", is_flag=True, help="Show it live on a page of this machine's, until Ctrl-C."),
    ):
        function = option(function)
    return function


_NOT_WITH_WEB = {"frames", "seconds", "fast", "no_video", "as_json"}


def _is_web(given: dict[str, Any], fps: float = 30) -> bool:
    """Whether a page is wanted, with nothing that a page makes no sense with."""
    context = click.get_current_context()
    said = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if not given["web"]:
        if said & {"port", "opens"}:
            raise click.UsageError("--port and --open: they are about the page; pass --web, too")
        return False
    if wrong := [param.opts[-1] for param in context.command.params if param.name in said & _NOT_WITH_WEB]:
        raise click.UsageError(
            f"{wrong[0]}: a page runs until Ctrl-C, without a summary; leave {wrong[0]} or --web away"
        )
    if "spin" in said:
        raise click.UsageError("--spin: with --web it is a control of the page; leave it away")
    if not 1 <= fps <= _MOST_FPS:
        raise click.UsageError(f"--fps {fps:g}: with --web it is from 1 to {_MOST_FPS}, and can be changed on the page")
    return True


def _show(show: Any, web: bool, port: int, opens: bool) -> None:
    """The page, until Ctrl-C."""
    from driver.demos.web.serving import serve

    assert web
    serve(show, port, opens, click.echo)


@click.group()
def demo() -> None:
    """Shows what a burst does, on frames or sound.

    They are generated, or come from a file or from hardware. Needs the extra `demo`, and `web` for --web:
    pip install 'burst-engine[demo,web]'.
    """


@demo.command(context_settings={"show_default": True})
@_web_options
@click.option("--source", default="scene", metavar="SOURCE", help="'scene', a video file, or a camera: /dev/video0.")
@click.option("--frames", type=click.IntRange(1, _MANY), default=1000, help="How many, each through both paths.")
@click.option("--fps", type=_Number(0, _MANY), default=30, help="Frames per second; 0: as fast as it goes.")
@click.option("--spin", type=_Number(0, _MANY), help="Seconds for which the burst polls before it sleeps.")
@click.option("--no-video", is_flag=True, help="Write no video.")
@_options(device="reference", seeds=_MANY)
def camera(
    source: str,
    frames: int,
    fps: float,
    spin: float | None,
    no_video: bool,
    seed: int,
    device: str,
    out: Path,
    as_json: bool,
    **web: Any,
) -> None:
    """Finds moving objects in a camera's frames.

    Each frame goes to the device twice: through a burst, and over the plain path, to compare the times.
    Leaves an annotated video, a picture of both paths' latencies and one of a frame. Ctrl-C ends it early.
    With --web it shows all of that live, until Ctrl-C, and leaves what the page is told to record.
    """
    if _is_web(web, fps=fps):
        with _complaints():
            from driver.demos.web.camera import CameraShow

            _show(CameraShow(source, seed, fps, device, out), **web)
        return
    from driver.demos.camera import connected
    from driver.demos.camera_report import CameraReport
    from driver.demos.camera_sources import HEIGHT, WIDTH, Clock, open_source
    from driver.demos.drawing import Film

    console = Console(stderr=as_json)
    if not no_video and (out / Film.NAME).resolve() == Path(source).resolve():
        raise click.UsageError(f"--source {source}: this run would overwrite it; pass another --out or --no-video")
    with _complaints(), ExitStack() as stack:
        opened = stack.enter_context(closing(open_source(source, seed, fps)))
        _make(out)
        film = None if no_video else stack.enter_context(Film(out, WIDTH, HEIGHT, fps))
        _tell(console, opened.name, device)
        how: dict[str, Any] = {} if spin is None else {"spin": spin}
        detector = stack.enter_context(connected(device, **how))
        with CameraReport(frames, out, film, console) as report, suppress(KeyboardInterrupt):
            for step in islice(detector.watch(opened, Clock(fps)), frames):
                report.add(step)
        stats = detector.stats()
    _close(report, report.seen < frames, console, as_json, source=opened.name, device=device, stats=stats)


@demo.command(context_settings={"show_default": True})
@_web_options
@click.option("--wav", type=click.Path(path_type=Path), metavar="FILE", help="A sound file: anything FFmpeg reads.")
@click.option("--microphone", metavar="NAME", help="A microphone, by its name in ALSA.")
@click.option("--seconds", type=_Number(0.02, 600), default=20, help="How much sound.")
@click.option("--fast", is_flag=True, help="Do not wait for the sound to pass.")
@_options(device="litert" if find_spec("ai_edge_litert") else "reference", seeds=999)
def audio(
    wav: Path | None,
    microphone: str | None,
    seconds: float,
    fast: bool,
    seed: int,
    device: str,
    out: Path,
    as_json: bool,
    **web: Any,
) -> None:
    """Hears a telephone's keys in noise.

    The network's state stays on the device; each block of 20 ms goes there through a burst and over the plain path.
    Prints each key as it is heard; leaves a picture and, of generated keys, the sound. Ctrl-C ends it early.
    With --web it shows all of that live, until Ctrl-C, and leaves what the page is told to record.
    """
    from driver.demos.audio import connected
    from driver.demos.audio_report import AudioReport
    from driver.demos.audio_sources import Pace, open_source

    if wav and microphone:
        raise click.UsageError("--wav and --microphone: pass one of them, or neither")
    if _is_web(web):
        with _complaints():
            from driver.demos.web.audio import AudioShow

            _show(AudioShow(wav, microphone, seed, device, out), **web)
        return
    console, blocks = Console(stderr=as_json), round(seconds * _BLOCKS_PER_SECOND)
    with _complaints(), ExitStack() as stack:
        opened = stack.enter_context(closing(open_source(wav, microphone, seed, seconds)))
        _make(out)
        _tell(console, opened.name, device)
        listeners = stack.enter_context(connected(device))
        report, pace = AudioReport(opened.presses, out, console), Pace(not (fast or opened.is_live))
        stopped = True
        with suppress(KeyboardInterrupt):
            for step in islice(listeners.listen(opened, pace), blocks):
                report.add(step)
            stopped = False
        stats = listeners.stats()
    if not stopped and not report.seen:
        raise click.UsageError(f"{opened.name} has no sound at all; pass another")
    _close(report, stopped, console, as_json, source=opened.name, late=pace.late, device=device, stats=stats)


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be made ({error.strerror}); pass a folder you may write to") from error


def _tell(console: Console, source: str, device: str) -> None:
    console.print(Text(f"{source}, through a burst to {device} and over the plain path; Ctrl-C ends it"))


def _close(report: Any, stopped: bool, console: Console, as_json: bool, **facts: Any) -> None:
    """The pictures and the summary, of however much was seen."""
    if stopped:
        console.print("stopped early")
    if not report.seen:
        raise click.Abort
    with _complaints():
        summary = report.finish(**facts)
    if as_json:
        click.echo(json.dumps(summary, indent=1))
    else:
        report.show(summary)


@contextmanager
def _complaints() -> Iterator[None]:
    """What a user can be wrong about, and what can go wrong, in words."""
    try:
        yield
    except (ValueError, driver.DeviceNotFound) as error:
        raise click.UsageError(str(error)) from error
    except burst.PeerDied as error:
        raise click.ClickException("the device died, and what is on it is lost; start again") from error
    except (OSError, driver.DriverError, burst.BurstError) as error:
        raise click.ClickException(str(error)) from error
