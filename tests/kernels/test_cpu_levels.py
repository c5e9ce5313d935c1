"""Results have the same bits for every instruction set and every number of threads."""

import hashlib
import json
import os
import sys

import torch
import warm_python
from record_driver import Driver
from samples import ALL, RECORDS, run_in_torch, samples, torch_dtype

from twinop import torch_op
from twinop.libraries.declare import CPU_FUNCTIONS

DTYPES = ("float32", "float16", "bfloat16", "float64")
# Prints the results of every op and dtype. A process chooses its level only once.
SCRIPT = "import json; from test_cpu_levels import all_results; print(json.dumps(all_results()))"


def digest(name: str, tensor: torch.Tensor) -> str:
    """Says which bits a result has.

    The sign of a computed NaN depends on the instructions. It counts for relu, which returns its input's.
    """
    if not name.startswith("relu"):
        tensor = torch.where(tensor.isnan(), torch.nan, tensor) if tensor.is_floating_point() else tensor
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def all_results() -> dict[str, str]:
    found: dict[str, str] = {}

    def add(name: str, tensor: torch.Tensor) -> None:
        found[name] = digest(name, tensor)

    for number, record in enumerate(ALL.values()):
        if record.key in CPU_FUNCTIONS:  # torch's own kernels compute it
            continue
        for dtypes in record.combinations[number % 2 :: 2]:  # their neighbours share the skeleton
            for i, sample in enumerate(list(samples(record, dtypes))[::6]):
                for name, tensor in zip(record.outputs, run_in_torch(record, sample), strict=True):
                    add(f"{record.name}.{name} {'-'.join(dtypes.values())} {i}", tensor)
    for dtype in map(torch_dtype, DTYPES):
        # All 16-bit numbers cover every branch of the conversions.
        bits = torch.arange(65536).to(torch.int32).to(torch.int16)
        x = bits.view(dtype) if dtype.itemsize == 2 else bits.to(dtype)
        for record in RECORDS.values():
            if record.is_elementwise and len(record.inputs) == 1:
                add(f"{record.name}, all of {dtype}", getattr(torch_op, record.name)(x))
    return found


def test_every_level_gives_the_same_bits() -> None:
    expected = all_results()  # this process uses the processor's best level
    assert len(expected) > 100
    env = os.environ | {"TWINOP_CPU_LEVEL": "avx2", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = warm_python.run(["-c", SCRIPT], env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == list(expected)
    assert [name for name in expected if found[name] != expected[name]] == []


def test_a_processor_without_avx2_is_told_so() -> None:
    script = "import torch; from twinop import torch_op; torch_op.relu(torch.ones(3))"
    done = warm_python.run(["-c", script], env=os.environ | {"TWINOP_CPU_LEVEL": "none"})
    assert done.returncode == 1 and "need a processor with AVX2" in done.stderr


def test_the_variable_lowers_the_level() -> None:
    names = ["none", "avx2", "avx512"]
    best = names.index(Driver().ask("level"))
    for level in ("none", "avx2", "avx512", "unheard of"):
        wanted = min(best, names.index(level)) if level in names else best
        assert Driver(TWINOP_CPU_LEVEL=level).ask("level") == names[wanted]
