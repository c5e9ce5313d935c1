"""Writes examples/serving/requirements-*.txt: what examples/serving/Dockerfile installs, with hashes.

    pip install uv==0.13.9 && python requirements/lock.py  # after a change in this folder

uv resolves for the image's Python, whichever Python runs this.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import tomllib
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

HERE = Path(__file__).parent
TARGET = HERE.parent / "examples/serving"
PYTHON = (3, 13)
GLIBC = 28  # manylinux_2_28 and older
RUNTIMES = {"cpu": "cpu.txt", "gpu": "cuda.txt"}
MACHINES = {"cpu": ("x86_64", "aarch64"), "gpu": ("x86_64",)}
HEADER = "# For Python {}.{} on Linux ({}). Written by requirements/lock.py.\n"


def resolved(device: str, machine: str) -> list[dict]:
    """The packages that uv finds for a machine: name, version and wheels with URLs and hashes."""
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder, "pylock.toml")
        inputs = [HERE / "image.txt", HERE / RUNTIMES[device]]
        if device == "gpu":
            inputs.append(Path(folder, "extras.in"))
            inputs[-1].write_text("onnxruntime-gpu[cuda,cudnn]\n")
        options = ["--python-version", "{}.{}".format(*PYTHON), "--no-config"]
        options += ["--python-platform", f"{machine}-manylinux_2_{GLIBC}", "--quiet", "--output-file", lock]
        subprocess.run([sys.executable, "-m", "uv", "pip", "compile", *inputs, *options], check=True)
        return tomllib.loads(lock.read_text())["packages"]


def wheel_hash(package: dict, machine: str) -> str:
    """The hash of the wheel that pip takes on a machine, or of the sources if there is none."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC, 4, -1)]
    platforms.append(f"manylinux2014_{machine}")
    order: list[Tag] = [
        *cpython_tags(PYTHON, platforms=platforms),
        *compatible_tags(PYTHON, "cp313", platforms),
    ]
    rank = {str(tag): place for place, tag in enumerate(order)}

    def place(wheel: dict) -> int:
        tags = parse_wheel_filename(wheel["url"].rpartition("/")[2])[3]
        return min(rank.get(str(tag), len(rank)) for tag in tags)

    fitting = [wheel for wheel in package.get("wheels", []) if place(wheel) < len(rank)]
    return (min(fitting, key=place) if fitting else package["sdist"])["hashes"]["sha256"]


def main() -> None:
    for device, machines in MACHINES.items():
        hashes: dict[str, list[str]] = {}
        for machine in machines:
            for package in resolved(device, machine):
                found = hashes.setdefault(f"{package['name']}=={package['version']}", [])
                found.append(wheel_hash(package, machine))
        lines = [HEADER.format(*PYTHON, ", ".join(machines))]
        for name, found in sorted(hashes.items()):
            lines.append(" ".join([name, *(f"--hash=sha256:{each}" for each in dict.fromkeys(found))]) + "\n")
        (TARGET / f"requirements-{device}.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
