"""Writes what the wheel contains and requires as a CycloneDX document: `python csrc/sbom.py FILE`. Run by the build."""

from __future__ import annotations

import json
import re
import sys
import tomllib
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

Component = dict[str, Any]


def library(name: str, scope: str, version: str = "", **more: Any) -> Component:
    """Return a package of PyPI, without a version if the one that is installed beside the wheel decides."""
    purl = f"pkg:pypi/{name.lower().replace('_', '-')}" + f"@{version}" * bool(version)
    found: Component = {"type": "library", "bom-ref": purl, "name": name, "scope": scope, "purl": purl}
    return found | ({"version": version} if version else {}) | more


def document(project: dict[str, Any]) -> dict[str, Any]:
    """Return the list of contents for pyproject.toml's table. Its number is made from its words: equal sources, equal
    list.
    """
    name, version, licence = project["name"], project["version"], project["license"]
    itself = library(name, "required", version, licenses=[{"license": {"id": licence}}])
    needed = [re.match(r"[\w.-]+", line) for line in project["dependencies"]]
    required = [
        library(found[0], "required", description=line)
        for found, line in zip(needed, project["dependencies"], strict=True)
        if found
    ]
    glue = library(
        "cffi",
        "required",
        metadata.version("cffi"),
        licenses=[{"license": {"id": "MIT"}}],
        description="its C headers are compiled into fmq._core and burst._core",
    )
    written: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": itself, "lifecycles": [{"phase": "build"}]},
        "components": [glue, *required],
        "dependencies": [
            {"ref": itself["bom-ref"], "dependsOn": sorted(part["bom-ref"] for part in (glue, *required))},
            *({"ref": part["bom-ref"]} for part in (glue, *required)),
        ],
    }
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(written, sort_keys=True))
    return written | {"serialNumber": f"urn:uuid:{number}"}


def main() -> None:
    """Read pyproject.toml beside this folder."""
    with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    Path(sys.argv[1]).write_text(json.dumps(document(project), indent=2) + "\n")


if __name__ == "__main__":
    main()
