"""deploy/ort_process.py: models that crash, print, or never end run in a process of their own."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from typer.testing import CliRunner

from twinop.cli import app
from twinop.deploy import ort_process, ort_runs
from twinop.errors import RecordSyntaxError, TwinopError, TwinopWarning


def endless() -> onnx.ModelProto:
    """A Loop of 2^62 rounds."""
    return onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> g (float[N, 4] x) => (float[N, 4] y) '
        f"<int64 n = {{{2**62}}}, bool yes = {{1}}> {{ y = Loop <body = body "
        "(int64 i, bool go, float[N, 4] a) => (bool on, float[N, 4] b) { on = Identity (go) b = Sin (a) }> "
        "(n, yes, x) }"
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    onnx.save(endless(), tmp_path / "loop.onnx")
    return tmp_path / "loop.onnx"


def sleeping(*seconds: float) -> Iterator[float]:
    for each in seconds:
        time.sleep(each)
        yield each


def printing() -> Iterator[str]:
    for number in (1, 2):
        os.write(number, b"\0\0\0\0\0\0\0\1junk" * 9)
    print("more", flush=True)
    os.system("echo from a shell")
    yield "answer"


def warning() -> Iterator[int]:
    warnings.warn("told", TwinopWarning, stacklevel=1)
    yield from ()


def refusing() -> Iterator[int]:
    yield 1
    raise RecordSyntaxError("no")


def importing() -> Iterator[int]:
    raise ModuleNotFoundError("No module named 'orjson'", name="orjson")
    yield


def crashing_in_an_answer(length: int) -> Iterator[bytes]:
    yield b"x"
    number = next(n for n in map(int, os.listdir("/proc/self/fd")) if n > 2 and _is_pipe_for_writing(n))
    os.write(number, length.to_bytes(8, "big") + b"half")
    os.kill(os.getpid(), signal.SIGSEGV)


def _is_pipe_for_writing(number: int) -> bool:
    link = Path(f"/proc/self/fd/{number}")
    return link.is_symlink() and "pipe:" in os.readlink(link) and os.get_blocking(number)


def processes(group: int) -> list[int]:
    """Returns the living processes of a group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [int(folder.name)] if int(of) == group and state not in "ZX" else []
    return found


def until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def server() -> Iterator[ort_process.Server]:
    server = ort_process.Server()
    yield server
    server.close()


@pytest.mark.parametrize("command", ["run", pytest.param("check", marks=pytest.mark.slow), "optimize"])
def test_commands_end_a_model_that_does_not(command: str, path: Path) -> None:
    ort_process.SERVER.run(list, ())  # the start of the server is not the model's time
    group = ort_process.SERVER.process
    more = {"optimize": ["-o", str(path.with_name("o.onnx")), "--device", "cpu"]}.get(command, [])
    started = time.monotonic()
    done = CliRunner().invoke(app, [command, str(path), *more, "--timeout", "2"])
    said = " ".join(done.output.split())
    assert done.exit_code == 1 and "no progress in 2 s. Allow more with --timeout" in said
    assert time.monotonic() - started < 60
    assert group is not None and until(lambda: not processes(group.pid), 5)
    assert [each.name for each in path.parent.iterdir()] == ["loop.onnx"]


@pytest.mark.parametrize(
    ("command", "number"),
    [("optimize", signal.SIGINT), ("run", signal.SIGKILL)],
)
def test_a_signal_ends_all_processes_at_once(number: signal.Signals, command: str, path: Path) -> None:
    more = {"optimize": ["-o", str(path.with_name("o.onnx")), "--device", "cpu"]}.get(command, [])
    run = ["env", "--default-signal=INT", sys.executable, "-m", "twinop", command, str(path), *more]
    with subprocess.Popen(run, stderr=subprocess.DEVNULL) as process:  # a shell's background jobs ignore it
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            assert until(lambda: len(processes(int((children.read_text().split() or ["-1"])[0]))) > 1, 60)
            group = int(children.read_text().split()[0])
            process.send_signal(number)
            assert process.wait(10) != 0
            assert until(lambda: not processes(group), 5)
        finally:
            process.kill()


def test_the_end_of_the_thread_that_started_the_server_does_not_end_it(server: ort_process.Server) -> None:
    thread = threading.Thread(target=server.run, args=(list, [1]))
    thread.start()
    thread.join()
    process = server.process
    time.sleep(0.2)  # the signal comes with the end of the thread
    assert server.run(sleeping, 0.3, 0.3) == [0.3] * 2 and server.process is process


def test_progress_extends_the_time(server: ort_process.Server) -> None:
    server.run(list, ())
    with ort_process.time_limit(2):
        assert server.run(sleeping, 0.8, 0.8, 0.8) == [0.8] * 3
        with pytest.raises(ort_process.Endless) as caught:
            server.run(sleeping, 0.1, 0.1, 30)
    assert caught.value.answers == [0.1, 0.1]
    limited = ort_process.time_limit(0.5)
    with pytest.raises(TwinopError, match=r"no progress in 0.5 s. Allow more with timeout="), limited:
        server.run(sleeping, 30)
    assert server.run(list, [4]) == [4], "and the next call has a new server"


def test_what_a_model_prints(server: ort_process.Server, capfd: pytest.CaptureFixture[str]) -> None:
    assert server.run(printing) == ["answer"]
    out, err = capfd.readouterr()
    assert out == "" and "junk" in err and "from a shell" in err


@pytest.mark.parametrize("length", [0, 1000])
def test_a_crash_in_the_middle_of_an_answer(length: int, server: ort_process.Server) -> None:
    with pytest.raises(ort_process.OrtCrash):
        server.run(crashing_in_an_answer, length)
    assert server.run(list, [1]) == [1]


def test_warnings_and_errors_come_back(server: ort_process.Server) -> None:
    with pytest.warns(TwinopWarning, match="told"):
        server.run(warning)
    with pytest.raises(TwinopError, match="no"):
        server.run(refusing)


def test_a_missing_package_is_named(server: ort_process.Server) -> None:
    """`twinop check` without twinop[serve] said that ONNX Runtime crashes on the model."""
    with pytest.raises(ModuleNotFoundError) as raised:
        list(server.run(importing))
    assert raised.value.name == "orjson"  # the command says how to install it


def test_cases_that_must_not_run_may_hang(tmp_path: Path) -> None:
    """Their outputs are missing; the others' are there."""
    model = endless()
    model.graph.initializer.pop(0)  # the number of rounds becomes an input
    model.graph.input.append(helper.make_tensor_value_info("n", 7, []))
    data = model.SerializeToString()
    x = np.ones((1, 4), np.float32)
    cases = [{"x": x, "n": np.array(rounds)} for rounds in (1, 2**62, 2)]
    ort_runs.run(data, None)
    with ort_process.time_limit(2):
        assert [len(each) for each in ort_runs.run(data, None, cases, required=1).outputs] == [1, 0, 0]
        with pytest.raises(ort_process.Endless):
            ort_runs.run(data, None, cases, required=2)
