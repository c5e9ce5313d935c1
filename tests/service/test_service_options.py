"""Options of `twinop serve`: their effect on the settings, and on a running server."""

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from service_fixtures import serve, wait_until
from service_held import held
from service_loads import repository_of
from service_models import place, relu
from service_rows import QUICK, ROW, in_flight

from twinop.libraries.library import find_library


@pytest.fixture
def one_model(tmp_path: Path) -> Path:
    place(tmp_path / "models", "m", relu())
    return tmp_path / "models"


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
    (tmp_path / "mine.toml").write_text("[models.m]\nmax_batch_size = 5\n[server]\ntoken_file = 'token'\n")
    settings = repository_of(monkeypatch, one_model, "--config", str(tmp_path / "mine.toml")).settings
    assert settings.server.token_file == tmp_path / "token"
    assert settings.for_model("m").max_batch_size == 5


def test_a_library_of_another_folder_and_two_runs_at_a_time(tmp_path: Path) -> None:
    place(tmp_path / "models", "m", relu())
    (tmp_path / "elsewhere").mkdir()
    library = shutil.copy(find_library("custom_relu"), tmp_path / "elsewhere" / "libmine.so")
    (tmp_path / "models" / "twinop.toml").write_text("[model]\ninstances = 2\nmax_queue = 1\n")
    program = held(runs=tmp_path / "held")
    with serve(tmp_path / "models", *QUICK, "--library", str(library), program=program) as served:
        told = served.ask("GET", "/v2/models/m").json["parameters"]
        assert told["library"] == "libmine.so" and told["custom_nodes"] == "CustomRelu x1"
        assert told["instances"] == 2

        (tmp_path / "held").touch()
        with ThreadPoolExecutor() as pool:
            waiting = []
            for number in (1, 2, 3):
                waiting.append(pool.submit(served.infer, "m", ROW))
                wait_until(partial(in_flight, served, number, "m"))
                assert served.metric("twinop_queued", model="m") == max(number - 2, 0)
            assert served.infer("m", ROW).status == 429  # two requests run and one waits
            (tmp_path / "held").unlink()
        assert [each.result().status for each in waiting] == [200] * 3
