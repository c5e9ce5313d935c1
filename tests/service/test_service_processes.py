"""Several processes behind one port: all answer, one that ends is started anew, clients control all."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_fixtures import Answer, Served, receive, serve, start, wait_until
from service_loads import refusal_of
from service_models import place, relu, slow
from service_raw import REQUEST, SLOW
from service_rows import QUICK, ROW, call, scaled, y_of

from lab.servers import free_ports
from twinop.deploy.service.settings import Settings

TWO = (*QUICK, "--processes", "2")
MANY = 24  # connections: all of them reach the same of two processes once in eight million times


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two processes; the tests leave both of them ready."""
    root = tmp_path_factory.mktemp("models")
    place(root, "relu", relu())
    with serve(root, *TWO) as found:
        yield found


def processes(served: Served) -> list[int]:
    """Return the ids of the processes below the supervisor."""
    pid = served.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def readiness(served: Served) -> int:
    try:
        return served.ask("GET", "/v2/health/ready").status
    except OSError:  # this connection was one to a process that was just killed
        return 0


def holds(pid: int, connection: socket.socket) -> bool:
    """Return whether a process has the other end of a connection over the loopback interface."""
    port = f":{connection.getsockname()[1]:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    (inode,) = (line[9] for line in lines if line[2].endswith(port))
    return f"socket:[{inode}]" in {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}


def kill_one(served: Served) -> int:
    """Kill a process, wait until the service knows, and return the process's id."""
    killed = processes(served)[0]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: readiness(served) == 503)
    return killed


def requests(served: Served, process: int, model: str = "relu") -> float:
    """Return how many requests a process has counted."""
    return served.metric("twinop_requests_total", model=model, process=str(process))


def statuses(served: Served, model: str) -> set[int]:
    """Return the statuses with which the processes answer, each connection being a new one."""
    return {served.infer(model, ROW).status for _ in range(MANY)}


def test_both_answer_and_metrics_are_of_both(served: Served) -> None:
    before = [requests(served, process) for process in (0, 1)]
    assert statuses(served, "relu") == {200}
    over_rest = [requests(served, process) for process in (0, 1)]
    for _ in range(MANY):
        call(served, "relu")
    over_grpc = [requests(served, process) for process in (0, 1)]
    for first, then in ((before, over_rest), (over_rest, over_grpc)):
        assert all(b > a for a, b in zip(first, then, strict=True)) and sum(then) - sum(first) == MANY
    assert served.metric("process_resident_memory_bytes") > 2 * served.memory


def test_the_supervisor_is_small_and_no_process_imports_torch(served: Served) -> None:
    def mapped(pid: int) -> set[str]:
        text = Path(f"/proc/{pid}/maps").read_text()
        return set(re.findall(r"site-packages/(numpy|onnxruntime|torch|pandas)/", text))

    assert mapped(served.process.pid) == set()
    assert [mapped(pid) for pid in processes(served)] == [{"numpy", "onnxruntime"}] * 2


def test_one_that_is_killed_takes_only_its_requests_with_it(served: Served) -> None:
    failed: list[tuple[int, float]] = []  # the client, and when it had connected
    answered = [0] * 16
    stop = threading.Event()

    def client(number: int) -> None:
        while not stop.is_set():
            opened = time.monotonic()
            try:
                with served.connect() as connection:
                    while not stop.is_set():
                        connection.sendall(REQUEST)
                        assert receive(connection).status == 200
                        answered[number] += 1
            except OSError:
                failed.append((number, opened))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    wait_until(lambda: min(answered) > 5)
    killed = kill_one(served)
    known = time.monotonic()
    wait_until(lambda: readiness(served) == 200, 60)
    count = sum(answered)
    wait_until(lambda: sum(answered) > count + 100)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert 0 < len({number for number, _ in failed}) < 16
    assert all(opened < known for _, opened in failed)
    assert killed not in processes(served) and len(processes(served)) == 2
    assert any("is started anew: SIGKILL ended it" in line["message"] for line in served.log)


def test_readiness_says_which_process_is_missing(served: Served) -> None:
    kill_one(served)
    said = served.ask("GET", "/v2/health/ready")
    assert re.search(r"not ready: process [01] of 2 (is starting|has ended and is started anew)", said.error)
    said = served.ask("GET", "/v2/models/relu/ready")
    assert re.search(r"model relu is not ready: process [01]: ", said.error)
    assert served.infer("relu", ROW).status == 200
    wait_until(lambda: readiness(served) == 200, 60)
    assert served.ask("GET", "/v2/models/relu/ready").status == 200


