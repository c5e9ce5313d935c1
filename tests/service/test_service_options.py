"""Options of `twinop serve` end to end: what they change is seen from outside."""

import json
import os
import shutil
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from service_fixtures import Served, serve, start, tensor, wait_until
from service_models import mlp, place, relu, slow

from twinop.library import find_library

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


def test_a_library_of_another_folder_a_token_and_two_runs_at_a_time(tmp_path: Path) -> None:
    place(tmp_path / "models", "m", relu())
    place(tmp_path / "models", "slow", slow(rounds=5000))
    (tmp_path / "elsewhere").mkdir()
    library = shutil.copy(find_library("custom_relu"), tmp_path / "elsewhere" / "libmine.so")
    (tmp_path / "token").write_text("secret\n")
    options = ("--library", str(library), "--token-file", str(tmp_path / "token"))
    numbers = ("--instances", "2", "--max-queue", "1")
    with serve(tmp_path / "models", "--provider", "cpu", *options, *numbers) as served:
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
        assert infer("slow", **known) == 429  # two run, and one may wait
        for thread in threads:
            thread.join()
        assert found == [200] * 3


def test_a_library_folder_is_one_that_settings_may_name_libraries_of(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    library = shutil.copy(find_library("custom_relu"), tmp_path / "elsewhere" / "libmine.so")
    place(tmp_path / "models", "m", relu(), settings=f'library = "{library}"')
    process = start(tmp_path / "models", tmp_path / "log", "--provider", "cpu")
    assert process.wait(60) == 1
    assert (
        "libmine.so: libraries are loaded only from the model's own folder" in (tmp_path / "log").read_text()
    )
    options = ("--provider", "cpu", "--library-folder", str(tmp_path / "elsewhere"))
    with serve(tmp_path / "models", *options) as served:
        assert served.infer("m", ROW).json["outputs"][0]["data"] == [0, 2, 0, 4]
        told = served.ask("GET", "/v2/models/m").json["parameters"]
        assert told["library"] == "libmine.so" and told["fallback"] == ""


@pytest.mark.parametrize(
    "options, words",
    [
        (("--cuda-graph", "--provider", "cpu"), "cuda_graph needs provider cuda or auto, not cpu"),
        (("--token-file", "nowhere"), "--token-file nowhere: cannot be read"),
        (("--library", "nowhere.so"), "nowhere.so: no such library"),
    ],
)
def test_options_that_do_not_fit_end_the_start(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    place(tmp_path / "models", "m", relu())
    process = start(tmp_path / "models", tmp_path / "log", *options)
    assert process.wait(60) == 1
    log = " ".join((tmp_path / "log").read_text().split())
    assert words in log and "Traceback" not in log
