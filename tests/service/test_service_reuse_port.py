"""Several servers on the same ports, and the port that each has for itself."""

import re
import signal
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


def requests_of(own: Served) -> float:
    return own.metric("twinop_requests_total", model="m")


def test_the_kernel_spreads_connections_over_servers_that_are_ready(tmp_path: Path) -> None:
    """Each has its own metrics, and one that ends answers what it accepted."""
    root, file, log = tmp_path / "models", tmp_path / "held", tmp_path / "log"
    models.place(root, "m", models.relu())
    http_port, grpc_port, *admin = free_ports(4)
    shared = (*QUICK, "--reuse-port", "--http-port", str(http_port), "--grpc-port", str(grpc_port))
    with serve(root, *shared, "--admin-port", str(admin[0])) as first:
        assert (first.http_port, first.grpc_port) == (http_port, grpc_port)
        file.touch()
        ports = (*shared, "--admin-port", str(admin[1]))
        process = start(root, log, *ports, program=held(loads=file))
        of_first = Served(first.process, admin[0], grpc_port, first.log_path, root)
        of_second = Served(process, admin[1], grpc_port, log, root)

        def are_both_used() -> bool:
            assert first.infer("m", ROW).status == 200
            with first.stub() as stub:
                assert stub.ModelInfer(message("m", -1, 2, -3, 4)).outputs
            return requests_of(of_first) > 0 and requests_of(of_second) > 0

        try:
            wait_until(lambda: b"held" in log.read_bytes())
            assert {first.infer("m", ROW).status for _ in range(50)} == {200}  # all by the first
            file.unlink()
            wait_until(lambda: b'"ready"' in log.read_bytes())
            wait_until(are_both_used)
            for own in (of_first, of_second):
                assert own.ask("GET", "/v2/health/ready").status == 200
                assert own.infer("m", ROW).status == 200
            process.send_signal(signal.SIGTERM)  # it answers what it accepted, and listens no more
            after = 0
            while after < 20:
                assert first.infer("m", ROW).status == 200
                after += process.poll() is not None
            assert process.poll() == 0
            assert [line for line in of_second.log if "traceback" in line] == []
        finally:
            process.kill()
            process.wait()


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