def test_one_that_is_stopped_does_not_hold_up_the_other(served: Served) -> None:
    with served.connect() as connection:  # one process answers on it

        def answer(path: bytes) -> Answer:
            connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: h\r\n\r\n")
            return receive(connection)

        connection.sendall(REQUEST)
        assert receive(connection).status == 200
        (other,) = (pid for pid in processes(served) if not holds(pid, connection))
        os.kill(other, signal.SIGSTOP)
        try:
            assert answer(b"/metrics").status == 200
            assert answer(b"/status").status == 200
            assert answer(b"/v2/models/relu/ready").status == 200
        finally:
            os.kill(other, signal.SIGCONT)


def test_clients_load_and_unload_in_all_processes(tmp_path: Path) -> None:
    place(tmp_path, "m", scaled(1))
    place(tmp_path, "other", scaled(1))
    with serve(tmp_path, *TWO, "--control", "explicit") as served:

        def asked(path: str) -> int:
            return served.ask("POST", f"/v2/repository/models/{path}").status

        def index() -> dict[tuple[str, str], str]:
            listed = served.ask("POST", "/v2/repository/index", {}).json
            return {(each["name"], each["version"]): each["state"] for each in listed}

        assert index() == {("m", "1"): "READY", ("other", "1"): "READY"}
        place(tmp_path, "m", scaled(2), version=2)
        assert asked("m/load") == 200
        assert all(y_of(served, "m") == [-2, 4, -6, 8] for _ in range(MANY))
        assert asked("other/unload") == 200 and asked("other/unload") == 404
        assert statuses(served, "other") == {404}
        assert index() == {("m", "2"): "READY", ("other", "1"): "UNAVAILABLE"}

        kill_one(served)
        wait_until(lambda: readiness(served) == 200, 60)
        assert statuses(served, "other") == {404}  # also where the folder was read again
        assert asked("other/load") == 200 and statuses(served, "other") == {200}

        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "model.onnx").write_bytes(b"no")
        assert asked("broken/load") == 503 and index()["broken", "1"] == "UNAVAILABLE"


def test_one_started_anew_loads_what_the_others_have(tmp_path: Path) -> None:
    place(tmp_path, "m", scaled(1))
    with serve(tmp_path, *TWO) as served:
        place(tmp_path, "m", scaled(2), version=2)
        place(tmp_path, "later", scaled(1))
        kill_one(served)
        wait_until(lambda: readiness(served) == 200, 60)
        assert all(y_of(served, "m") == [-1, 2, -3, 4] for _ in range(MANY))
        assert statuses(served, "later") == {404}
        (tmp_path / "m" / "1" / "model.onnx").rename(tmp_path / "model.onnx")
        kill_one(served)
        said = "is started anew: model m version 1 is served, but gone from"
        wait_until(lambda: any(said in line["message"] for line in served.log))
        (tmp_path / "model.onnx").rename(tmp_path / "m" / "1" / "model.onnx")
        wait_until(lambda: readiness(served) == 200, 60)


def test_sigterm_lets_all_answer(tmp_path: Path) -> None:
    place(tmp_path, "slow", slow(1000))
    with serve(tmp_path, *TWO, "--grace-seconds", "200") as served:  # on a busy machine a run takes seconds
        connections = [served.connect(200) for _ in range(MANY)]
        for connection in connections:
            connection.sendall(SLOW)

        def accepted() -> bool:  # on a busy machine some are answered before others have come
            answered = served.metric("twinop_requests_total", model="slow")
            return answered + served.metric("twinop_in_flight", model="slow") >= MANY

        wait_until(accepted, 120)
        (model,) = served.ask("GET", "/status").json["models"]
        assert model["state"] == "ready" and model["in_flight"] <= MANY
        served.process.send_signal(signal.SIGTERM)
        assert [receive(connection).status for connection in connections] == [200] * MANY
        for connection in connections:
            connection.close()
        assert served.stop() == 0


def test_the_processes_end_with_the_supervisor(tmp_path: Path) -> None:
    place(tmp_path, "relu", relu())
    with serve(tmp_path, *TWO) as served:
        children = processes(served)
        served.stop(signal.SIGKILL)
        wait_until(lambda: not any(Path(f"/proc/{pid}/fd/0").exists() for pid in children))
        with pytest.raises(OSError):
            served.connect()


