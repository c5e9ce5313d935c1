"""Several servers on the same ports, and the port that each has for itself."""

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import service_models as models
import yaml
from service_fixtures import Served, free_ports, serve, start, wait_until
from service_held import held
from service_loads import repository_of
from service_rows import QUICK, ROW, message

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/serving"


@contextlib.contextmanager
def servers(folder: Path, count: int, *options: str) -> Iterator[list[tuple[Served, Served]]]:
    """Start servers that share their ports. Yield each, and a view of it whose HTTP port is its own."""
    http_port, grpc_port, *admin = map(str, free_ports(2 + count))
    with contextlib.ExitStack() as stack:
        found = []
        for port in admin:
            ports = ("--http-port", http_port, "--grpc-port", grpc_port, "--admin-port", port)
            each = stack.enter_context(serve(folder, *QUICK, "--reuse-port", *ports, *options))
            assert (each.http_port, each.grpc_port) == (int(http_port), int(grpc_port))
            own = Served(each.process, int(port), each.grpc_port, each.log_path, folder)
            found.append((each, own))
        yield found


def requests_of(own: Served) -> float:
    return own.metric("twinop_requests_total", model="m")


def test_the_kernel_spreads_connections_and_each_server_has_its_metrics(tmp_path: Path) -> None:
    models.place(tmp_path, "m", models.relu())
    with servers(tmp_path, 2) as ((first, of_first), (second, of_second)):

        def are_both_used() -> bool:
            assert first.infer("m", ROW).status == 200
            with second.stub() as stub:
                assert stub.ModelInfer(message("m", -1, 2, -3, 4)).outputs
            return requests_of(of_first) > 0 and requests_of(of_second) > 0

        wait_until(are_both_used)
        for own in (of_first, of_second):
            assert own.ask("GET", "/v2/health/ready").status == 200
            assert own.infer("m", ROW).status == 200

        second.process.send_signal(signal.SIGTERM)  # it answers what it accepted, and listens no more
        second.is_stopped = True
        after = 0
        while after < 20:
            assert first.infer("m", ROW).status == 200
            after += second.process.poll() is not None
        assert second.process.poll() == 0
        assert [line for line in second.log if "traceback" in line] == []


def test_a_server_takes_connections_once_its_models_are_loaded(tmp_path: Path) -> None:
    file = tmp_path / "held"
    file.touch()
    models.place(tmp_path / "models", "m", models.relu())
    with servers(tmp_path / "models", 1) as ((first, _),):
        ports = ("--http-port", str(first.http_port), "--grpc-port", str(first.grpc_port))
        log = tmp_path / "log"
        second = start(tmp_path / "models", log, *QUICK, "--reuse-port", *ports, program=held(loads=file))
        try:
            wait_until(lambda: b"held" in log.read_bytes())
            assert {first.infer("m", ROW).status for _ in range(50)} == {200}
            file.unlink()
            wait_until(lambda: b'"ready"' in log.read_bytes())
            assert {first.infer("m", ROW).status for _ in range(50)} == {200}
        finally:
            second.kill()
            second.wait()


# -------------------------------------------------------------------------------- the examples


def command_of_unit() -> list[str]:
    found = re.search(r"^ExecStart=(.*)$", (EXAMPLES / "twinop@.service").read_text(), re.MULTILINE)
    assert found is not None
    return found[1].replace("%i", "1").split()


def commands_of_compose() -> list[list[str]]:
    services = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]
    return [["twinop", *each["command"]] for each in services.values()]


@pytest.mark.parametrize("command", [command_of_unit(), *commands_of_compose()])
def test_the_examples_start_servers(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.place(tmp_path, "m", models.relu())
    assert command[0].endswith("twinop") and command[1] == "serve"
    server: Any = repository_of(monkeypatch, tmp_path, *command[3:]).settings.server
    assert server.reuse_port and server.admin_port in (9001, 9002)
