"""docs/guide/record.md: its records compile, its Python runs, and what it says of refusals is said."""

import subprocess
from pathlib import Path
from typing import Any

from record_driver import ROOT, compiler
from test_docs import blocks_of

PAGE = "docs/guide/record.md"


def test_the_records_compile(tmp_path: Path) -> None:
    records = [block.text.strip() for block in blocks_of(PAGE) if block.language == "cpp"]
    assert len(records) >= 5
    checks = "\n".join(f"static_assert(Validate({text}));" for text in records)
    source = f'#include "twinop/record/validate.h"\nnamespace twinop {{\n{checks}\n}}\n'
    (tmp_path / "page.cpp").write_text(source)
    flags = ["-std=c++17", "-fsyntax-only", f"-I{ROOT}", f"-I{ROOT}/twinop/include"]
    done = subprocess.run([compiler(), *flags, tmp_path / "page.cpp"], capture_output=True, text=True)
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
