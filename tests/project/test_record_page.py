"""docs/guide/record.md: its records compile, and its Python runs."""

from typing import Any

from record_driver import read_by_compiler
from test_docs import blocks_of

PAGE = "docs/guide/record.md"


def test_the_records_compile() -> None:
    records = [block.text.strip() for block in blocks_of(PAGE) if block.language == "cpp"]
    assert len(records) >= 5
    checks = "\n".join(f"static_assert(Parse({text}).input_count > 0);" for text in records)
    source = f'#include "twinop/record/parse.h"\nnamespace twinop {{\n{checks}\n}}\n'
    done = read_by_compiler(source)
    assert done.returncode == 0, done.stderr


def test_the_python_of_the_page() -> None:
    names: dict[str, Any] = {}
    for block in blocks_of(PAGE):
        if block.language == "python":
            exec(compile(block.text, PAGE, "exec"), names)
    assert names["moved"].shape == (8, 64) and names["curvature"].shape == (64, 64)
    assert names["each"].shape == (8, 16)
    assert names["norm"](names["x"]).shape == (8, 64)
    given = names["reference"]("any")
    assert given.allowed("float32") == 4 and given.gradient_ulps == 64
