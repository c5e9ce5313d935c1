"""Options of `twinop serve`: their effect on the settings, and on a running server."""

import asyncio
import shutil
import threading
from functools import partial
from pathlib import Path

import click
import pytest
import typer
from service_fixtures import serve, wait_until
from service_loads import refusal_of, repository_of
from service_models import place, relu, slow
from service_rows import QUICK, ROW

from twinop.cli import app
from twinop.errors import TwinopError
from twinop.library import find_library


@pytest.fixture
def one_model(tmp_path: Path) -> Path:
    place(tmp_path / "models", "m", relu())
    return tmp_path / "models"


def test_a_fallback_is_said_in_the_log_the_metadata_the_metrics_and_on_the_page(tmp_path: Path) -> None:
    place(tmp_path, "m", relu())
    (tmp_path / "twinop.toml").write_text(f"[model]\nlibrary_sha256 = '{'0' * 64}'\nallow_fallback = true\n")
    with serve(tmp_path, *QUICK) as served:
        assert served.infer("m", ROW).json["outputs"][0]["data"] == [0, 2, 0, 4]
        told = served.ask("GET", "/v2/models/m").json["parameters"]
        assert "SHA-256" in told["fallback"] and told["custom_nodes"] == ""
        assert told["function_body_nodes"] == "CustomRelu x1"
        assert served.metric("twinop_fallback", model="m") == 1
        assert "SHA-256" in served.ask("GET", "/status").content.decode()
        assert any("runs on its function bodies" in line["message"] for line in served.log)


def test_profiles_are_written_when_the_service_ends(
    one_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "profiles").mkdir()
    (one_model / "twinop.toml").write_text(
        f"[model.session]\nenable_profiling = true\nprofile_file_prefix = '{tmp_path}/profiles/m'\n"
    )
    repository = repository_of(monkeypatch, one_model, *QUICK)

    async def load_and_close() -> None:
        await repository.load_all()
        await repository.close()

    asyncio.run(load_and_close())
    profiles = list((tmp_path / "profiles").glob("m_*.json"))
    assert any('"op_name" : "CustomRelu"' in each.read_text() for each in profiles)


def test_a_settings_file_from_elsewhere(
    one_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text("[models.m]\nmax_batch_size = 5\n[server]\ntoken = 'secret'\n")
    settings = repository_of(monkeypatch, one_model, "--config", str(tmp_path / "mine.toml")).settings
    assert settings.server.token is not None and settings.server.token.get_secret_value() == "secret"
    assert settings.for_model("m").max_batch_size == 5


def test_an_empty_token_is_refused(one_model: Path) -> None:
    (one_model / "twinop.toml").write_text('[server]\ntoken = ""\n')
    assert "server.token" in refusal_of(one_model)


def test_a_library_of_another_folder_a_token_and_two_runs_at_a_time(tmp_path: Path) -> None:
    place(tmp_path / "models", "m", relu())
    place(tmp_path / "models", "slow", slow(rounds=1500))
    (tmp_path / "elsewhere").mkdir()
    library = shutil.copy(find_library("custom_relu"), tmp_path / "elsewhere" / "libmine.so")
    (tmp_path / "token").write_text("secret\n")
    options = ("--library", str(library), "--token-file", str(tmp_path / "token"))
    (tmp_path / "models" / "twinop.toml").write_text("[model]\ninstances = 2\nmax_queue = 1\n")
    with serve(tmp_path / "models", "--provider", "cpu", *options) as served:
        known = {"authorization": "Bearer secret"}

        def infer(model: str, **headers: str) -> int:
            body = {"inputs": [ROW]}
            return served.ask("POST", f"/v2/models/{model}/infer", body, headers).status

        def gauge(name: str) -> float:
            lines = served.ask("GET", "/metrics", headers=known).content.decode().splitlines()
            return next(float(line.split()[-1]) for line in lines if line.startswith(f'{name}{{model="slow"'))

        def is_so(in_flight: int) -> bool:
            return gauge("twinop_in_flight") == in_flight

        assert infer("m") == infer("m", authorization="Bearer wrong") == 401
        assert infer("m", **known) == 200
        told = served.ask("GET", "/v2/models/m", headers=known).json["parameters"]
        assert told["library"] == "libmine.so" and told["custom_nodes"] == "CustomRelu x1"
        assert told["instances"] == 2

        found: list[int] = []
        threads = [threading.Thread(target=lambda: found.append(infer("slow", **known))) for _ in range(3)]
        for number, thread in enumerate(threads, 1):
            thread.start()
            wait_until(partial(is_so, number))
            assert gauge("twinop_queued") == max(number - 2, 0)
        assert infer("slow", **known) == 429  # two requests run and one waits
        for thread in threads:
            thread.join()
        assert found == [200] * 3


def test_settings_may_name_libraries_in_a_library_folder(
    one_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    library = shutil.copy(find_library("custom_relu"), tmp_path / "elsewhere" / "libmine.so")
    place(one_model, "m", relu(), settings=f'library = "{library}"')
    with pytest.raises(TwinopError, match=r"libmine\.so: .*libraries are loaded only from"):
        asyncio.run(repository_of(monkeypatch, one_model, *QUICK).load_all())
    options = (*QUICK, "--library-folder", str(tmp_path / "elsewhere"))
    repository = repository_of(monkeypatch, one_model, *options)
    asyncio.run(repository.load_all())
    loaded = repository.find("m").loaded
    assert loaded.library is not None and loaded.library.path.name == "libmine.so" and loaded.fallback is None


@pytest.mark.parametrize(
    "options, words",
    [
        (("--token-file", "/nowhere"), "the token's file /nowhere cannot be read: No such file"),
        (("--token-file", "/dev/null"), "the token's file /dev/null cannot be read: not a regular file"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: tuple[str, ...], words: str, one_model: Path) -> None:
    assert words in refusal_of(one_model, *options)


def test_an_empty_file_of_a_token_is_refused(one_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(" \n")
    assert f"the token's file {file} is empty" in refusal_of(one_model, "--token-file", str(file))


def test_a_library_that_does_not_exist(one_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = repository_of(monkeypatch, one_model, *QUICK, "--library", "nowhere.so")
    with pytest.raises(TwinopError, match=r"nowhere\.so: no such library"):
        asyncio.run(repository.load_all())


def test_the_options_are_few() -> None:
    """What one server needs on the command line; the rest is in twinop.toml."""
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = [each for each in command.params if isinstance(each, click.Option)]
    assert len(options) + 1 <= 18  # and --help
