"""The library beside a served model: damaged, or replaced while the service runs."""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import service_models
from abi_files import c_library, negate_model
from service_fixtures import Served, serve, wait_until
from service_loads import loaded
from service_rows import QUICK, ROW

from twinop.errors import LibraryError

MINUS, PLUS = [1, -2, 3, -4], [-1, 2, -3, 4]


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize("place", ["1", "."])
def test_a_damaged_library_beside_a_model_is_an_error(
    libraries: dict[str, Path], tmp_path: Path, place: str
) -> None:
    """It is not skipped for the installed one."""
    service_models.place(tmp_path, "m", service_models.relu())
    beside = tmp_path / "m" / place / "libcustom_relu.so"
    beside.write_bytes(cut(libraries["custom_relu"].read_bytes()))
    with pytest.raises(LibraryError) as error:
        loaded(tmp_path, service_models.relu())
    for part in (f"{beside}: the file is damaged or cut short", "lies beside the model"):
        assert part in str(error.value)


def checksum_of(served: Served) -> str:
    told = served.ask("GET", "/v2/models/m").json["parameters"]["library_sha256"]
    assert isinstance(told, str)
    return told


def put(path: Path, data: bytes) -> None:
    """Put a file into a folder that is followed, as a whole."""
    new = path.parents[1] / "new"
    new.write_bytes(data)
    new.rename(path)


def test_a_library_that_is_replaced_under_load(tmp_path: Path) -> None:
    """The answers show which code runs: the first library gives -x, the second one x."""
    service_models.place(tmp_path / "models", "m", negate_model())
    service_models.place(tmp_path / "models", "n", service_models.relu())
    library = tmp_path / "libs" / "libplain_c.so"
    library.parent.mkdir()
    minus, plus = c_library("plain_c").read_bytes(), c_library("plain_c", "-DSIGN=1").read_bytes()
    library.write_bytes(minus)
    (tmp_path / "models" / "twinop.toml").write_text(
        "[server]\npoll_seconds = 0.05\nlibrary_folders = ['../libs']"
    )
    answers: list[tuple[int, Any]] = []
    with serve(tmp_path / "models", *QUICK) as served:

        def now(data: bytes, answer: list[int]) -> bool:
            found = served.infer("m", ROW)
            answers.append((found.status, found.status == 200 and found.json["outputs"][0]["data"]))
            return checksum_of(served) == hashlib.sha256(data).hexdigest() and answers[-1] == (200, answer)

        def is_refused(words: str) -> bool:
            state, reason = served.versions()["m", 1]
            return state == "UNAVAILABLE" and words in reason

        assert now(minus, MINUS)
        put(library, plus)
        wait_until(lambda: now(plus, PLUS))
        for bad, words in ((b"", "not a shared library"), (cut(minus), "damaged or cut short")):
            put(library, bad)
            wait_until(partial(is_refused, words))
            assert all(now(plus, PLUS) for _ in range(20))  # the one before goes on
        put(library, minus)
        wait_until(lambda: now(minus, MINUS))
        assert all(answer in ((200, MINUS), (200, PLUS)) for answer in answers)
