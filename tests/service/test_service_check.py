"""`twinop check` says whether the service would serve the models."""

import hashlib
import shutil
from pathlib import Path

import service_models
from typer.testing import CliRunner, Result

from twinop.cli import app

CPU = ("--provider", "cpu")


def check(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["check", *map(str, arguments), *CPU])


def test_models_that_can_be_served(libraries: dict[str, Path], tmp_path: Path) -> None:
    path = service_models.place(tmp_path, "m", service_models.relu())
    service_models.place(tmp_path, "plain", service_models.mlp(4, 4, custom=False), version=7)
    one = check(path, "--library", libraries["custom_relu"])
    assert one.exit_code == 0 and one.stdout.count("\n") == 1
    digest = hashlib.sha256(libraries["custom_relu"].read_bytes()).hexdigest()
    for part in (
        "model version 1 can be served: runs on cpu (asked for)",
        f"CustomRelu x1 from {libraries['custom_relu']}",
        digest,
        "difference from the function bodies: none",
    ):
        assert part in one.stdout
    all_of_them = check(tmp_path)
    assert all_of_them.exit_code == 0
    assert "m version 1 can be served" in all_of_them.stdout
    assert "plain version 7 can be served: runs on cpu (asked for)\n" in all_of_them.stdout


def test_each_model_that_cannot_be_served_is_told(libraries: dict[str, Path], tmp_path: Path) -> None:
    good, bad, other = (
        service_models.place(tmp_path, name, service_models.relu()) for name in ("a", "b", "c")
    )
    bad.write_bytes(b"not a model")
    shutil.copy(libraries["custom_relu"], other.parent)
    found = check(tmp_path)
    assert found.exit_code == 1 and "Traceback" not in found.output
    assert "a version 1 can be served" in found.stdout and "b version" not in found.stdout
    said = found.stderr
    assert said.startswith("error: model b: ") and said.count("\nmodel ") == 1
    assert "model c: " in said and "--allow-model-libraries" in said
    assert check(good, "--library-sha256", "0" * 64).exit_code == 1
    assert (
        check(tmp_path / "c", "--allow-model-libraries").exit_code == 1
    )  # a model's folder, not one of models
    bad.unlink()
    assert check(tmp_path, "--allow-model-libraries").exit_code == 0
