"""`burst demo`: camera frames or telephone tones through a burst, generated or from hardware."""

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
from rich.text import Text

import burst
import driver
from driver.cli.epilog import examples
from driver.cli.output import TerminalConsole, echo, with_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

_MANY = 10**9 - 1
_BLOCKS_PER_SECOND = 50
_MOST_FPS = 120  # of the live page


class _Number(click.FloatRange):
    """A range of floats that refuses NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return self.fail(f"{value} is not a number.", param, ctx) if math.isnan(number) else number


def _options(device: str, seeds: int) -> Callable[[Any], Any]:
    """Add the options that both demos have."""
    folder: Any = click.Path(file_okay=False, path_type=Path)
    return with_options(
        click.option("--seed", type=click.IntRange(0, seeds), default=0, help="Seed of the generated input."),
        click.option("--device", default=device, help="Device that runs the network."),
        click.option("--out", type=folder, default="burst-demo", help="Folder for the results."),
        click.option("--json", "as_json", is_flag=True, help="Print only the summary, as JSON."),
    )


_web_options = with_options(
    click.option("--web", is_flag=True, help="Show it live on a local web page, until Ctrl-C."),
    click.option(
        "--port", type=click.IntRange(0, 65535), default=0, help="With --web: port of the page; 0 takes a free one."
    ),
    click.option("--open", "opens", is_flag=True, help="With --web: open the page in the browser."),
)

_NOT_WITH_WEB = {"frames", "seconds", "fast", "no_video", "as_json"}


def _is_web(given: dict[str, Any], fps: float = 30) -> bool:
    """Return True if the live page is wanted. Raise UsageError for options that do not go with it."""
    context = click.get_current_context()
    said = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if not given["web"]:
        if said & {"port", "opens"}:
            raise click.UsageError("--port and --open need --web")
        return False
    if wrong := [param.opts[-1] for param in context.command.params if param.name in said & _NOT_WITH_WEB]:
        raise click.UsageError(
            f"{wrong[0]} does not go with --web: the page runs until Ctrl-C and prints no summary; remove one of them"
        )
    if "spin" in said:
        raise click.UsageError("--spin does not go with --web: set it on the page")
    if not 1 <= fps <= _MOST_FPS:
        raise click.UsageError(f"--fps {fps:g}: with --web, pass 1 to {_MOST_FPS}; change it on the page")
    return True


def _show(show: Any, web: bool, port: int, opens: bool) -> None:
    """Serve the live page until Ctrl-C."""
    from driver.demos.web.server import serve

    assert web
    serve(show, port, opens, echo)


@click.group(
    epilog=examples(
        "burst demo camera",
        "burst demo camera --source /dev/video0 --web --open",
        "burst demo audio --microphone default",
    )
)
def demo() -> None:
    """Run a demo: camera frames or sound through a burst.

    The input is generated, or comes from a file or from hardware. Needs the extra `demo`, and `web` for --web.
    """


@demo.command(context_settings={"show_default": True})
@_web_options
@click.option("--source", default="scene", metavar="SOURCE", help="'scene', a video file, or a camera: /dev/video0.")
@click.option("--model", type=click.Path(path_type=Path), metavar="FILE", help="With --web: a model file of yours.")
@click.option("--labels", type=click.Path(path_type=Path), metavar="FILE", help="With --model: a class on each line.")
@click.option("--frames", type=click.IntRange(1, _MANY), default=1000, help="Number of frames.")
@click.option("--fps", type=_Number(0, _MANY), default=30, help="Frames per second; 0: as fast as possible.")
@click.option("--spin", type=_Number(0, _MANY), help="Seconds that the burst polls before it sleeps.")
@click.option("--no-video", is_flag=True, help="Do not write the video.")
@_options(device="reference", seeds=_MANY)
def camera(
    source: str,
    model: Path | None,
    labels: Path | None,
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
    """Find moving objects in a camera's frames.

    Sends each frame to the device twice, through a burst and on the plain path, and compares the times. Writes an
    annotated video, a plot of both latencies, and a picture of one frame. Ctrl-C stops early. With --web, shows it live
    on a page until Ctrl-C and writes only what the page records; --model shows a model of yours there.
    """
    if _is_web(web, fps=fps):
        with _complaints():
            _show(_camera_show(model, labels, source=source, seed=seed, fps=fps, device=device, out=out), **web)
        return
    if model or labels:
        raise click.UsageError("--model and --labels need --web; without a page: burst run MODEL --input VIDEO")
    from driver.demos.camera import connected
    from driver.demos.camera_report import CameraReport
    from driver.demos.camera_sources import HEIGHT, WIDTH, clock_of, open_source
    from driver.demos.drawing import Film

    console = TerminalConsole(stderr=as_json)
    if not no_video and (out / Film.NAME).resolve() == Path(source).resolve():
        raise click.UsageError(f"--source {source}: this run would overwrite it; pass another --out, or --no-video")
    with _complaints(), ExitStack() as stack:
        opened = stack.enter_context(closing(open_source(source, seed, fps)))
        _make(out)
        film = None if no_video else stack.enter_context(Film(out, WIDTH, HEIGHT, fps))
        _tell(console, opened.name, device)
        how: dict[str, Any] = {"recover": opened.is_live} | ({} if spin is None else {"spin": spin})
        detector = stack.enter_context(connected(device, opened.size, buffers=opened.buffers, **how))
        steps = detector.watch(opened, clock_of(opened, fps))
        with CameraReport(frames, out, film, console) as report, suppress(KeyboardInterrupt):
            try:
                for step in islice(steps, frames):
                    report.add(step)
            except driver.CameraLost as error:
                console.print(Text(str(error)))
        stats = detector.stats()
    _close(report, report.seen < frames, console, as_json, source=opened.name, device=device, stats=stats)


def _camera_show(model: Path | None, labels: Path | None, *, device: str, **how: Any) -> Any:
    """Return the show of the demo's own network, or of a file."""
    if model is None:
        from driver.demos.web.camera import CameraShow

        if labels:
            raise click.UsageError("--labels needs --model")
        return CameraShow(device=device, **how)
    from driver.cli.live_model import ModelShow

    is_named = click.get_current_context().get_parameter_source("device") is ParameterSource.COMMANDLINE
    return ModelShow(model, labels=labels, device=device if is_named else None, **how)


