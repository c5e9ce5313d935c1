"""Sources that compile fast, and programs in place of compilers."""

import os
import subprocess
from pathlib import Path

import warm_python

TINY = """
#pragma once
#include "twinop/record/registry.h"

namespace twinop {

inline Status LaunchTIMES(const Call& call) {
  for (std::int64_t i = 0; i < call.outputs[0].numel; ++i)
    call.outputs[0].as<float>()[i] = FACTOR * call.inputs[0].as<const float>()[i];
  return {};
}

TWINOP_CPU_OP(TIMES,
              Record("TIMES(Tensor x) -> Tensor").dtypes("float32").gradient("x = FACTOR * grad"),
              LaunchTIMES)

}  // namespace twinop
"""


def tiny(name: str = "times", factor: str = "2") -> str:
    """The text of an op y = factor * x, which one compiler compiles in two seconds."""
    return TINY.replace("TIMES", name).replace("FACTOR", factor)


def program(path: Path, *lines: str) -> Path:
    """Writes a shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # it may still run
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def twinop(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command `twinop` in a folder."""
    env = os.environ | {"COLUMNS": "200"} | environment
    return warm_python.run(["-m", "twinop", *arguments], cwd=cwd, env=env)
