"""Versions and models appear, change and disappear under a running server, and its answers follow."""

import asyncio
import hashlib
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest
import service_load
from abi_files import c_library, negate_model
from service_fixtures import Served, serve, wait_until
from service_models import place, relu
from service_rows import QUICK, ROW, call, scaled, y_of


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that follows its folder; each test has its own models there."""
    root = tmp_path_factory.mktemp("root") / "models"
    place(root, "older", scaled(1))
    broken_version(root, "older", 2)
    for version in (1, 2):
        place(root, "all", scaled(version), version, settings='versions = "all"')
    root.with_name("libs").mkdir()
    (root / "twinop.toml").write_text("[server]\npoll_seconds = 0.05\nlibrary_folders = ['../libs']")
    with serve(root, *QUICK, "--allow-model-libraries") as found:
        yield found


def broken_version(root: Path, model: str, version: int) -> Path:
    path = root / model / str(version) / "model.onnx"
    path.parent.mkdir()
    path.write_bytes(b"half of a model")
    return path


def wait_for_scans(served: Served, marker: str) -> None:
    """Wait until the server has scanned its folder twice more, which it takes to load a new model."""
    place(served.root, marker, scaled(1))
    wait_until(lambda: served.infer(marker, ROW).status == 200)


def test_a_new_version_takes_over_and_a_broken_one_does_not(served: Served) -> None:
    place(served.root, "new", scaled(1))
    wait_until(lambda: served.infer("new", ROW).status == 200)
    assert y_of(served, "new") == [-1, 2, -3, 4]
    place(served.root, "new", scaled(2), version=2)
    wait_until(lambda: y_of(served, "new") == [-2, 4, -6, 8])
    broken = broken_version(served.root, "new", 3)
    wait_until(lambda: served.versions().get(("new", 3), ("",))[0] == "UNAVAILABLE")
    wait_for_scans(served, "after_broken")
    assert y_of(served, "new") == [-2, 4, -6, 8]
    assert served.versions()["new", 2] == ("READY", "")
    broken.write_bytes(scaled(3).SerializeToString())  # repaired
    wait_until(lambda: y_of(served, "new") == [-3, 6, -9, 12])
    broken.write_bytes(scaled(5).SerializeToString())  # changed
    wait_until(lambda: y_of(served, "new") == [-5, 10, -15, 20])
    shutil.rmtree(broken.parent)  # withdrawn
    wait_until(lambda: y_of(served, "new") == [-2, 4, -6, 8])


def test_models_come_and_go(served: Served) -> None:
    place(served.root, "come", scaled(2))
    wait_until(lambda: served.ask("GET", "/v2/models/come/ready").status == 200)
    assert y_of(served, "come") == [-2, 4, -6, 8]
    shutil.rmtree(served.root / "come")
    wait_until(lambda: served.ask("GET", "/v2/models/come").status == 404)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('library = "libnone.so"', "libnone.so: no such library"),
        (f'library_sha256 = "{"0" * 64}"', "its SHA-256 is"),
        ('library = "text.so"', "text.so: not a shared library"),
    ],
)
def test_unservable_model_is_reported_and_isolated(served: Served, settings: str, words: str) -> None:
    logged, bad = len(served.log), served.root / "bad"
    staged = served.root.with_name("staged")  # a library that is still being copied would be cut short
    place(staged, "bad", relu(), settings=settings)
    (staged / "bad" / "text.so").write_text("#!/bin/sh")
    (staged / "bad").rename(bad)
    try:
        wait_until(lambda: served.versions().get(("bad", 1), ("",))[0] == "UNAVAILABLE")
        reason = served.versions()["bad", 1][1]
        errors = [line["message"] for line in served.log[logged:] if line["level"] == "error"]
        assert words in reason and any(words in message for message in errors)
        assert "/tmp" not in reason
        refused = served.infer("bad", ROW)
        assert refused.status == 503 and refused.error == "model bad is not ready"
        with pytest.raises(grpc.RpcError) as error:
            call(served, "bad")
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert y_of(served, "older") == [-1, 2, -3, 4]
        assert "Traceback" not in served.log_path.read_text()
    finally:
        shutil.rmtree(bad)
        wait_until(lambda: ("bad", 1) not in served.versions())


def test_all_versions_are_served_where_the_settings_say_so(served: Served) -> None:
    for version in (1, 2):
        answer = served.ask("POST", f"/v2/models/all/versions/{version}/infer", {"inputs": [ROW]})
        assert answer.json["outputs"][0]["data"] == [-version, 2 * version, -3 * version, 4 * version]
        assert answer.json["model_version"] == str(version)
    assert "it has: 1, 2" in served.ask("POST", "/v2/models/all/versions/3/infer", {"inputs": [ROW]}).error


def test_an_older_version_serves_where_the_newest_is_broken_at_the_start(served: Served) -> None:
    states = {version: state for (name, version), (state, _) in served.versions().items() if name == "older"}
    assert states == {1: "READY", 2: "UNAVAILABLE"}
    wait_for_scans(served, "after_start")
    assert y_of(served, "older") == [-1, 2, -3, 4]


def test_settings_that_do_not_fit_are_said_and_the_folder_is_followed_on(served: Served) -> None:
    place(served.root, "m", scaled(1))
    wait_until(lambda: served.infer("m", ROW).status == 200)
    (served.root / "m" / "twinop.toml").write_text("max_batchsize = 8")
    place(served.root, "unfit", scaled(1), settings="warm_up = { z = [4] }")
    wait_until(lambda: served.versions().get(("unfit", 1), ("",))[0] == "UNAVAILABLE")
    wait_until(lambda: any("max_batchsize" in line["message"] for line in served.log))
    assert y_of(served, "m") == [-1, 2, -3, 4] and "max_batchsize" in served.versions()["m", 1][1]
    (served.root / "m" / "twinop.toml").unlink()
    wait_until(lambda: served.versions()["m", 1] == ("READY", ""))
    wait_for_scans(served, "good")
    (served.root / "unfit" / "twinop.toml").unlink()
    wait_until(lambda: served.infer("unfit", ROW).status == 200)


def test_a_folder_that_is_away_for_a_moment_changes_nothing(served: Served) -> None:
    away = served.root.with_name("away")
    served.root.rename(away)
    try:
        wait_until(lambda: any("no such file or folder" in line["message"] for line in served.log))
        assert y_of(served, "older") == [-1, 2, -3, 4]
    finally:
        away.rename(served.root)
    wait_for_scans(served, "after_away")
    assert y_of(served, "older") == [-1, 2, -3, 4]


def test_a_library_that_is_replaced_under_load(served: Served) -> None:
    """The answers show which code runs: the first library gives -x, the second one x."""
    library = served.root.with_name("libs") / "libplain_c.so"
    minus, plus = c_library("plain_c").read_bytes(), c_library("plain_c", "-DSIGN=1").read_bytes()
    library.write_bytes(minus)
    place(served.root, "signed", negate_model())
    wait_until(lambda: served.infer("signed", ROW).status == 200)
    answers: list[list[float]] = []

    def put(data: bytes) -> None:
        """Put a file into a folder that is followed, as a whole."""
        (new := library.parents[1] / "new").write_bytes(data)
        new.rename(library)

    def now(data: bytes, sign: int) -> bool:
        answers.append(y_of(served, "signed"))
        told = served.ask("GET", "/v2/models/signed").json["parameters"]["library_sha256"]
        is_loaded: bool = told == hashlib.sha256(data).hexdigest()
        return is_loaded and answers[-1] == [sign * each for each in ROW["data"]]

    def is_refused(words: str) -> bool:
        state, reason = served.versions()["signed", 1]
        return state == "UNAVAILABLE" and words in reason

    assert now(minus, -1)
    put(plus)
    wait_until(lambda: now(plus, 1))
    for bad, words in ((b"", "not a shared library"), (minus[: len(minus) // 2], "damaged or cut short")):
        put(bad)
        wait_until(partial(is_refused, words))
        assert all(now(plus, 1) for _ in range(20))  # the one before goes on
    put(minus)
    wait_until(lambda: now(minus, -1))
    assert all(answer in (ROW["data"], [-each for each in ROW["data"]]) for answer in answers)


def test_no_request_is_lost_or_wrong_while_versions_are_swapped_and_at_sigterm(tmp_path: Path) -> None:
    """TWINOP_SOAK=200000 makes a soak of it."""
    requests = int(os.environ.get("TWINOP_SOAK", "2500"))
    service_load.write_version(tmp_path, 1)
    (tmp_path / "twinop.toml").write_text("[server]\npoll_seconds = 0.05")
    with serve(tmp_path, *service_load.OPTIONS) as served:
        outcome = asyncio.run(service_load.swapped_and_ended(served, tmp_path, requests, every=0.5))
        assert served.process.returncode == 0
    assert outcome.lost == outcome.wrong == []
    assert outcome.answered.keys() == {"REST", "gRPC"}
    assert len(outcome.swapped) >= 2 and set(outcome.swapped) <= outcome.versions.keys()
    assert outcome.broken and set(outcome.broken.values()) == {"UNAVAILABLE"}
    assert not set(outcome.broken) & outcome.versions.keys()
