"""Settings of the service: validation, precedence, the resolution of paths."""

from pathlib import Path

import pytest
import service_models as models
from service_loads import refusal_of, repository_of
from service_models import place, relu

from twinop.deploy.service.operations import Token
from twinop.deploy.service.settings import ServerSettings, Settings, SettingsError, read_settings


def written(folder: Path, text: str) -> Path:
    path = folder / "twinop.toml"
    path.write_text(text)
    return path


def test_layers_from_the_general_to_the_command_line(tmp_path: Path) -> None:
    path = written(tmp_path, "[model]\nmax_queue = 1\ninstances = 1\nmax_batch_size = 1\nallow_empty = true\n"
                             "[models.relu]\nmax_batch_size = 3\ninstances = 3\n")  # fmt: skip
    settings = read_settings(path, {"model": {"instances": 4}})
    relu = settings.for_model("relu", {"max_queue": 2, "max_batch_size": 2, "instances": 2})
    assert (relu.max_queue, relu.max_batch_size, relu.instances, relu.allow_empty) == (2, 3, 4, True)
    other = settings.for_model("other", {"max_batch_size": 2})
    assert (other.max_queue, other.max_batch_size, other.instances) == (1, 2, 4)


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '[server]\nlibrary_folders = ["libs", "/opt/libs"]\ntoken_file = "token"\n'
        '[models.relu]\nlibrary = "own/librelu.so"\n',
    )
    settings = read_settings(path, {})
    assert settings.server.token_file == tmp_path / "token"
    assert settings.for_model("relu").library == (tmp_path / "own" / "librelu.so",)
    assert settings.server.library_folders == (tmp_path / "libs", Path("/opt/libs"), tmp_path / "own")
    path.write_text(path.read_text(), "utf-8-sig")  # as editors of Windows do
    assert read_settings(path, {}) == settings


def test_a_library_of_the_command_line_may_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = read_settings(None, {"model": {"library": [Path("build/librelu.so")]}})
    assert settings.for_model("relu").library == (tmp_path / "build" / "librelu.so",)
    assert settings.server.library_folders == (tmp_path / "build",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nport = 1", "server.port: no such setting. There are: host, http_port, "),
        ("[sever]\nport = 1", "sever: no such setting. There are: server, model, models$"),
        ("[models.a]\nhost = 1", r"\[models.a\]: no such setting: host. There are: library, library_sha256"),
        ("[server]\nhttp_port = 70000", "server.http_port: .*65535"),
        ('[model]\nprovider = "tpu"', "model.provider: .*'auto', 'cpu' or 'cuda'"),
        ('[model]\nversions = "newest"', "model.versions"),
        ('[policy]\nlibraries = "all"', "policy: no such setting. There are: server, model, models$"),
        ("[model.provider_options.rocm]", "Input should be 'cuda'"),
        (
            "[model]\nprovider = 'cpu'\n[model.provider_options.cuda]\nuse_tf32 = true",
            "provider_options need provider cuda or auto, not cpu",
        ),
        ("[server]\nhttp_port = -1\ngrpc_port = -1", r"server.http_port: .*\n  - server.grpc_port: "),
        ("[[", "not TOML"),
        ('[model]\ninstances = "2"', "model.instances: Input should be a valid integer"),
        (
            "[server]\nbody_seconds = 1e9",
            "server.body_seconds: .* less than or equal to 1000000",
        ),
        ("[server]\ngrpc_port = 8080", "http_port and grpc_port must differ"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as error:
        read_settings(written(tmp_path, text), {})
    assert str(tmp_path / "twinop.toml") in str(error.value)


def test_problems_of_one_model_name_it() -> None:
    settings = Settings(models={"relu": {"instances": "many"}})
    assert settings.for_model("other").instances == 1
    with pytest.raises(SettingsError, match=r"the settings of model relu:\n  - instances: "):
        settings.for_model("relu")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no.toml: cannot be read: No such file"):
        read_settings(tmp_path / "no.toml", {})


def test_long_messages_are_cut(tmp_path: Path) -> None:
    path = written(tmp_path, "[model]\n" + "\n".join(f"a{i} = 1" for i in range(10_000)))
    with pytest.raises(SettingsError, match="model.a0: no such setting") as error:
        read_settings(path, {})
    assert len(str(error.value)) < 5000


@pytest.fixture
def one_model(tmp_path: Path) -> Path:
    place(tmp_path / "models", "m", relu())
    return tmp_path / "models"


def test_settings_from_elsewhere(one_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").write_text("[models.m]\nmax_batch_size = 5\n[server]\ntoken_file = 'token'\n")
    settings = repository_of(monkeypatch, one_model, "--config", str(tmp_path / "mine.toml")).settings
    assert settings.server.token_file == tmp_path / "token"
    assert settings.for_model("m").max_batch_size == 5


def test_the_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, sent in (("secret", b"secret"), (" secret\n", b"secret"), ("\udcff", b"\xff")):
        monkeypatch.setenv("TWINOP_TOKEN", given)
        token = Token(ServerSettings())
        assert token.allow("/v2/models", b"Bearer " + sent) and not token.allow("/v2/models", b"")
    monkeypatch.setenv("TWINOP_TOKEN", "")
    with pytest.raises(SettingsError, match="TWINOP_TOKEN is empty. Give it a token, or leave it out to"):
        Token(ServerSettings())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("token_file = 'none'", "none cannot be read: No such file"),
        ("token_file = '/dev/null'", "/dev/null cannot be read: not a regular file"),
        ("token_file = 'empty'", "empty is empty"),
        ("max_bytes_in_flight = 1000", "max_bytes_in_flight must be at least 268435456: four times"),
    ],
)
def test_contradictions(tmp_path: Path, settings: str, said: str) -> None:
    models.place(tmp_path, "relu", models.relu())
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "twinop.toml").write_text(f"[server]\n{settings}\n")
    assert said in refusal_of(tmp_path)
