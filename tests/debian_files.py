"""Programs of Debian that this system cannot install: for another processor, or of a later release. Their packages are
unpacked in a folder, by apt with a state of its own."""

import os
import shutil
import subprocess

KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


class Absent(Exception):
    """There is no apt-get, or it has no such packages."""


def unpacked(place, packages, *, processor, release=None):
    """The folder `place`/root with these packages and what they need; `release`: this system's (None), or "testing"."""
    if not shutil.which("apt-get"):
        raise Absent("there is no apt-get")
    for folder in ("state/lists/partial", "cache/archives/partial", "root"):
        (place / folder).mkdir(parents=True)
    (place / "status").touch()
    settings = [
        f'APT::Architecture "{processor}"; APT::Architectures {{"{processor}";}}; APT::Sandbox::User "root";',
        f'Dir::State "{place}/state"; Dir::State::status "{place}/status"; Dir::Cache "{place}/cache";',
    ]
    if release:
        (place / "sources.list").write_text(f"deb [signed-by={KEYS}] {_mirror()} {release} main\n")
        settings.append(f'Dir::Etc::sourcelist "{place}/sources.list"; Dir::Etc::sourceparts "-";')
    (place / "apt.conf").write_text("\n".join(settings) + "\n")
    _apt("-qq", "update", APT_CONFIG=str(place / "apt.conf"))
    download = ("-qq", "--yes", "--download-only", "--no-install-recommends", "install")
    _apt(*download, *packages, APT_CONFIG=str(place / "apt.conf"))
    for package in place.glob("cache/archives/*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, place / "root"], check=True)
    return place / "root"


def inside(root, *folders):
    """The beginning of a command that runs with `root` as its file system, in which this system's processes, devices,
    network and `folders` are."""
    mounts = 'root=$1; for f in $2; do mkdir -p "$root/$f"; mount --rbind "$f" "$root/$f"; done'
    there = " ".join(map(str, ("/proc", "/dev", "/etc", *folders)))
    change = f'{mounts}; shift 2; exec chroot "$root" "$@"'
    return "unshare", "--map-root-user", "--mount", "sh", "-ec", change, "sh", str(root), there


def _mirror():
    """Where this system's own packages come from."""
    found = _apt("indextargets", "--format", "$(REPO_URI) $(LABEL)", "Created-By: Packages").split("\n")
    mirrors = [line.partition(" ")[0] for line in found if line.endswith(" Debian")]
    if not mirrors:
        raise Absent("apt-get knows no mirror of Debian; run 'apt-get update'")
    return mirrors[0]


def _apt(*words, **environment):
    how = {"env": os.environ | environment, "capture_output": True, "text": True, "timeout": 200}
    try:
        done = subprocess.run(["apt-get", *words], check=False, **how)
    except subprocess.TimeoutExpired as late:
        raise Absent(f"apt-get takes too long: {late}") from None
    if done.returncode:
        raise Absent(f"apt-get cannot: {done.stderr.strip()}")
    return done.stdout
