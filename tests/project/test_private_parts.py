"""twinop uses private parts of some packages: each of these has an upper bound.

The bounds in pyproject.toml say up to which version of a package this was tried. To raise one, install the
new version, run the tests, and move the bound.
"""

import importlib.metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from twinop.deploy.service.newer_python import tomllib

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("helion", "onnx-ir", "onnxruntime", "onnxscript", "torch", "triton", "uvicorn")


def bounds() -> dict[str, SpecifierSet]:
    """What pyproject.toml asks of each package, in all its lists together."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, works = settings["project"], settings["dependency-groups"]["works"]
    found: dict[str, SpecifierSet] = {}
    for text in (
        *project["dependencies"],
        *works,
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ):
        asked = Requirement(text)
        found[asked.name] = found.get(asked.name, SpecifierSet()) & asked.specifier
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_whose_private_parts_are_used_is_bounded(package: str) -> None:
    """Fails for a version that was not tried: run the tests with it, then raise the bound."""
    asked = bounds()[package]
    assert any(each.operator in ("<", "<=") for each in asked), (
        f"{package} has no upper bound in pyproject.toml"
    )
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    assert asked.contains(version, prereleases=True), (
        f"{package} {version} is not in {asked} of pyproject.toml"
    )
