"""The table by which row-wise kernels are chosen (kernels/rowwise/choices.h)."""

import subprocess
from pathlib import Path

from record_driver import ROOT, compiler


def test_a_row_is_added_in_one_order_and_every_kernel_is_chosen(tmp_path: Path) -> None:
    """The width alone decides the order: neither the alignment nor the number of rows changes a row's bits.

    A kernel that is compiled for an op, and that no shape chooses, would only cost size.
    """
    program = tmp_path / "choices"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/twinop/include"]
    subprocess.run(
        [compiler(), *flags, str(ROOT / "tests/kernels/choices.cpp"), "-o", str(program)], check=True
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    assert done.stdout == "checked\n"