def test_the_others_serve_while_one_cannot_start(tmp_path: Path) -> None:
    place(tmp_path / "models", "relu", relu())
    gate = tmp_path / "gate"
    patched = (
        "import os, sys\n"
        "import twinop.deploy.service.processes as p\n"
        "from twinop.cli import app\n"
        "from twinop.errors import TwinopError\n"
        "def init(self, settings, serve):\n"
        "    def failing(settings, member):\n"
        f"        if member.number == 1 and not os.path.exists({str(gate)!r}):\n"
        "            raise TwinopError('the second cannot start')\n"
        "        serve(settings, member)\n"
        "    begin(self, settings, failing)\n"
        "begin = p.Supervisor.__init__\n"
        "p.Supervisor.__init__ = init\n"
        "app(sys.argv[1:])\n"
    )
    log = tmp_path / "log"
    http_port = free_ports(1)[0]
    options = (*TWO, "--no-grpc", "--http-port", str(http_port))
    process = start(tmp_path / "models", log, *options, program=("-c", patched))
    served = Served(process, http_port, None, log, tmp_path / "models")
    try:
        wait_until(lambda: any("second cannot start" in line["message"] for line in served.log), 60)
        assert served.infer("relu", ROW).status == 200
        assert "not ready: process 1 of 2" in served.ask("GET", "/v2/health/ready").error
        gate.touch()
        wait_until(lambda: readiness(served) == 200, 60)
        assert served.stop() == 0
    finally:
        process.kill()
        process.wait()


def ending(tmp_path: Path, *options: str) -> str:
    """Return the message, on one line, with which a service of two processes ends."""
    process = start(tmp_path / "models", tmp_path / "log", *TWO, *options)
    try:
        assert process.wait(120) == 1
    finally:
        process.kill()
        process.wait()
    text = (tmp_path / "log").read_text()
    assert "Traceback" not in text
    return " ".join(text[text.index("error:") :].split())


def test_a_service_of_which_no_process_can_start_ends_with_one_message(tmp_path: Path) -> None:
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    assert ending(tmp_path).count("no model.onnx in it") == 1
    (tmp_path / "models" / "m" / "1" / "model.onnx").write_bytes(b"no model")
    assert ending(tmp_path).count(f"{tmp_path}/models/m/1/model.onnx") == 1


def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    place(tmp_path / "models", "relu", relu())
    (tmp_path / "models" / "twinop.toml").write_text("[server]\ndevices = [99, 99]\n")
    assert ending(tmp_path).count("there is no GPU 99") == 1


def test_another_service_cannot_share_the_port(tmp_path: Path, served: Served) -> None:
    place(tmp_path / "models", "relu", relu())
    for option, port in (("--http-port", served.http_port), ("--grpc-port", served.grpc_port)):
        assert f"cannot listen on port {port} of 127.0.0.1" in ending(tmp_path, option, str(port))
    free = str(free_ports(1)[0])
    assert f"cannot listen on port {free}" in ending(tmp_path, "--http-port", free, "--grpc-port", free)


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        ("", ("--processes", "0"), "processes: Input should be greater than or equal to 1"),
        ("", ("--processes", "1000"), "processes: Input should be less than or equal to 256"),
        (
            "max_bytes_in_flight = 1073741824",
            ("--processes", "16"),
            "max_bytes_in_flight must be at least 32 times max_request_bytes: each of 16 processes has",
        ),
        ("devices = [0]", ("--processes", "2"), "processes is 2, and devices lists 1: list the GPU of each"),
        ("devices = [0, 1]", (), "processes is 1, and devices lists 2"),
        ("devices = [-1]", (), "devices.0: Input should be greater than or equal to 0"),
        ("devices = 'all'", (), "devices: Input should be a valid tuple"),
    ],
)
def test_refused_settings(tmp_path: Path, settings: str, options: tuple[str, ...], said: str) -> None:
    (tmp_path / "twinop.toml").write_text(f"[server]\n{settings}\n")
    assert said in refusal_of(tmp_path, *options)


def test_many_processes_get_the_memory_that_they_need() -> None:
    for processes, needed in ((1, 1 << 30), (8, 1 << 30), (16, 2 << 30), (64, 8 << 30)):
        assert Settings(server={"processes": processes}).server.max_bytes_in_flight == needed


@pytest.mark.parametrize(("processes", "share"), [(1, 10), (2, 5), (4, 2), (8, 1)])
def test_the_queue_is_divided(processes: int, share: int) -> None:
    settings = Settings(server={"processes": processes}, model={"max_queue": 10})
    assert settings.for_model("m").max_queue == share
