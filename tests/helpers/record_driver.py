"""The C++ record code as a process (record_driver.cpp), to compare it with torch's and Python's."""

import atexit
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from made_once import made_once

ROOT = Path(__file__).resolve().parents[2]


def compiler() -> str:
    """The C++ compiler that builds twinop."""
    names = [os.environ.get("CXX", "c++"), "g++", "clang++"]
    found = next((path for path in map(shutil.which, names) if path), None)
    assert found, f"no C++ compiler found ({', '.join(names)})"
    return found


@cache
def precompiled(includes: tuple[str, ...], *command: str) -> Path:
    """Headers as one that this command has compiled: reading them takes a small source most of its time."""

    def compile_headers(folder: Path) -> None:
        header = folder / "headers.h"
        header.write_text("".join(f'#include "{each}"\n' for each in includes))
        subprocess.run([*command, "-x", "c++-header", header, "-o", f"{header}.gch"], check=True)

    return made_once((includes, command), compile_headers) / "headers.h"


def read_by_compiler(source: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """What the compiler says of a C++ text, without making code."""
    command = [compiler(), "-std=c++17", f"-I{ROOT}", f"-I{ROOT}/twinop/include", *flags]
    if not flags:
        includes = ("twinop/elementwise.h", "twinop/rowwise.h", "twinop/kernel.h")
        command += ["-include", str(precompiled(includes, *command))]
    command += ["-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(
        command, input=source, text=True, capture_output=True, env=os.environ | {"LC_ALL": "C"}
    )


@cache
def program() -> Path:
    names = ("tests/helpers/record_driver.cpp", "kernels/record/check.cpp", "kernels/record/check_shapes.cpp")
    sources = [str(ROOT / name) for name in names]
    flags = ["-std=c++17", f"-I{ROOT}", f"-I{ROOT}/twinop/include", '-DTWINOP_VERSION="0"']
    flags += os.environ.get("CXXFLAGS", "").split()
    command = [compiler(), *flags, *sources, "-o"]
    return made_once(command, lambda at: subprocess.run([*command, at / "driver"], check=True)) / "driver"


class Driver:
    """Asks the process; every question is one line, every answer too."""

    def __init__(self, **env: str) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.process = subprocess.Popen([program()], env=os.environ | env, **pipes)
        atexit.register(self.process.kill)

    def ask(self, *fields: str) -> str:
        assert self.process.stdin and self.process.stdout
        assert not any(character in field for field in fields for character in "\t\n"), fields
        self.process.stdin.write("\t".join(fields) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer.endswith("\n"), f"the driver died of {fields}"
        return answer[:-1]


@cache
def driver() -> Driver:
    return Driver()
