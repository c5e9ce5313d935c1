"""SIGTERM while a model loads, and when the grace time does not suffice."""

import signal
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc
import onnx
import pytest
import service_models as models
from service_fixtures import receive, serve, start, wait_until
from service_held import held
from service_raw import REQUEST
from service_rows import QUICK, ROW, call, in_flight


def test_what_takes_longer_than_the_grace_time_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "held"
    models.place(tmp_path / "models", "relu", models.relu())
    (tmp_path / "models" / "twinop.toml").write_text("[server]\ngrace_seconds = 1\n")
    with serve(tmp_path / "models", program=held(runs=file)) as served, ExitStack() as stack:
        file.touch()
        connections = [stack.enter_context(served.connect(60)) for _ in range(8)]
        for connection in connections:
            connection.sendall(REQUEST)
        wait_until(partial(in_flight, served, 8, "relu"))
        served.process.send_signal(signal.SIGTERM)
        answers = [receive(connection) for connection in connections]
        assert served.stop() == 1
        assert any("grace_seconds (1) were not enough" in line["message"] for line in served.log)
    assert {(answer.status, answer.error) for answer in answers} == {
        (503, "the server stopped before it could answer")
    }


def test_sigterm_while_a_model_is_loading_does_not_wait_for_it(tmp_path: Path) -> None:
    file, log = tmp_path / "held", tmp_path / "log"
    file.touch()
    onnx.save(models.relu(), tmp_path / "m.onnx")
    process = start(tmp_path / "m.onnx", log, program=held(loads=file))
    wait_until(lambda: b"held" in log.read_bytes())
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_threads_that_still_decode_do_not_keep_the_process(tmp_path: Path) -> None:
    """There are more requests than threads in asyncio's executor, which the shutdown must not depend on."""
    models.place(tmp_path, "m", models.relu())
    patched = (
        "import os, sys, time\n"
        "from twinop.deploy.service import codec_grpc, codec_rest, request\n"
        "from twinop.cli import app\n"
        "def decode(*arguments):\n"
        '    os.write(1, b\'{"message": "decoding"}\\n\')\n'  # several threads: print writes the end apart
        "    time.sleep(100)\n"
        "request.LARGE = 0\n"
        "codec_grpc.decode = codec_rest.decode = decode\n"
        "app(sys.argv[1:])\n"
    )
    (tmp_path / "twinop.toml").write_text("[server]\ngrace_seconds = 1\n")
    with serve(tmp_path, *QUICK, program=("-c", patched)) as served:
        outcomes: list[object] = []

        def over_grpc() -> None:
            with pytest.raises(grpc.RpcError) as error:
                call(served, "m")
            outcomes.append(error.value.code())

        def decoding() -> int:
            return sum(line["message"] == "decoding" for line in served.log)

        threads = [threading.Thread(target=lambda: outcomes.append(served.infer("m", ROW).status))]
        threads += [threading.Thread(target=over_grpc) for _ in range(40)]
        threads[0].start()
        wait_until(lambda: decoding() == 1)
        for thread in threads[1:]:
            thread.start()
        wait_until(lambda: decoding() >= 5)
        assert served.stop(seconds=50) == 1
        for thread in threads:
            thread.join(60)
        assert 503 in outcomes and len(outcomes) == 41
        assert any("grace_seconds (1) were not enough" in line["message"] for line in served.log)
