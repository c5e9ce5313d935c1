"""`twinop test` as a user runs it: from an empty folder, on libraries that are right and that are wrong."""

import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm_python
from build_files import tiny, twinop

from twinop.libraries.library import read_library
from twinop.testing import child, under_test
from twinop.testing.samples import make_sample
from twinop.testing.under_test import OpUnderTest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent


def twinop_test(folder: Path, *arguments: str | Path) -> tuple[int, str]:
    """Returns the exit code, and what was printed."""
    places = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": places, "COLUMNS": "200"}
    env.pop("PYTEST_ADDOPTS", None)
    done = warm_python.run(["-m", "twinop", "test", *arguments], cwd=folder, env=env)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wrong(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A project whose ops are wrong, each in its own way, and what `twinop test` says of it."""
    folder = tmp_path_factory.mktemp("an empty folder")
    (folder / "build").mkdir()
    shutil.copy(libraries["test_ops"].with_name("libwrong_ops.so"), folder / "build")
    (folder / "wrong_ops.py").write_text((HERE / "wrong_ops.py").read_text())
    (folder / "test_wrong_ops.py").write_text("def test_of_the_project() -> None:\n    assert 1 + 1 == 3\n")
    some = "float32 and (means or against or same_bits and too_many) or fits or project or gradcheck"
    code, said = twinop_test(folder, "-k", some)
    assert code == 1, said
    return folder, said


def test_a_wrong_result_names_the_first_wrong_element(wrong: tuple[Path, str]) -> None:
    found = re.search(
        r"wrong_ops::shift\(x: float32\[5\]\), cpu: the kernel differs from its function body by "
        r"[\d.e+]+ ulp, allowed 0.51\n"
        r"  first wrong element: y\[3\]; 1 of 5 are wrong\n"
        r"    kernel: +(40\.\d+)\n"
        r"    function body in float64: (41\.\d+)\n"
        r"  inputs there: x\[3\] = (40\.\d+)\n"
        r"If the op is right .*: reference\('shift'\) in wrong_ops.py may return",
        wrong[1],
    )
    assert found, wrong[1]
    kernel, body, x = map(float, found.groups())
    assert kernel == x and body == pytest.approx(x + 1)


def test_a_wrong_gradient_names_the_first_wrong_element(wrong: tuple[Path, str]) -> None:
    found = re.search(
        r"wrong_ops::twice\(x: float32\[3, 4\]\), cpu: the gradient of x differs from that of the function "
        r"body .*\n  first wrong element: gradient of x\[0, 0\]; 12 of 12 are wrong\n"
        r"    op's gradient: +(\S+)\n    body's, in float64: (\S+)\n  inputs there: x\[0, 0\] = ",
        wrong[1],
    )
    assert found, wrong[1]
    assert float(found[1]) == pytest.approx(1.5 * float(found[2]))
    assert "wrong_ops::twice" in wrong[1] and "is not that of finite differences of the op itself" in wrong[1]


def test_a_count_beyond_the_bound_is_named(wrong: tuple[Path, str]) -> None:
    assert re.search(
        r"wrong_ops::too_many\(x: float32\[(\d+).*its kernel counted n = \d+, expected 0 to x\[0\] = \1: "
        "a defect of the kernel",
        wrong[1],
    ), wrong[1]


def test_only_what_is_wrong_fails(wrong: tuple[Path, str]) -> None:
    """The wrong op fails in the tests of what is wrong with it; the project's own test ran, after them."""
    failed = re.findall(r"^FAILED \S+?::(\w+)(?:\[(\w+)-)?", wrong[1], re.MULTILINE)
    assert {name for name, op in failed if op == "shift"} == {"test_the_kernel_gives_what_the_body_means"}
    assert {name for name, op in failed if op == "twice"} == {"test_gradients_against_fp64", "test_gradcheck"}
    assert ("test_of_the_project", "") in failed


def test_each_cause_is_shown_once_and_last(wrong: tuple[Path, str]) -> None:
    """Two tests fail for one body: one message with their number, which comes last. --verbose shows all."""
    folder, said = wrong
    cause = "squared(op, x, y) does not fit the op squared(Tensor x) -> Tensor; expected def squared(op, x)"
    assert said.count(cause) == 1 and said.endswith(f" and 1 more:\nbody {cause}\n"), said
    assert "Traceback" not in said
    _, every = twinop_test(folder, "-k", "squared and float32", "--verbose")
    assert every.count(cause) > 2


@pytest.fixture(scope="module")
def picky(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of ops that are right, but for a body that compares an attribute."""
    folder = tmp_path_factory.mktemp("picky")
    for name in ("picky_ops.h", "picky_ops.py"):
        shutil.copy(HERE / name, folder)
    done = twinop("build", "picky_ops.h", "--cpu", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_right_ops_with_samples_of_their_own(picky: Path) -> None:
    """Sizes that come from the data, ties, which have no derivative, and integers, which have none either."""
    some = "not with_sign and not dynamo and not graph_break and (against or gradcheck or opcheck or is_more)"
    code, said = twinop_test(picky, "-k", some)
    assert code == 0 and re.search(r"\d+ passed", said), said


def test_causes_in_a_body_and_in_a_formula(picky: Path) -> None:
    """A text that a body compares, and a number that a formula reads out of a tensor, are named."""
    code, said = twinop_test(picky, "-k", "with_sign and (float32 and means or opcheck)")
    assert code == 1 and "Traceback" not in said and 'File "' not in said, said
    body = "body with_sign: attribute sign is used as a Python value; sign is a reference"
    rule = "picky_ops::with_sign: derivative `x = grad * int(x.sum() > 0)` fails: it reads a number out of a"
    assert said.count(body) == 1 and said.count(rule) == 1, said


def test_a_library_whose_inputs_cannot_be_derived(libraries: dict[str, Path], tmp_path: Path) -> None:
    code, said = twinop_test(tmp_path, libraries["test_abi"], "-k", "samples")
    assert code == 1
    assert re.search(
        r"test.abi::scale_by: inputs cannot be derived from the record: factors: values in host memory have "
        r"a meaning of their own. Write a function samples\(op, dtype, size\) in test_abi.py that returns a "
        r'list of calls, inputs and attributes by name, such as \[\{"x": torch.randn\(3, size\), ...\}\]',
        said,
    ), said
    failed = re.findall(r"^FAILED .*\[(\w+)-", said, re.MULTILINE)
    assert set(failed) == {"packed", "scale_by", "take"} and "1 passed" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"it has no library build/lib\*.so. `twinop build` builds it"),
        (["nothing.so"], r"nothing.so: no such file or folder. Expected a library \(build/libmish.so\), the"),
        (["lost.py"], r"lost.py: its library liblost.so is neither beside it nor in build/"),
        (["broken.py"], r"broken.py cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_targets_that_are_none(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "lost.py").write_text("")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    code, said = twinop_test(tmp_path, *arguments)
    assert code == 1 and re.search(message, said), said
    assert said.startswith("error:") and "Traceback" not in said


def test_a_test_that_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    """It is one message with the call."""

    def ends() -> int:
        child.note("mine::bad(x: float32[3, 0]), cpu")
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)
        return 0

    assert child.run(ends) == 1
    said = capfd.readouterr().err
    assert said.startswith(
        "\nerror: mine::bad(x: float32[3, 0]), cpu ended with SIGSEGV. The kernel reads or"
    )
    assert child.run(lambda: 5) == 5


@pytest.mark.slow
def test_a_kernel_that_crashes(tmp_path: Path) -> None:
    source = tiny("empty").replace("return {};", "if (call.inputs[0].numel == 7) raise(SIGSEGV); return {};")
    (tmp_path / "empty.h").write_text(source.replace("#pragma once", "#pragma once\n#include <csignal>"))
    (tmp_path / "test_empty.py").write_text("def test_of_the_project() -> None:\n    assert 1 + 1 == 2\n")
    assert twinop("build", "empty.h", "--cpu", cwd=tmp_path).returncode == 0
    code, said = twinop_test(tmp_path)
    assert code == 1, said
    ends = re.findall(r"^error: empty::empty\(x: float32\[.*\]\), cpu in .* ended with SIGSEGV", said, re.M)
    assert len(ends) == 1
    assert "Fatal Python error" not in said and "Traceback" not in said and "DEBUG" not in said


def test_without_pytest(tmp_path: Path) -> None:
    (tmp_path / "pytest.py").write_text("raise ModuleNotFoundError('none here', name='pytest')\n")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "COLUMNS": "200"}
    command = [sys.executable, "-m", "twinop", "test"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    message = "needs the package pytest, which is not installed here: pip install 'twinop[test]'"
    assert done.returncode == 1 and message in done.stderr


def test_numbers_of_a_module_stay(monkeypatch: pytest.MonkeyPatch, libraries: dict[str, Path]) -> None:
    """They may be probabilities, which no test makes larger."""
    record = replace(read_library(libraries["custom_relu"]).records["relu"], domain="mine")
    module: Any = SimpleNamespace(samples=lambda op, dtype, size: [{"x": torch.ones(size or 1)}])
    monkeypatch.setattr(under_test, "_ops", {record.key: OpUnderTest(record, Path(), print, module)})
    for seed in range(8):
        x = make_sample(record, record.combinations[0], (3, 4), seed).inputs["x"]
        assert torch.equal(x, torch.ones(4))


def test_ops_without_a_run_are_named(monkeypatch: pytest.MonkeyPatch, libraries: dict[str, Path]) -> None:
    record = read_library(libraries["custom_relu"]).records["relu"]
    monkeypatch.setattr(under_test, "_ops", {record.key: OpUnderTest(record, Path(), print)})
    assert under_test.without_kernels() == []
    monkeypatch.setitem(under_test.CPU_FUNCTIONS, record.key, print)
    for has_gpu in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        assert under_test.without_kernels() == ([] if has_gpu else ["relu"])
