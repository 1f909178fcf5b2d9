"""Begins `burst serve --wyoming` with the options of the add-on's page, and tells Home Assistant where it listens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

PORT = 10400


def command(options: dict[str, Any]) -> list[str]:
    """Return the command for these options."""
    words = ["burst", "serve", options["device"], "--wyoming", f"tcp://0.0.0.0:{PORT}", "--json"]
    words += ["--wake-word", options["models"], "--threshold", str(options["threshold"])]
    return [*words, "--trigger-level", str(options["trigger_level"])]


def announce(supervisor: str, token: str, host: str) -> None:
    """Have Home Assistant offer the server as a discovered device. Raise OSError if the Supervisor refuses."""
    body = json.dumps({"service": "wyoming", "config": {"uri": f"tcp://{host}:{PORT}"}}).encode()
    fields = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{supervisor}/discovery", body, fields)
    with urllib.request.urlopen(request, timeout=10) as answer:
        answer.read()


def main() -> int:
    """Serve until SIGTERM, which the Supervisor sends; return the command's status."""
    options = json.loads(Path("/data/options.json").read_text())
    with subprocess.Popen(command(options), stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        if server.stdout.readline():  # it listens now
            try:
                announce("http://supervisor", os.environ["SUPERVISOR_TOKEN"], socket.gethostname())
            except (KeyError, OSError) as error:
                print(f"not announced; add the integration Wyoming Protocol by hand: {error}", file=sys.stderr)
        return server.wait()


if __name__ == "__main__":
    sys.exit(main())
