"""Results have the same bits for every instruction set and every number of threads."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from record_driver import Driver
from samples import (
    ALL,
    RECORDS,
    run_in_torch,
    samples,
    torch_dtype,
)

from twinop import torch_op
from twinop.comparison import same_bits
from twinop.own_op import CPU_FUNCTIONS
from twinop.testing.one_node import assert_same_bits

DTYPES = ("float32", "float16", "bfloat16", "float64")
LEVELS = ("baseline", "avx2", "best")
# Writes the results of every op and dtype to a file. A process chooses its level only once.
SCRIPT = """
import sys
import torch
from test_cpu_levels import all_results
torch.save(all_results(), sys.argv[1])
"""


def all_results() -> dict[str, torch.Tensor]:
    found = {}
    for record in ALL.values():
        if record.key in CPU_FUNCTIONS:  # torch's own kernels compute it
            continue
        for dtypes in record.combinations:
            for i, sample in enumerate(list(samples(record, dtypes))[::2]):
                for name, tensor in zip(record.outputs, run_in_torch(record, sample), strict=True):
                    found[f"{record.name}.{name} {'-'.join(dtypes.values())} {i}"] = tensor
    for dtype in map(torch_dtype, DTYPES):
        # All 16-bit numbers cover every branch of the conversions.
        bits = torch.arange(65536).to(torch.int32).to(torch.int16)
        x = bits.view(dtype) if dtype.itemsize == 2 else bits.to(dtype)
        for record in RECORDS.values():
            if record.is_elementwise and len(record.inputs) == 1:
                found[f"{record.name}, all of {dtype}"] = getattr(torch_op, record.name)(x)
    return found


def test_every_level_gives_the_same_bits(tmp_path: Path) -> None:
    expected = all_results()  # this process uses the processor's best level
    assert len(expected) > 100
    processes = {}
    for level in LEVELS:
        env = os.environ | {"TWINOP_CPU_LEVEL": level, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / level)]
        processes[level] = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    for level, process in processes.items():
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        found = torch.load(tmp_path / level)
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            if name.startswith("relu"):  # relu returns the bits of its NaN inputs
                assert_same_bits(found[name], tensor, f"{level}: {name}")
            else:  # the sign of a computed NaN depends on the instructions
                assert same_bits(found[name], tensor), f"{level}: {name}"


def test_the_variable_lowers_the_level() -> None:
    names = ["baseline", "avx2", "avx512"]
    best = names.index(Driver().ask("level"))
    for level in ("baseline", "avx2", "avx512", "unheard of"):
        wanted = min(best, names.index(level)) if level in names else best
        assert Driver(TWINOP_CPU_LEVEL=level).ask("level") == names[wanted]
