"""A failure of the CUDA runtime fails one call: none stays for the next one, and none of others is taken."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from record_driver import ROOT

FOLDER = ROOT / "tests/kernels"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
def test_errors_of_the_runtime(tmp_path: Path) -> None:
    command = ["nvcc", "-cudart=none", "-std=c++17", '-DTWINOP_CUDA_ARCHS="90"', "-arch=sm_90"]
    sources = [str(FOLDER / "launch_errors.cu"), str(FOLDER / "failing_runtime.cpp")]
    command += [f"-I{ROOT}/twinop/include", *sources]
    subprocess.run([*command, "-o", str(tmp_path / "errors")], check=True)

    def lines(**environment: str) -> list[str]:
        command, env = [str(tmp_path / "errors")], os.environ | environment
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env=env
        ).stdout.splitlines()

    refused = 'after another\'s failure: TWINOP_TARGET is "8.8"; expected one of 8.0, 8.6, 8.9, 9.0, '
    assert lines(TWINOP_TARGET="8.8")[0].startswith(refused)
    assert lines() == [
        "after another's failure: ok, left: 101",
        "a launch that fails: a kernel launch failed: the reason, left: 0",
        "the next: ok, left: 0",
        "memory that is refused: asking for shared memory failed: the reason, left: 0",
        "the next: ok, left: 0",
        "memory that no block has: a kernel launch failed; it needs 102400 bytes of shared memory a block, "
        "and this GPU has 101376, left: 0",
        "a cluster that nothing holds: a kernel launch failed; it needs clusters of 2 blocks, "
        "and this GPU has none, left: 0",
        "too many registers: a kernel launch failed: the reason; it needs 1024 threads of 80 registers "
        "a block, and this GPU has registers for 816, left: 0",
        "a copy that fails: copying a tensor failed: the reason, left: 0",
        "a question that fails: asking for a property of the device failed: the reason, left: 0",
        "the next: ok, left: 0",
        "a device that is missing: choosing CUDA device 1 failed: the reason, left: 0",
    ]
