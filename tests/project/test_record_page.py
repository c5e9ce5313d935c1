"""docs/guide/record.md: its records compile, its Python runs, and what it says of refusals is said."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from record_driver import ROOT, compiler
from test_docs import blocks_of

from twinop.call_checks import check_attributes
from twinop.errors import RecordError
from twinop.schema_text import record_of

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


def test_the_limits_are_those_of_the_page() -> None:
    text = (ROOT / PAGE).read_text()
    [(schema, limits)] = re.findall(r'Record\("(quantile.*?)"\)\s*\.limits\("(.*?)"\)', text)
    record = record_of(schema, "page", limits=limits)
    check_attributes(record, {"q": 1.0, "alpha": 1e-9, "bits": 4})
    for wrong in ({"q": 1.1}, {"q": -0.1}, {"bits": 5}):
        with pytest.raises(RecordError):
            check_attributes(record, wrong)
    said = re.search("attribute alpha is 0, expected a finite number > 0", text)
    assert said is not None
    with pytest.raises(RecordError, match=re.escape(said[0])):
        check_attributes(record, {"alpha": 0.0})


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


def test_the_functions_of_launchers_are_there() -> None:
    """In kernel.h and what it includes."""
    text = (ROOT / PAGE).read_text()
    headers = "".join(path.read_text() for path in (ROOT / "kernels").rglob("*.*h"))
    launchers = text.partition("## What a launcher reads")[2].partition("## Functions")[0]
    names = re.findall(r"`([A-Z]\w+)[<(]", launchers)
    assert len(names) > 6
    for name in names:
        assert re.search(rf"\b{name}\b", headers), name


STEPS = {  # of the formulas: not for functors
    *("ReduceByLn2", "SmallExp", "ScaledExp2", "ScaledExp", "SelectLogResult", "Log1pOfFraction", "Quotient"),
    *("PartsOfSigmoid", "NormalDistance", "ScaledBell", "Mills", "InverseOfOnePlus", "ClampTanhGelu"),
    "Product",
}


def offered() -> set[str]:
    """The functions of T that the headers of functors define."""
    math, cpu, polynomials, gelu = (
        (ROOT / f"kernels/math/{name}.h").read_text() for name in ("math", "cpu", "polynomials", "gelu")
    )
    names = set(re.findall(r"(?m)^TWINOP_INLINE \S+ ([A-Z]\w+)\(", math + cpu + polynomials))
    names |= set(re.findall(r"(?m)^TWINOP_FUNCTION\((\w+), ", math))
    names |= set(re.findall(r"(?m)^struct (\w+) {\n  TWINOP_INLINE T operator\(\)\(T x\)", gelu))
    return names - STEPS


def test_the_page_names_all_functions_of_functors_and_they_compile(tmp_path: Path) -> None:
    functors = (ROOT / PAGE).read_text().partition("## Functions in a functor")[2].partition("\n## ")[0]
    calls = re.findall(r"`((?:std::)?\w+(?:<T>{})?\([abcx, ]+\))`", functors)
    calls = [call for call in calls if not call.startswith(("float(", "int("))]
    assert {re.split("[<(]", call)[0] for call in calls if not call.startswith("std::")} == offered()
    numeric = re.split(r"#undef TWINOP_FUNCTION", (ROOT / "kernels/math/numeric.h").read_text())
    for part, arguments in zip(numeric[:3], ("x", "a, b", "x"), strict=True):  # of <cmath>, for ReducedFloat
        calls += [
            f"std::{name}({arguments})" for name in re.findall(r"TWINOP_FUNCTION\((?!name)(\w+)\)", part)
        ]
    assert len(calls) > 90
    lines = "".join(f"  (void){call};\n" for call in calls)
    source = (
        '#include "twinop/math/gelu.h"\nusing namespace twinop;\n'
        f"template <class T>\nvoid All(T x, T a, T b, T c) {{\n{lines}}}\n"
    )
    for T in ("float", "double", "ReducedFloat"):
        source += f"template void All<{T}>({T}, {T}, {T}, {T});\n"
    (tmp_path / "functions.cpp").write_text(source)
    flags = ["-std=c++17", "-fsyntax-only", f"-I{ROOT}/twinop/include"]
    done = subprocess.run([compiler(), *flags, tmp_path / "functions.cpp"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
