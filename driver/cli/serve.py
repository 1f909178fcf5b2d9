"""`burst serve`: serves a device from this account to other programs and accounts."""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from burst import BurstError
from driver.cli.detectors import FRIGATE_OPTIONS, serve_frigate
from driver.cli.gateway import gateway_errors, tell_where
from driver.cli.names import DeviceName
from driver.cli.output import examples, json_option
from driver.cli.wake_words import WAKE_WORD_OPTIONS, serve_wyoming
from driver.errors import DriverError
from driver.service import serve as service
from driver.service.probe import check

if TYPE_CHECKING:
    from collections.abc import Callable

_WITHIN = 5.0  # seconds


def _gateway_options(command: Callable[..., None]) -> Callable[..., None]:
    """Those that gateways define; `serve` takes them as **gateways."""
    for option in reversed((*FRIGATE_OPTIONS, *WAKE_WORD_OPTIONS)):
        command = option(command)
    return command


@click.command(
    epilog=examples(
        "burst serve litert --group video",
        "burst serve litert --metrics :9100",
        "burst serve onnxruntime --oip :8001 --oip http://:8000 --models models/",
        "burst serve litert --wyoming tcp://127.0.0.1:10400 --wake-word hey_jarvis_v0.1.tflite",
        "burst serve litert --frigate ipc:///tmp/cache/zmq_detector --model ssd.tflite --model-type ssd",
        "burst serve --unit | sudo tee /etc/systemd/system/burst@.service",
    )
)
@click.argument("device", type=DeviceName(), required=False)
@click.option("--group", metavar="NAME", help="Allow members of this group to connect.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, readable=False),  # it may be another account's, and gateways do not use it
    default=service.DEFAULT_DIR,
    show_default=True,
    help="Folder of the socket, owned by this account. Created if its parent exists.",
)
@click.option(
    "--metrics",
    metavar="ADDRESS",
    help="Serve /metrics (Prometheus) and /healthz at HOST:PORT, at :PORT (this machine only), or at a socket's path.",
)
@click.option(
    "--files-of-others",
    is_flag=True,
    help="With --group: run model files of all accounts on a device that has one engine for them all, such as a GPU.",
)
@click.option("--unit", is_flag=True, help="Print a systemd unit for /etc/systemd/system/burst@.service and exit.")
@click.option("--user", default="burst", show_default=True, help="With --unit: the account that runs the device.")
@click.option(
    "--check", "checked", metavar="SOCKET", help="Check that the device at SOCKET answers, and exit with 0 or 1."
)
@click.option(
    "--oip",
    "addresses",
    metavar="ADDRESS",
    multiple=True,
    help="Serve the models of --models by the Open Inference Protocol: gRPC at HOST:PORT, at :PORT (this machine only) "
    "or at unix:PATH; HTTP at http://HOST:PORT or http+unix:PATH. Repeatable.",
)
@click.option(
    "--models",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="With --oip: a folder of .onnx and .tflite files, or a Triton model repository. It is watched.",
)
@click.option("--shared-memory", is_flag=True, help="With --oip: also TCP clients may register shared memory.")
@click.option("--model-control", is_flag=True, help="With --oip: also TCP clients may load and unload models.")
@click.option(
    "--tls",
    nargs=2,
    type=click.Path(exists=True, dir_okay=False),
    metavar="CERT KEY",
    help="With --oip: TLS at TCP addresses, with these PEM files.",
)
@_gateway_options
@json_option
def serve(
    device: str | None,
    group: str | None,
    folder: Path,
    metrics: str | None,
    files_of_others: bool,
    unit: bool,
    user: str,
    checked: str | None,
    addresses: tuple[str, ...],
    models: Path | None,
    shared_memory: bool,
    model_control: bool,
    tls: tuple[str, str] | None,
    as_json: bool,
    **gateways: Any,
) -> None:
    """Serve a device to other programs and accounts.

    Runs in the foreground until SIGTERM or Ctrl-C. Prints the path of the socket; clients pass it to driver.connect,
    for example driver.connect("/run/burst/litert.sock"). Without --group, only this account may connect. Exits with 2
    if the device cannot be served, and with 1 if it dies.
    """
    if checked:
        _check(checked)
    elif unit:
        click.echo(service.unit(user, group or user, _command()), nl=False)
    elif device is None:
        raise click.UsageError("missing DEVICE, for example: burst serve litert")
    elif any(
        serve_gateway(device, gateways, group or addresses or models or files_of_others, metrics, as_json)
        for serve_gateway in (serve_wyoming, serve_frigate)
    ):
        pass
    elif addresses or models:
        if not addresses or models is None:
            raise click.UsageError(
                "--oip and --models go together: burst serve onnxruntime --oip :8001 --models models/"
            )
        if group or metrics or files_of_others:
            raise click.UsageError(
                "--oip serves models, and not the device: give --group, --metrics to another burst serve"
            )
        _serve_models(device, addresses, models, shared_memory, model_control, tls, as_json)
    else:
        try:
            tell = partial(_tell, device) if as_json else None
            service.serve(device, folder, group, metrics, files_of_others, tell)
        except DriverError as error:
            raise click.UsageError(str(error)) from error


def _serve_models(
    device: str,
    addresses: tuple[str, ...],
    models: Path,
    shared_memory: bool,
    model_control: bool,
    tls: tuple[str, str] | None,
    as_json: bool,
) -> None:
    with gateway_errors("--oip", "oip"):
        from driver.gateways.foreground import serve_in_foreground
        from driver.gateways.oip.grpc_door import Credentials
        from driver.gateways.oip.process import InferenceServer, OipOptions

        def tell(server: InferenceServer) -> None:
            fields = {"device": device, "oip": server.addresses}
            tell_where(as_json, fields, f"models of {models} at {', '.join(server.addresses)}")

        options = OipOptions(shared_memory, model_control, Credentials(*tls) if tls else None)
        serve_in_foreground(InferenceServer(device, models, addresses, options), tell)


def _check(address: str) -> None:
    try:
        click.echo(check(os.path.abspath(address), _WITHIN))
    except (DriverError, BurstError) as error:
        click.echo(str(error), err=True)
        sys.exit(1)


def _command() -> str:
    """The path of `burst` in this installation."""
    beside = Path(sys.executable).with_name("burst")
    return str(beside) if beside.exists() else shutil.which("burst") or "/usr/bin/env burst"


def _tell(device: str, socket: Path, metrics: str | None) -> None:
    """Prints and flushes: another program waits for this line."""
    print(json.dumps({"device": device, "socket": str(socket), "metrics": metrics}), flush=True)
