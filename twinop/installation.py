"""How twinop is installed, and so what a user can do about a library of it: build it, or install a wheel."""

import re
from pathlib import Path

from .record.op_spec import DOMAIN

ROOT = Path(__file__).resolve().parent.parent
ALL_OPS_TAKE = "about five minutes with nvcc on two cores, two with --cpu"  # as build.sh says


def is_source_tree() -> bool:
    """Returns whether twinop runs from its source tree, which `./build.sh` builds."""
    return (ROOT / "build.sh").is_file()


def version_numbers(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version: (2, 0) for "2.0rc1"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def how_to_build(domain: str = DOMAIN, archs: str = "", needs_cuda: bool = False) -> str:
    """Returns a sentence without its full stop that says how to get a domain's library again.

    It must have code for GPU architectures, or if `needs_cuda` for any GPU.
    """
    where = " where nvcc is on PATH" if needs_cuda else ""
    if domain != DOMAIN:
        return "Build it with twinop build" + (f" --archs {archs}" if archs else "") + where
    if is_source_tree():
        if archs or needs_cuda:
            return f"Build it with {f'TWINOP_CUDA_ARCHS={archs} ' if archs else ''}./build.sh{where}"
        return f"Build it with ./build.sh, which builds all ops ({ALL_OPS_TAKE})"
    if archs or needs_cuda:
        return f"Install a wheel of twinop that was built for {archs or 'CUDA'}"
    return "Install twinop's wheel again: pip install --force-reinstall <path of the wheel>"
