"""How kernels are chosen (choose.h of kernels/rowwise, of attention_cached, ...) for a GPU and its parts."""

import subprocess
from pathlib import Path

import pytest
from record_driver import ROOT, compiler


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("choices") / "choices"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/twinop/include"]
    subprocess.run([compiler(), *flags, ROOT / "tests/kernels/choices.cpp", "-o", program], check=True)
    return program


def test_choices_keep_the_bits_and_the_limits_and_every_kernel_is_chosen(program: Path) -> None:
    """On one GPU the width alone decides the order: neither the alignment nor the rows change a row's bits.

    A kernel that is compiled for an op, and that no shape chooses, would only cost size.
    """
    done = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    assert done.stdout == "checked\n"


@pytest.mark.parametrize("value", ["", "8.8", "90", "sm_89", "8.9 "])
def test_a_target_that_is_none(program: Path, value: str) -> None:
    said = subprocess.run([str(program), value], capture_output=True, text=True, check=True).stdout
    assert said == (
        f'TWINOP_TARGET is "{value}"; expected one of 8.0, 8.6, 8.9, 9.0, 10.0, 12.0: the compute capability '
        "of the GPU whose limits kernels are to keep\n"
    )
