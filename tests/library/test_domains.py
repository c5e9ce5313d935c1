"""Libraries of several domains in one session."""

import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import warm_python
from abi_files import CPU, FLOAT, INT64, ROOT, X, c_library, model
from onnx import helper

from twinop import deploy
from twinop.errors import LibraryError
from twinop.libraries.library import find_library


def three_domains() -> onnx.ModelProto:
    """z = scale_by(negate(relu(x)), factors)."""
    nodes = [
        helper.make_node("CustomRelu", ["x"], ["r"], "relu", domain="custom_domain"),
        helper.make_node("CustomNegate", ["r"], ["n"], "negate", domain="test_c"),
        helper.make_node("CustomScaleBy", ["n", "factors"], ["z"], "scale", domain="test.abi"),
    ]
    inputs = {"x": FLOAT, "factors": INT64}
    return model(nodes, inputs, {"z": FLOAT}, custom_domain=1, test_c=1, test__abi=2)


FACTORS = np.array([2, 3], np.int64)


def test_libraries_of_several_domains(tmp_path: Path) -> None:
    plain, abi = c_library("plain_c"), find_library("test_abi")
    expected = -5 * np.maximum(X, 0)
    opened = deploy.session(three_domains(), CPU, [plain, abi])
    assert [library.domain for library in opened.libraries] == ["test_c", "test.abi", "custom_domain"]
    assert opened.libraries[2].path.name == "libcustom_relu.so"
    np.testing.assert_array_equal(opened.run({"x": X, "factors": FACTORS})["z"], expected)
    assert deploy.check_model(three_domains(), [plain, abi]) == opened.libraries

    path = tmp_path / "model.onnx"  # every library is found, one of them beside the model
    path.write_bytes(three_domains().SerializeToString())
    shutil.copy(plain, tmp_path)
    found = deploy.session(path, CPU, allow_model_libraries=True)
    assert {library.domain for library in found.libraries} == {"test_c", "test.abi", "custom_domain"}
    np.testing.assert_array_equal(found.run({"x": X, "factors": FACTORS})["z"], expected)

    shapes = ["--shape", "x=3", "--shape", "factors=2"]
    done = warm_python.run(
        [ROOT / "deploy/run_onnx.py", path, "--allow-model-libraries", "--provider", "cpu", *shapes],
        env={"COLUMNS": "200", "PATH": "/usr/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" yes ") == 3 and all(name in done.stdout for name in ("test_c", "test.abi"))


def test_two_libraries_of_one_domain(libraries: dict[str, Path]) -> None:
    with pytest.raises(LibraryError, match=r"both have ops of the domain custom_domain.*one library per"):
        deploy.session(three_domains(), CPU, [libraries["custom_relu"], libraries["custom_ops"]])


def test_a_library_that_is_named_again(tmp_path: Path, libraries: dict[str, Path]) -> None:
    (link := tmp_path / "liblink.so").symlink_to(libraries["custom_relu"])
    named = [libraries["custom_relu"], Path(os.path.relpath(libraries["custom_relu"])), link]
    others = [c_library("plain_c"), find_library("test_abi")]
    opened = deploy.session(three_domains(), CPU, [*named, *others])
    assert [each.domain for each in opened.libraries] == ["custom_domain", "test_c", "test.abi"]
