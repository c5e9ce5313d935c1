"""What a launch hands to the CUDA driver, how kernels are loaded, and what is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import device_calls
import pytest
from aot_ops import GENERAL, ONE, InProcess, LibraryOf, cubins, op_of, plan_of, record, several
from device_calls import SCRATCH_ADDRESS, At, Request, body, creation_error, run, run_in_threads

from twinop.aot_kernels.expression import Expression, constant, size
from twinop.aot_kernels.plan import (
    POINTER,
    Body,
    DeviceOp,
    Fill,
    Image,
    Kernel,
    Launch,
    Plan,
    Pointer,
    Refuse,
    Scalar,
    Variant,
)

X = Request([At((1000,))])
LABEL = "k_kernel, k.py:7"
LAUNCH = Launch((ONE, ONE, ONE), (), (GENERAL,))


def kernel(**fields: Any) -> Kernel:
    return Kernel(**{"name": "k|", "label": LABEL, "images": cubins({"90": b"cubin 90"}), **fields})


def test_a_launch_is_traced(library_of: LibraryOf, stand_in: Path) -> None:
    library = library_of(op_of(LAUNCH), kernel(cluster=2))
    code = f"""
from pathlib import Path
from device_calls import At, Request, run
print(run(Path({str(library)!r}), [Request([At((1,))])])[0].error)
"""
    paths = {"PYTHONPATH": str(Path(device_calls.__file__).parent), "LD_LIBRARY_PATH": str(stand_in)}
    env = os.environ | paths | {"TWINOP_TRACE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "\n", done.stderr
    assert re.fullmatch("twinop: +2 x 1 x 1 blocks of 128 x 1 x 1 threads.*kernel 0, .*sm_90\n", done.stderr)


def pointers(*values: int) -> list[str]:
    return [value.to_bytes(8, "little").hex() for value in values]


def test_a_launch(library_of: LibraryOf, in_process: InProcess) -> None:
    grid = (Expression.of("FloorDivide", size(0, 0), 100), constant(2), constant(3))
    arguments = (Pointer("input", 0), Pointer("output", 0, constant(8)), Scalar(size(0, 0), "int"))
    variant = Variant((), ((0, POINTER), (1, POINTER), (2, "i64")), 0)
    library = library_of(
        op_of(Launch(grid, arguments, (variant,))), kernel(name="k|8,8,8,8,8", scratch_pointers=2)
    )
    (outcome,) = in_process(run, library, [X])
    (entry,) = outcome.launches
    assert entry["grid"] == [10, 2, 3] and entry["block"] == [128, 1, 1] and entry["stream"] == 77
    assert entry["parameters"] == pointers(1 << 20, (1 << 30) + 8, 1000, 0, 0)
    assert entry["attributes"] == {} and entry["shared"] == 0 and outcome.scratch == 0


def test_launch_attributes(library_of: LibraryOf, in_process: InProcess) -> None:
    launch = Launch((constant(5), ONE, ONE), (), (GENERAL,))
    images = cubins({"90": b"cubin 90"}, shared=200_000)
    library = library_of(op_of(launch), kernel(cluster=16, cooperative=True, pdl=True, images=images))
    (outcome,) = in_process(run, library, [X])
    (entry,) = outcome.launches
    assert entry["grid"] == [80, 1, 1] and entry["block"] == [128, 1, 1] and entry["shared"] == 200_000
    assert entry["attributes"] == {"2": 1, "4": [16, 1, 1], "5": 1, "6": 1}
    assert [(each["attribute"], each["value"]) for each in outcome.entries("set")] == [(8, 200_000), (14, 1)]


def test_steps_temporaries_and_scratch(library_of: LibraryOf, in_process: InProcess) -> None:
    first = Launch((constant(3), ONE, ONE), (Pointer("temporary", 1),), (Variant((), ((0, POINTER),), 0),))
    second = Launch((constant(2), ONE, ONE), (Pointer("temporary", 0),), (Variant((), ((0, POINTER),), 1),))
    none = Launch((constant(0), ONE, ONE), (), (GENERAL,))
    fill = Fill(Pointer("temporary", 1, constant(4)), size(0, 0), 255)
    plan = Plan(0, (1,), (first, none, fill, second), temporaries=(constant(300), size(0, 0)))
    kernels = (
        kernel(name="a|8,8,8", images=cubins({"90": b"a"}), scratch_pointers=2),
        kernel(name="b|8,8", images=cubins({"90": b"b"}, global_scratch=100), scratch_pointers=1, cluster=2),
    )
    (outcome,) = in_process(run, library_of(DeviceOp(record(), (plan,)), *kernels), [X])
    assert outcome.scratch == 512 + 1024 + 512  # 300, 1000, and 100 bytes for each of 2 x 2 blocks
    assert [entry["call"] for entry in outcome.log][-3:] == ["launch", "fill", "launch"]
    one, two = outcome.launches
    assert one["parameters"] == pointers(SCRATCH_ADDRESS + 512, 0, 0)
    assert outcome.entries("fill")[0] | {"call": ""} == {
        "call": "", "place": SCRATCH_ADDRESS + 516, "value": 255, "bytes": 1000,
    }  # fmt: skip
    assert two["grid"] == [4, 1, 1] and two["parameters"] == pointers(SCRATCH_ADDRESS, SCRATCH_ADDRESS + 1536)


def test_the_code_for_a_gpu(library_of: LibraryOf, in_process: InProcess) -> None:
    cases: list[tuple[int, list[str], str | None, str]] = [
        (90, ["80", "90", "90a"], None, "90a"),
        (90, ["80", "90", "100"], None, "90"),
        (89, ["80", "86", "90"], "80", "86"),
        (86, ["80", "89"], None, "80"),
        (120, ["80", "90"], "90", "PTX 90"),
        (100, ["90a", "100"], "90", "100"),
        (103, ["100a", "100"], None, "100"),
        (103, ["100a"], "80", "PTX 80"),
        (121, ["120"], None, "120"),
    ]
    ops = [op_of(Launch((ONE, ONE, ONE), (), (Variant((), (), i),))) for i in range(len(cases))]
    kernels = []
    for _, archs, ptx, _ in cases:
        texts = [Image(ptx, f"PTX {ptx}".encode(), is_ptx=True)] if ptx else []
        kernels.append(kernel(images=(*cubins({arch: arch.encode() for arch in archs}), *texts)))
    for i, (capability, *_, expected) in enumerate(cases):
        library = library_of(several(ops, *kernels))  # keeps what it has read of the GPU
        (outcome,) = in_process(run, library, [X], op=i, capability=capability)
        (loaded,) = outcome.entries("load")
        assert loaded["image"] == expected == outcome.launches[0]["image"] and loaded["misaligned"] == 0


def test_no_code_for_a_gpu(library_of: LibraryOf, in_process: InProcess) -> None:
    code = kernel(images=(*cubins({"80": b"", "90a": b""}), Image("100", b"", is_ptx=True)))
    (outcome,) = in_process(run, library_of(op_of(LAUNCH), code), [X], capability=75)
    assert outcome.error == (
        f"{LABEL}: the library has no code for the GPU Stand-in 0 (compute capability 7.5). It has machine "
        "code for 80, 90a and PTX for 100. Build it with: twinop build --archs 80,90,75"
    )


@pytest.mark.parametrize(
    ("fail", "failed", "log"),
    [
        (("cuInit", 3), "starting CUDA", ""),
        (("cuModuleLoadDataEx", 218), f"loading {LABEL}", "\nptxas: line 3"),
        (("cuModuleGetFunction", 500), f"loading {LABEL}", ""),
        (("cuLaunchKernelEx", 1), f"launching {LABEL}", ""),
    ],
)
def test_what_fails(fail: Any, failed: str, log: str, library_of: LibraryOf, in_process: InProcess) -> None:
    library = library_of(op_of(LAUNCH), kernel(images=(Image("80", b"PTX", is_ptx=True),)))
    (outcome,) = in_process(run, library, [X], fail=fail)
    assert outcome.error == f"{failed} failed: CUDA_ERROR_STAND_IN: as the test asked{log}"
    assert in_process(run, library, [X])[0].error == ""  # a later creation tries again


def test_a_launch_needs_what_its_architecture_does(library_of: LibraryOf, in_process: InProcess) -> None:
    """Too much shared memory for one GPU does not matter on another."""
    code = kernel(images=(Image("80", b"", shared=100_000), Image("90", b"", threads=256, shared=300_000)))
    library = library_of(op_of(LAUNCH), code)
    requests = [Request([At((1,))], device=device) for device in (1, 0)]
    ampere, hopper = in_process(run, library, requests)
    (entry,) = ampere.launches
    assert (entry["block"], entry["shared"]) == ([128, 1, 1], 100_000)
    assert hopper.error.startswith(f"{LABEL}: needs 300000 bytes of shared memory; the GPU Stand-in 0 has")


def test_a_device_that_does_not_exist(library_of: LibraryOf, in_process: InProcess) -> None:
    (outcome,) = in_process(run, library_of(op_of(LAUNCH), kernel()), [Request([At((1,))], device=7)])
    assert outcome.error.startswith("finding CUDA device 7 failed: CUDA_ERROR_INVALID_DEVICE: ")


def test_without_a_driver(library_of: LibraryOf, without_driver: InProcess) -> None:
    library = library_of(op_of(LAUNCH), kernel())
    error = without_driver(creation_error, library)  # the library loads
    assert error.startswith("no NVIDIA driver: libcuda.so.1 cannot be loaded (")
    assert error.endswith("without a GPU, run the model on the CPU provider")


def limits(count: int) -> tuple[tuple[str, int, int], ...]:
    return ("input", 0, count), ("output", 0, 2**31)


def test_what_is_refused(library_of: LibraryOf, in_process: InProcess) -> None:
    grids = (constant(2**31), ONE, ONE), (ONE, constant(65536), ONE), (ONE, ONE, constant(-1))
    refusal = "k.py:9: ValueError: too many columns"
    cases = [
        *((op_of(Launch(grid, (), (GENERAL,))), f"{LABEL}: its grid would be (") for grid in grids),
        (
            op_of(Launch((ONE, ONE, ONE), (Pointer("input", 0),), (GENERAL,)), limits=limits(999)),
            f"{LABEL}: input 0 has 1000 elements; the kernel's offsets of 32 bits reach 999. Compute offsets "
            "in 64 bits in the kernel: tl.program_id(0).to(tl.int64)",
        ),
        (op_of(LAUNCH, limits=limits(1000)), ""),
        (DeviceOp(record(), (Plan(0, (1,), (Refuse(refusal),)),)), refusal),
        (op_of(LAUNCH, temporaries=(constant(-1),)), "a temporary tensor of the launch has -1 bytes"),
    ]
    library, errors = library_of(several((op for op, _ in cases), kernel())), []
    for i, (_, message) in enumerate(cases):
        (outcome,) = in_process(run, library, [X], op=i)
        assert outcome.error.startswith(message) and bool(message) != bool(outcome.launches)
        errors.append(outcome.error.removeprefix(f"{LABEL}: its grid would be "))
    assert errors[0] == (
        "(2147483648, 1, 1); a GPU launches at most (2147483647, 65535, 65535) blocks. Give each program "
        "more to do, or put the large dimension first"
    )
    assert errors[1].startswith("(1, 65536, 1); ") and errors[2].startswith("(1, 1, -1); ")


def test_two_devices(library_of: LibraryOf, in_process: InProcess) -> None:
    code = kernel(images=cubins({"80": b"for 80", "90": b"for 90"}))
    requests = [Request([At((1,))], device=device) for device in (0, 1, 0, 1)]
    for current in (0, 1, -1):  # the context that the framework left current
        library = library_of(op_of(LAUNCH), code)
        outcomes = in_process(run, library, requests, current=current)
        launches = [outcome.launches[0] for outcome in outcomes]
        assert [entry["image"] for entry in launches] == ["for 90", "for 80"] * 2
        assert [(entry["device"], entry["current"]) for entry in launches] == [(0, 0), (1, 1)] * 2
        assert sum(len(outcome.entries("load")) for outcome in outcomes) == 2


def test_threads_load_a_kernel_once(library_of: LibraryOf, in_process: InProcess) -> None:
    arguments = (Scalar(size(0, 0), "int"),)
    launch = Launch((size(0, 0), ONE, ONE), arguments, (Variant((), ((0, "i64"),), 0),))
    requests = [Request([At((n,))]) for n in range(1, 101)]
    outcomes = in_process(run_in_threads, library_of(op_of(launch), kernel(name="k|8")), requests, 16)
    assert len(outcomes) == 1600 and not any(outcome.error for outcome in outcomes)
    assert len(outcomes[0].entries("load")) == 1 == len(outcomes[0].entries("retain"))
    counts = sorted(entry["grid"][0] for entry in outcomes[0].launches)
    assert counts == sorted([*range(1, 101)] * 16)
    assert all(entry["parameters"] == pointers(entry["grid"][0]) for entry in outcomes[0].launches)


def test_only_the_kernels_of_the_dtype_are_loaded(library_of: LibraryOf, in_process: InProcess) -> None:
    kernels = [kernel(images=cubins({"90": name.encode()})) for name in ("float32", "float16")]
    plans = tuple(
        plan_of(Launch((ONE, ONE, ONE), (), (Variant((), (), i),)), combination=i) for i in range(2)
    )
    library = library_of(DeviceOp(record(), plans), *kernels)
    half = [Request([At((1,), dtype="float16")])]
    (outcome,) = in_process(run, library, half, dtype="float16")
    assert [entry["image"] for entry in outcome.entries("load")] == ["float16"]
    (outcome,) = in_process(run, library, half)  # as torch does: the others, too
    assert [entry["image"] for entry in outcome.entries("load")] == ["float32"]


def test_bodies(library_of: LibraryOf, in_process: InProcess) -> None:
    bodies = (Body(b"half", 1), Body(b"matrix", 0, (2,)), Body(b"row", 0, (1,)))
    library = library_of(DeviceOp(record(), (plan_of(LAUNCH),), bodies), kernel())
    assert in_process(body, library, X) == b"row"
    assert in_process(body, library, Request([At((1, 1))])) == b"matrix"
    assert in_process(body, library, Request([At((1, 1, 1), dtype="float16")])) == b"half"
    with pytest.raises(Exception, match=re.escape("no function body for inputs of these dtypes and ranks")):
        in_process(body, library, Request([At((1, 1, 1))]))