@demo.command(context_settings={"show_default": True})
@_web_options
@click.option(
    "--wav", type=click.Path(path_type=Path), metavar="FILE", help="Sound file, in any format that FFmpeg reads."
)
@click.option("--microphone", metavar="NAME", help="Microphone, by its ALSA name.")
@click.option("--seconds", type=_Number(0.02, 600), default=20, help="Length of the sound.")
@click.option("--fast", is_flag=True, help="Process a file or generated sound as fast as possible, not in real time.")
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
    """Recognise telephone keys in noisy sound.

    Sends each block of 20 ms to the device, through a burst and on the plain path; the network's state stays on the
    device. Prints each key that it recognises. Writes a plot and, if the keys were generated, the sound. Ctrl-C stops
    early. With --web, shows it live on a page until Ctrl-C and writes only what the page records.
    """
    from driver.demos.audio import connected
    from driver.demos.audio_report import AudioReport
    from driver.demos.audio_sources import Pace, open_source

    if wav and microphone:
        raise click.UsageError("--wav and --microphone: pass at most one of them")
    if _is_web(web):
        with _complaints():
            from driver.demos.web.audio import AudioShow

            _show(AudioShow(wav, microphone, seed, device, out=out), **web)
        return
    console, blocks = TerminalConsole(stderr=as_json), round(seconds * _BLOCKS_PER_SECOND)
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
        raise click.UsageError(f"{opened.name} contains no sound; pass another file")
    _close(report, stopped, console, as_json, source=opened.name, late=pace.late, device=device, stats=stats)


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out {out}: cannot create the folder ({error.strerror}); pass one that you can write to"
        ) from error


def _tell(console: Console, source: str, device: str) -> None:
    console.print(Text(f"{source} on {device}, through a burst and on the plain path; Ctrl-C stops it"))


def _close(report: Any, stopped: bool, console: Console, as_json: bool, **facts: Any) -> None:
    """Write the pictures and the summary of what was processed, even if the run was stopped early."""
    if stopped:
        console.print("stopped early")
    if not report.seen:
        raise click.Abort
    with _complaints():
        summary = report.finish(**facts)
    if as_json:
        echo(json.dumps(summary, indent=1))
    else:
        report.show(summary)


@contextmanager
def _complaints() -> Iterator[None]:
    """Turn expected errors into one line for the user."""
    try:
        yield
    except (ValueError, driver.DeviceNotFound) as error:
        raise click.UsageError(str(error)) from error
    except burst.PeerDied as error:
        raise click.ClickException("the device process died and its state is lost; run the command again") from error
    except (OSError, driver.DriverError, burst.BurstError) as error:
        raise click.ClickException(str(error)) from error
