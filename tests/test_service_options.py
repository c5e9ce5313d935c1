"""Options of `twinop serve` end to end: what they change is seen from outside."""

import json
import os
import time
from pathlib import Path

from service_fixtures import Served, serve, start, tensor
from service_models import mlp, place, relu

ROW = tensor("x", "FP32", [1, 4], [-1.0, 2.0, -3.0, 4.0])
WRONG = ("--provider", "cpu", "--library-sha256", "0" * 64)


def test_a_fallback_is_said_in_the_log_the_metadata_the_metrics_and_on_the_page(tmp_path: Path) -> None:
    place(tmp_path, "m", relu())
    with serve(tmp_path, *WRONG, "--allow-fallback") as served:
        assert served.infer("m", ROW).json["outputs"][0]["data"] == [0, 2, 0, 4]
        told = served.ask("GET", "/v2/models/m").json["parameters"]
        assert "SHA-256" in told["fallback"] and told["custom_nodes"] == ""
        assert told["function_body_nodes"] == "CustomRelu x1"
        assert served.metric("twinop_fallback", model="m") == 1
        assert "SHA-256" in served.ask("GET", "/status").content.decode()
        assert any("runs on its function bodies" in line["message"] for line in served.log)


def test_without_the_option_such_a_library_ends_the_start(tmp_path: Path) -> None:
    place(tmp_path / "models", "m", relu())
    process = start(tmp_path / "models", tmp_path / "log", *WRONG)
    assert process.wait(60) == 1
    log = (tmp_path / "log").read_text()
    assert "SHA-256" in log and "allow_fallback permits it" in log and "Traceback" not in log


def test_profiles_are_written_when_the_service_ends(tmp_path: Path) -> None:
    place(tmp_path / "models", "m", relu())
    with serve(tmp_path / "models", "--provider", "cpu", "--profile", str(tmp_path / "profiles")) as served:
        assert served.infer("m", ROW).status == 200
        assert served.stop() == 0
    profiles = list((tmp_path / "profiles").glob("m-1-*.json"))
    assert profiles and any(
        event.get("args", {}).get("op_name") == "CustomRelu" for event in json.loads(profiles[0].read_text())
    )


def test_threads_spin_only_where_the_settings_say_so(tmp_path: Path) -> None:
    x = tensor("x", "FP32", [1, 1024], [1.0] * 1024)

    def share(served: Served) -> float:
        """Of a core, that the service takes for 40 runs a second."""
        started, before = time.monotonic(), _cpu_seconds(served)
        while time.monotonic() < started + 1.5:
            assert served.infer("m", x).status == 200
            time.sleep(0.02)
        return (_cpu_seconds(served) - before) / (time.monotonic() - started)

    found = []
    for spinning in ("false", "true"):
        models = tmp_path / spinning
        place(models, "m", mlp(1024, 1024, 1024))
        (models / "twinop.toml").write_text(
            f"[model]\nintra_op_threads = 2\nintra_op_spinning = {spinning}\n"
        )
        with serve(models, "--provider", "cpu") as served:
            found.append(share(served))
    assert found[0] < found[1] / 2  # one of two threads spins through nearly all of the time


def _cpu_seconds(served: Served) -> float:
    fields = Path(f"/proc/{served.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_settings_file_from_elsewhere(tmp_path: Path) -> None:
    place(tmp_path / "models", "m", relu())
    (tmp_path / "mine.toml").write_text("[models.m]\nmax_batch_size = 5\n[server]\ntoken = 'secret'\n")
    with serve(tmp_path / "models", "--provider", "cpu", "--config", str(tmp_path / "mine.toml")) as served:
        assert served.infer("m", ROW).status == 401
        answer = served.ask("GET", "/v2/models/m", headers={"authorization": "Bearer secret"})
        assert answer.json["parameters"]["max_batch_size"] == 5


def test_an_empty_token_is_refused(tmp_path: Path) -> None:
    place(tmp_path / "models", "m", relu())
    (tmp_path / "models" / "twinop.toml").write_text('[server]\ntoken = ""\n')
    process = start(tmp_path / "models", tmp_path / "log")
    assert process.wait(60) == 1
    assert "server.token" in (tmp_path / "log").read_text()
