"""`twinop bench instructions`: which instructions count, the times that follow, and the errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from twinop.bench import instructions, sass
from twinop.bench.__main__ import app
from twinop.bench.report import BenchError

NAME = "_ZN6twinop17ElementwiseKernelINS_{functor}EE{dtype}Li{width}ELi{threads}ELi{vectors}ELi1ELi1EEEvT_l"
SHORT = """
        /*0000*/                   S2R R0, SR_TID.X ;             /* 0x0000000000007919 */
                                                                  /* 0x000e220000002100 */
        /*0010*/               @P0 BRA 0x30 ;                     /* 0x0 */
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ; /* 0x0 */
        /*0030*/                   ISETP.GE.AND P1, PT, R0, UR4, PT ;
        /*0040*/               @P1 BRA 0xa0 ;
        /*0050*/              @!P2 BRA 0x80 ;
        /*0060*/                   MUFU.EX2 R4, R4 ;
        /*0070*/                   DADD R8, R4, R6 ;
        /*0080*/                   FFMA R4, R4, R5, R6 ;
        /*0090*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   BRA 0xb0;
"""


def kernel(
    functor: str = "4GeluIf", dtype: str = "f", width: int = 4, threads: int = 128, vectors: int = 1
) -> str:
    name = NAME.format(functor=functor, dtype=dtype, width=width, threads=threads, vectors=vectors)
    return f"\t\tFunction : {name}\n{SHORT}"


def test_the_shortest_way_that_loads_and_stores_is_counted() -> None:
    """It takes the branches around the slow part, but not those past the load or to the exit."""
    (found,) = sass.read(kernel().splitlines())
    assert (found.functor, found.dtype, found.vectors, found.elements) == ("Gelu", "float32", 1, 4)
    assert found.units == {"issue": 9, "FMA": 1, "ALU": 1, "XU": 0, "FP64": 0, "LSU": 2}
    assert found.per_element["issue"] == 2.25
    assert found.clocks["ALU"] == 1 / 4 / 64


def test_kernels_of_other_widths_are_left_out() -> None:
    scalar, resident = kernel(width=1), kernel(threads=128, vectors=4)
    others = f"{scalar}\n{resident}\n\t\tFunction : _Z5otherv\n{SHORT}"
    assert list(sass.read(others.splitlines())) == []
    two = kernel("4ReluINS_12ReducedFloatE", "13__nv_bfloat16", 8, vectors=2)
    for vectors, counted in ((2, two), (4, kernel(threads=64, vectors=4))):
        with pytest.raises(BenchError, match=f"makes {vectors} loads and {vectors} stores"):
            list(sass.read(f"{others}\n{counted}".splitlines()))


def document(us: float = 600.0) -> dict[str, Any]:
    row: dict[str, Any] = {
        "kind": "bandwidth",
        "device": "cuda",
        "op": "gelu",
        "family": "unary",
        "direction": "forward",
    }
    row |= {"dtype": "float32", "aligned": True}
    times = [("2^28", "torch copy_", 500.0), ("2^28", "twinop in torch", us), ("2^20", "torch copy_", 5.0)]
    return {
        "benchmark": "ops",
        "environment": {"gpu": "NVIDIA H200"},
        "clocks": {"before": {"clocks.sm": "1980 MHz"}, "after": None},
        "rows": [row | {"shape": shape, "provider": who, "median_us": t} for shape, who, t in times],
    }


def counted(issue: int, dtype: str = "float32", vectors: int = 1) -> sass.Kernel:
    units = {"issue": issue, "FMA": 0, "ALU": 0, "XU": 0, "FP64": 0, "LSU": 0}
    return sass.Kernel("Gelu", dtype, vectors, 1, units)


def test_the_limit_is_what_takes_longer() -> None:
    (row,) = instructions.rows_of(("gelu", counted(50)), document())
    assert row["arithmetic_us"] == pytest.approx(50 * 2**28 / (132 * 128 * 1980), abs=0.01)
    assert (row["limit"], row["share_of_limit"]) == ("memory", {"twinop in torch": 0.833})
    assert not row["passed"]
    (row,) = instructions.rows_of(("gelu", counted(70)), document())
    assert (row["limit"], row["unit"]) == ("arithmetic", "issue")
    assert row["share_of_limit"] == row["share_of_arithmetic"] == {"twinop in torch": 0.936}
    assert row["passed"]


def test_the_tolerance_is_counted_in() -> None:
    for us, passed in ((500 / 0.895, True), (500 / 0.89, False)):
        (row,) = instructions.rows_of(("gelu", counted(50)), document(us))
        assert (row["tolerance"], row["passed"]) == (0.01, passed), row


def test_a_type_that_was_not_measured_has_the_copy_of_as_many_bytes() -> None:
    (row,) = instructions.rows_of(("gelu", counted(200, "float64")), document())
    assert (row["shape"], row["copy_us"], row["limit"]) == ("2^27", 500.0, "arithmetic") and "us" not in row
    assert instructions.elements_of("32768x4096") == 2**27


def test_large_tensors_take_the_kernel_of_most_vectors() -> None:
    assert instructions.chosen([counted(1, vectors=2), counted(2)]) == [("gelu", counted(1, vectors=2))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"environment": {"gpu": "NVIDIA L4"}}, "NVIDIA L4: its multiprocessors are not counted"),
        ({"clocks": None}, "names no clock"),
    ],
)
def test_unknown_machines_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        instructions.rows_of(("gelu", counted(50)), document() | change)


def test_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(instructions, "kernels", lambda library: [counted(70)])
    measured = tmp_path / "ops.json"
    measured.write_text(json.dumps(document()))
    line = ["instructions", str(measured), f"--library={measured}", f"--output={tmp_path}"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0 and "0.94 of arithmetic" in result.output, result.output
    written = json.loads((tmp_path / "instructions-nvidia-h200.json").read_text())
    assert written["settings"]["clock_mhz"] == 1980 and len(written["rows"]) == 1


def test_without_the_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass.shutil, "which", lambda name, path=None: None)
    with pytest.raises(BenchError, match="no cuobjdump and nvdisasm here.*cuda-cuobjdump"):
        sass.kernels(Path("libcustom_ops.so"))
