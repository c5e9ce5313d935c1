"""Versions and models come, change and go under a running server, and its answers follow."""

import asyncio
import shutil
import time
from pathlib import Path

from service_fixtures import serve, wait_until
from service_models import place
from service_rows import QUICK, ROW, scaled, y_of

from twinop.bench.serving import soak


def test_a_new_version_takes_over_and_a_broken_one_does_not(tmp_path: Path) -> None:
    place(tmp_path, "m", scaled(1))
    with serve(tmp_path, *QUICK) as served:
        assert y_of(served, "m") == [-1, 2, -3, 4]
        place(tmp_path, "m", scaled(2), version=2)
        wait_until(lambda: y_of(served, "m") == [-2, 4, -6, 8])
        (tmp_path / "m" / "3").mkdir()
        (tmp_path / "m" / "3" / "model.onnx").write_bytes(b"half of a model")
        wait_until(lambda: served.versions().get(("m", 3), ("",))[0] == "unavailable")
        time.sleep(2.5)  # more scans of the same files
        assert y_of(served, "m") == [-2, 4, -6, 8]
        assert served.versions()["m", 2] == ("ready", "")
        (tmp_path / "m" / "3" / "model.onnx").write_bytes(scaled(3).SerializeToString())  # mended
        wait_until(lambda: y_of(served, "m") == [-3, 6, -9, 12])
        shutil.rmtree(tmp_path / "m" / "3")  # taken back
        wait_until(lambda: y_of(served, "m") == [-2, 4, -6, 8])


def test_changed_files_are_loaded_again(tmp_path: Path) -> None:
    path = place(tmp_path, "m", scaled(1))
    with serve(tmp_path, *QUICK) as served:
        path.write_bytes(scaled(5).SerializeToString())
        wait_until(lambda: y_of(served, "m") == [-5, 10, -15, 20])


def test_models_come_and_go(tmp_path: Path) -> None:
    place(tmp_path, "a", scaled(1))
    with serve(tmp_path, *QUICK) as served:
        place(tmp_path, "b", scaled(2))
        wait_until(lambda: served.ask("GET", "/v2/models/b/ready").status == 200)
        shutil.rmtree(tmp_path / "a")
        wait_until(lambda: served.ask("GET", "/v2/models/a").status == 404)
        assert y_of(served, "b") == [-2, 4, -6, 8]


def test_all_versions_are_served_where_the_settings_say_so(tmp_path: Path) -> None:
    for version in (1, 2):
        place(tmp_path, "m", scaled(version), version, settings='versions = "all"')
    with serve(tmp_path, *QUICK) as served:
        for version in (1, 2):
            path = f"/v2/models/m/versions/{version}/infer"
            answer = served.ask("POST", path, {"inputs": [ROW]})
            assert answer.json["outputs"][0]["data"] == [-version, 2 * version, -3 * version, 4 * version]
            assert answer.json["model_version"] == str(version)
        assert "it has: 1, 2" in served.ask("POST", "/v2/models/m/versions/3/infer", {"inputs": [ROW]}).error


def test_load_and_unload_by_request(tmp_path: Path) -> None:
    place(tmp_path, "m", scaled(1))
    with serve(tmp_path, *QUICK, "--control", "explicit") as served:
        place(tmp_path, "m", scaled(2), version=2)
        time.sleep(2.5)
        assert y_of(served, "m") == [-1, 2, -3, 4]  # nobody follows the folder
        assert served.ask("POST", "/v2/repository/models/m/load").status == 200
        assert y_of(served, "m") == [-2, 4, -6, 8]
        assert served.ask("POST", "/v2/repository/models/m/unload").status == 200
        assert served.infer("m", ROW).status == 404
        assert served.ask("POST", "/v2/repository/models/m/unload").status == 404
        assert served.ask("POST", "/v2/repository/models/none/load").status == 404
        assert served.ask("POST", "/v2/repository/models/m/load").status == 200
        assert y_of(served, "m") == [-2, 4, -6, 8]
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "model.onnx").write_bytes(b"no")
        answer = served.ask("POST", "/v2/repository/models/broken/load")
        assert answer.status == 503 and "could not be loaded" in answer.error
        assert str(tmp_path) not in answer.error


def test_an_older_version_serves_where_the_newest_is_broken_at_the_start(tmp_path: Path) -> None:
    place(tmp_path, "m", scaled(1))
    (tmp_path / "m" / "2").mkdir()
    (tmp_path / "m" / "2" / "model.onnx").write_bytes(b"half of a model")
    with serve(tmp_path, *QUICK) as served:
        assert {key: found[0] for key, found in served.versions().items()} == {
            ("m", 1): "ready",
            ("m", 2): "unavailable",
        }
        time.sleep(2.5)
        assert y_of(served, "m") == [-1, 2, -3, 4]


def test_a_folder_that_is_away_for_a_moment_changes_nothing(tmp_path: Path) -> None:
    models = tmp_path / "models"
    place(models, "m", scaled(1))
    with serve(models, *QUICK) as served:
        models.rename(tmp_path / "away")
        time.sleep(2.5)
        assert y_of(served, "m") == [-1, 2, -3, 4]
        (tmp_path / "away").rename(models)
        place(models, "n", scaled(2))
        wait_until(lambda: served.infer("n", ROW).status == 200)


def test_settings_that_do_not_fit_are_said_and_the_folder_is_followed_on(tmp_path: Path) -> None:
    place(tmp_path, "m", scaled(1))
    with serve(tmp_path, *QUICK) as served:
        (tmp_path / "m" / "twinop.toml").write_text("max_batchsize = 8")
        place(tmp_path, "bad", scaled(1), config='input { name: "x" data_type: 99 dims: 4 }')
        wait_until(lambda: served.versions().get(("bad", 1), ("",))[0] == "unavailable")
        wait_until(lambda: any("max_batchsize" in line["message"] for line in served.log))
        assert y_of(served, "m") == [-1, 2, -3, 4]
        place(tmp_path, "good", scaled(3))
        wait_until(lambda: served.infer("good", ROW).status == 200)
        (tmp_path / "bad" / "config.pbtxt").unlink()
        wait_until(lambda: served.infer("bad", ROW).status == 200)


def test_no_request_is_lost_or_wrong_while_versions_are_swapped(tmp_path: Path) -> None:
    """A small soak; `twinop bench soak` is the long one."""
    soak.write_version(tmp_path / "models", 1)
    (tmp_path / "models" / "twinop.toml").write_text("[server]\npoll_seconds = 0.05")
    with soak.service(tmp_path / "models", tmp_path / "log") as (server, running):
        run = soak.soak(server, running.pid, tmp_path / "models", 8000, 1.5, seconds=10)
        outcome = asyncio.run(run)
    assert outcome.lost == outcome.wrong == [] and outcome.refused == 0
    assert outcome.requests >= 8000
    assert {protocol for protocol, _ in outcome.answered} == {"REST", "gRPC"}
    assert len(outcome.swapped) >= 2 and set(outcome.swapped) <= outcome.versions.keys()
    assert outcome.broken and set(outcome.broken.values()) == {"unavailable"}
    assert not set(outcome.broken) & outcome.versions.keys()
