"""The texts of a record are parsed where it is compiled. Nothing that runs has a parser for them."""

import re
import subprocess
from pathlib import Path

import pytest
from record_driver import ROOT, compiler, program

from twinop.libraries.library import find_library

PARSERS = re.compile(r"twinop::(?:Scanner|Parser|ShapeParser|ReadEntries|ReadDefault|ReadFloat|ParseKind)\b")
SOURCES = [
    path
    for folder in ("ort_customop", "torch_op", "kernels/record")
    for path in sorted((ROOT / folder).glob("*.cpp"))
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_no_source_of_an_adapter_includes_the_parser(source: Path) -> None:
    """Neither directly nor through other headers of twinop."""
    command = [compiler(), "-std=c++17", f"-I{ROOT}", f"-I{ROOT}/twinop/include", "-MM", "-MG", str(source)]
    found = subprocess.run(command, text=True, capture_output=True, check=True).stdout
    assert "twinop/record/op_spec.h" in found
    assert not re.findall(r"record/(?:parse|parse_shape|scanner|record|json|registry)\.h", found)


def test_no_object_has_code_of_the_parser() -> None:
    def names(*files: Path) -> str:
        return subprocess.run(["nm", "-C", *files], text=True, capture_output=True, check=True).stdout

    build = find_library("twinop_torch").parent
    ort = names(build / "libtwinop_ort.a")
    torch = names(*(build / "CMakeFiles/twinop_torch.dir/torch_op").glob("*.o"))
    assert "twinop::ort::CreateKernel" in ort and "twinop::torch_op::CallBoxed" in torch
    assert not PARSERS.findall(ort + torch)
    assert PARSERS.findall(names(program()))  # the driver of the tests parses when it runs
