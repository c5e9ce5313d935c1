"""`twinop pack`: what is in the folder, and that nothing is written where something is wrong."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from pack_fixtures import packed, saved
from service_models import identity, mlp, point_external, save_external
from typer.testing import CliRunner

from twinop import __version__
from twinop.cli.console import program
from twinop.deploy.errors import ModelError, PackError
from twinop.deploy.pack import command, packing
from twinop.deploy.pack.command import Options
from twinop.deploy.pack.packing import pack, pack_genai
from twinop.deploy.service.folders import scan
from twinop.deploy.service.newer_python import tomllib
from twinop.deploy.service.settings import ModelSettings, read_settings
from twinop.errors import TwinopError

APP = program(command.main)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(APP, arguments, env={"COLUMNS": "160", "TERM": "dumb"})


def settings_of(repo: Path) -> ModelSettings:
    """The settings with which `twinop serve repo/models` serves the model."""
    return read_settings(None, {}).for_model("custom_relu", scan(repo / "models")["custom_relu"].own)


def test_folder(tmp_path: Path, libraries: dict[str, Path]) -> None:
    repo, said = packed(tmp_path, library=[libraries["custom_relu"]], gpu=False)
    assert files(repo) == {
        "twinop-pack.json", "models/custom_relu/twinop.toml", "models/custom_relu/1/model.onnx",
        "models/custom_relu/1/libcustom_relu.so",
    }  # fmt: skip
    version = repo / "models/custom_relu/1"
    assert (version / "model.onnx").read_bytes() == (tmp_path / "custom_relu.onnx").read_bytes()
    checksum = hashlib.sha256(libraries["custom_relu"].read_bytes()).hexdigest()
    assert hashlib.sha256((version / "libcustom_relu.so").read_bytes()).hexdigest() == checksum
    settings = tomllib.loads((repo / "models/custom_relu/twinop.toml").read_text())
    assert settings["library_sha256"] == [checksum]
    assert said.library_paths == ["/mnt/models/custom_relu/1/libcustom_relu.so"]
    manifest = json.loads((repo / "twinop-pack.json").read_text())
    assert manifest["sha256"]["models/custom_relu/1/libcustom_relu.so"] == checksum
    assert manifest["twinop"] == __version__
    for path in ("twinop-pack.json", "models/custom_relu/twinop.toml"):
        assert str(tmp_path) not in (repo / path).read_text()


def test_another_user_can_read_all(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        repo, _ = packed(tmp_path, identity("FP32"))
    finally:
        os.umask(before)
    for path in (repo, *repo.rglob("*")):
        assert path.stat().st_mode & 0o005 == (0o005 if path.is_dir() else 0o004), path


def test_twinop_reads_what_it_wrote(tmp_path: Path) -> None:
    repo, _ = packed(tmp_path, max_batch_size=16, cpus=1, gpu=True)  # every machine has one core
    settings = settings_of(repo)
    assert (settings.max_batch_size, settings.intra_op_threads, settings.provider) == (16, 1, "cuda")
    assert settings.library_sha256 and settings.run_timeout_seconds == 60


def test_data_files_are_copied(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    data = save_external(mlp(4, 4, custom=False), path)
    pack(Options(path, tmp_path / "repo", name="mlp"))
    assert files(tmp_path / "repo/models/mlp/1") == {"model.onnx", "weights.bin"}
    data.rename(tmp_path.with_name("outside.bin"))
    point_external(path, "../outside.bin")
    with pytest.raises(ModelError, match="outside of its folder"):
        pack(Options(path, tmp_path / "repo", force=True))


def nothing_written(folder: Path) -> bool:
    return not (folder / "repo").exists() and not list(folder.glob(".repo*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "../up"}, "cannot be a model's name"),
        ({"name": ""}, "cannot be a model's name"),
        ({"library": [Path("missing.so")]}, "no such file"),
        ({"device": "cpu"}, "--device is for --genai: choose a packed model's with --gpu or --cpu"),
        ({"invariant": True}, "--invariant is for --genai: give it to twinop optimize"),
        ({"dtype": "float8"}, "--dtype is for --genai: give it to twinop optimize"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TwinopError, match=message):
        packed(tmp_path, **options)
    assert nothing_written(tmp_path)


def test_a_folder_of_genai(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="--max-batch-size does not apply to --genai: leave it out"):
        pack_genai(Options(tmp_path, tmp_path / "repo", genai=True, device="cpu", max_batch_size=2))
    with pytest.raises(PackError, match=r"/proc/no/repo: cannot be written: No such file"):
        pack_genai(Options(tmp_path, Path("/proc/no/repo"), genai=True))


def test_library_missing_though_bodies_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinop.libraries.find.library_folders", list)
    with pytest.raises(ModelError, match="no library has custom_domain::CustomRelu"):
        packed(tmp_path)
    assert nothing_written(tmp_path)


def test_only_force_replaces_and_only_what_was_packed(tmp_path: Path) -> None:
    repo, _ = packed(tmp_path)
    (repo / "mine.txt").write_text("added later")
    with pytest.raises(PackError, match="--force replaces it"):
        packed(tmp_path)
    assert (repo / "mine.txt").is_file()
    packed(tmp_path, version=2, force=True)
    assert files(repo / "models/custom_relu") >= {"twinop.toml", "2/model.onnx"}
    assert not (repo / "mine.txt").exists() and not (repo / "models/custom_relu/1").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"repo", "custom_relu.onnx"}


def test_a_folder_of_others_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    packed(tmp_path)  # an empty one is fine
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letters.txt").write_text("dear")
    with pytest.raises(PackError, match="not from twinop pack"):
        pack(Options(tmp_path / "custom_relu.onnx", tmp_path / "home", force=True))
    assert (tmp_path / "home/letters.txt").is_file()


def test_the_model_is_not_replaced_by_itself(tmp_path: Path) -> None:
    repo, _ = packed(tmp_path)
    inside = repo / "models/custom_relu/1/model.onnx"
    with pytest.raises(PackError, match="which --force would replace"):
        pack(Options(inside, repo, force=True))
    assert inside.is_file()


def test_failure_while_writing_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo, _ = packed(tmp_path)
    before = files(repo)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(packing, "_write_manifest", full)
    with pytest.raises(PackError, match="cannot be written: No space left"):
        packed(tmp_path, force=True)
    assert files(repo) == before
    assert {path.name for path in tmp_path.iterdir()} == {"repo", "custom_relu.onnx"}


def test_command(tmp_path: Path) -> None:
    path = saved(tmp_path)
    result = run(str(path), "-o", str(tmp_path / "repo"), "--cpu", "--max-batch-size", "4")
    assert result.exit_code == 0, result.output
    for part in ("custom_relu, version 1, for the CPU", " /mnt/models/custom_relu/1/lib", "twinop serve"):
        assert part in result.output
    again = run(str(path), "-o", str(tmp_path / "repo"))
    assert again.exit_code == 1 and "--force replaces it" in again.output
