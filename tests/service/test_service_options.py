"""Options of `twinop serve`, and what they do."""

import asyncio
from pathlib import Path

import pytest
from service_loads import repository_of
from service_models import place, relu
from service_rows import QUICK


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
