"""Builds and runs images with podman on a base that debootstrap makes: no registry of images is needed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

BASE = "localhost/twinop-python:trixie"
_PACKAGES = ("podman", "crun", "debootstrap")
_INCLUDED = "python3,python3-pip,python-is-python3,ca-certificates"
# crun refuses version 1 and 2 of cgroups at once; the container needs neither.
_WITHOUT_CGROUPS = 'umount --lazy /sys/fs/cgroup/unified 2>/dev/null; exec "$@"'


def cache() -> Path:
    return Path(os.environ.get("TWINOP_CACHE") or Path.home() / ".cache/twinop").expanduser()


def podman(*arguments: object, check: bool = True) -> str:
    """The output of a podman command, whose images are in the cache."""
    storage = ["--root", cache() / "containers", "--runroot", "/tmp/twinop-containers"]
    command = ["unshare", "--mount", "sh", "-c", _WITHOUT_CGROUPS, "sh", "podman", *storage]
    command += ["--cgroup-manager", "cgroupfs", "--events-backend", "file", *arguments]
    environment = os.environ | {"DISABLE_HC_SYSTEMD": "true"}
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    assert ran.returncode == 0 or not check, ran.stdout[-2000:] + ran.stderr[-4000:]
    return ran.stdout + ran.stderr


def require_tools() -> None:
    """Installs podman and debootstrap, or skips the test and says why."""
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("needs root and Debian's packages: podman, crun, debootstrap")
    if not all(map(shutil.which, _PACKAGES)):
        for arguments in (("update", "-qq"), ("install", "-qq", "-y", "--no-install-recommends", *_PACKAGES)):
            ran = subprocess.run(["apt-get", *arguments], capture_output=True, text=True)
        if ran.returncode != 0:
            pytest.skip(f"podman and debootstrap cannot be installed: {ran.stderr.strip().splitlines()[-1]}")
    mounts = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    if mounts.returncode != 0:
        pytest.skip(f"no mount namespaces here: {mounts.stderr.strip()}")


def base_image() -> str:
    """An image with Python 3.13 and pip, as python:3.13-slim-trixie; made once."""
    if BASE not in podman("images", "--format", "{{.Repository}}:{{.Tag}}"):
        folder = cache() / f"trixie-{os.getpid()}"
        debootstrap = ["debootstrap", "--variant=minbase", f"--include={_INCLUDED}", "trixie", str(folder)]
        ran = subprocess.run(debootstrap, capture_output=True, text=True)
        if ran.returncode != 0:
            pytest.skip(f"debootstrap: {ran.stdout.strip().splitlines()[-1]}")
        archive = folder.with_suffix(".tar")
        subprocess.run(["tar", "-C", folder, "-cf", archive, "."], check=True)
        podman("import", archive, BASE)
        archive.unlink()
        shutil.rmtree(folder)
    return BASE


def build(folder: Path, tag: str) -> None:
    """Builds the folder's Dockerfile on the base image, with the certificates of this machine for pip."""
    podman(
        "build", "--isolation", "chroot", "--network", "host", "--format", "docker", "--layers",
        "--volume", "/etc/ssl/certs:/etc/ssl/certs:ro", "--build-arg", f"PYTHON_IMAGE={base_image()}",
        "--tag", tag, folder,
    )  # fmt: skip


def start(tag: str, *options: str) -> str:
    """Starts a container with a read-only root and without a network, and returns its id."""
    output = podman(
        "run", "--detach", "--read-only", "--network", "none", "--tmpfs", "/tmp", "--cgroups", "disabled",
        "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024",  # podman would raise them
        "--cap-drop", "ALL", "--security-opt", "no-new-privileges", *options, tag,
    )  # fmt: skip
    return output.strip().splitlines()[-1]
