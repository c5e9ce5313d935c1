"""The library beside a served model: damaged, or replaced while the service runs."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import service_models
from service_fixtures import Served, serve, start, wait_until
from service_loads import loaded
from service_rows import QUICK, y_of

from twinop.deploy.service.settings import ServerSettings
from twinop.errors import LibraryError


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def zeroed(data: bytes) -> bytes:
    """Clear half of the code's pages."""
    return data[:0x20000] + bytes(0x40000) + data[0x60000:]


@pytest.mark.parametrize("place", ["1", "."])
def test_a_damaged_library_beside_a_model_is_an_error(
    libraries: dict[str, Path], tmp_path: Path, place: str
) -> None:
    """It is not passed over for the installed one."""
    service_models.place(tmp_path, "m", service_models.relu())
    beside = tmp_path / "m" / place / "libcustom_relu.so"
    beside.write_bytes(cut(libraries["custom_relu"].read_bytes()))
    with pytest.raises(LibraryError) as error:
        loaded(tmp_path, service_models.relu())
    for part in (f"{beside}: the file is damaged or cut short", "lies beside the model", "allow_fallback"):
        assert part in str(error.value)
    assert loaded(tmp_path, service_models.relu(), allow_fallback=True).body_nodes == ("CustomRelu x1",)


def test_a_damaged_library_elsewhere_is_passed_over(libraries: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "libraries"
    folder.mkdir()
    (folder / "libcustom_relu.so").write_bytes(cut(libraries["custom_relu"].read_bytes()))
    server = ServerSettings(library_folders=(folder,))
    model = loaded(tmp_path / "models", service_models.relu(), server)
    assert model.library is not None and model.library.path == libraries["custom_relu"]


@pytest.mark.parametrize("command", ["serve", "run"])
def test_the_commands_name_file_and_cause(libraries: dict[str, Path], tmp_path: Path, command: str) -> None:
    """Pages of zeros in the code must not end the process with SIGSEGV."""
    path = service_models.place(tmp_path / "models", "m", service_models.relu())
    beside = path.with_name("libcustom_relu.so")
    beside.write_bytes(zeroed(libraries["custom_relu"].read_bytes()))
    log = tmp_path / "log"
    if command == "serve":
        process = start(tmp_path / "models", log, *QUICK)
    else:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "twinop", "run", path], stdout=output, stderr=output
            )
    try:
        assert process.wait(120) == 1
    finally:
        process.kill()
    said = " ".join(log.read_text().split())
    assert f"error: {beside}: the file is damaged" in said and "Copy or build it again" in said
    assert "Traceback" not in said


def checksum_of(served: Served) -> str:
    told = served.ask("GET", "/v2/models/m").json["parameters"]["library_sha256"]
    assert isinstance(told, str)
    return told


def test_a_library_that_is_replaced_while_it_is_served(libraries: dict[str, Path], tmp_path: Path) -> None:
    """The checksum stays that of the code that runs."""
    settings = "versions = 'all'\nallow_fallback = true"
    path = service_models.place(tmp_path, "m", service_models.relu(), settings=settings)
    (tmp_path / "twinop.toml").write_text("[server]\npoll_seconds = 0.05")
    beside = Path(shutil.copy(libraries["custom_relu"], path.parent))
    old = beside.read_bytes()
    new = old + b"\0"
    with serve(tmp_path, *QUICK) as served:
        assert checksum_of(served) == hashlib.sha256(old).hexdigest()
        (tmp_path / "new").write_bytes(new)
        (tmp_path / "new").rename(beside)
        wait_until(lambda: "was replaced after" in served.versions()["m", 1][1])
        said = next(line["message"] for line in served.log if "was replaced" in line["message"])
        assert str(beside) in said and "Restart it, or put" in said and "new version's" in said
        assert checksum_of(served) == hashlib.sha256(old).hexdigest()  # it still runs
        assert y_of(served, "m") == [0, 2, 0, 4] and served.metric("twinop_fallback", model="m") == 0

        path = service_models.place(tmp_path, "m", service_models.relu(), version=2)
        path.with_name("libcustom_relu.so").write_bytes(new)
        wait_until(lambda: served.versions().get(("m", 2), ("",))[0] == "ready")
        assert checksum_of(served) == hashlib.sha256(new).hexdigest()
        assert y_of(served, "m") == [0, 2, 0, 4]
    with serve(tmp_path, *QUICK) as served:  # a restart uses it
        assert served.versions()["m", 1][0] == "ready"
