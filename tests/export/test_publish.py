"""twinop/system/publish.py: a reader finds the old model or the new one, and only data of twinop's goes."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser

from twinop import deploy
from twinop.errors import ExportError
from twinop.libraries.library import checksum
from twinop.model.files import save, work_folder
from twinop.system import publish

X = {"x": np.ones((1, 4), np.float32)}
FOREIGN = "model.0123456789abcdef.data"


def make(number: float) -> ir.Model:
    """x @ (number * identity)."""
    text = '<ir_version: 9, opset_import: ["": 20]> g (float[N, 4] x) => (float[N, 4] y) { y = MatMul(x, w) }'
    proto = parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(number * np.eye(4, dtype=np.float32), "w"))
    return ir.from_proto(proto)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinop.model.files._SMALL", 0)
    monkeypatch.setattr("twinop.optimize.optimizer.EXTERNAL_DATA_BYTES", 0)


def write(number: float, target: Path) -> Path:
    """Publishes a model, and returns its data."""
    with work_folder(target) as folder:
        return publish.publish(save(make(number), folder / target.name, 0), target)[0]


def read(model: Path | bytes, folder: Path | None = None) -> float:
    session = deploy.session(model, ["CPUExecutionProvider"], folder=folder)
    return float(session.run(X)["y"][0, 0])


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def test_the_name_of_data_is_its_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(1, tmp_path / "model.onnx")
    with monkeypatch.context() as patch:
        patch.setattr("twinop.libraries.library.hashlib.sha256", lambda: None)
        known = checksum(data)  # from the pass that wrote it
    checked = hashlib.sha256(data.read_bytes()).hexdigest()
    assert known == checked and data.name == f"model.{checksum(data)[:16]}.data"
    assert read(tmp_path / "model.onnx") == 1
    assert write(1, tmp_path / "model.onnx") == data and names(tmp_path) == {"model.onnx", data.name}


def test_one_former_generation_stays(tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    first, old = write(1, target), target.read_bytes()
    second = write(2, target)
    assert read(old, tmp_path) == 1 and read(target) == 2, "a reader of the old graph finds its data"
    third = write(3, target)
    assert names(tmp_path) == {"model.onnx", second.name, third.name} and first not in (second, third)


def test_between_the_renames(tmp_path: Path) -> None:
    """Before its second rename, and after kill -9 there, the target is whole."""
    target = tmp_path / "model.onnx"
    write(1, target)
    onnx.save(ir.to_proto(make(2)), tmp_path / "new.onnx")
    program = f"""
import os, sys, time
import twinop.model.files as files, twinop.optimize.optimizer as check
from twinop.optimize import optimize
check.EXTERNAL_DATA_BYTES = files._SMALL = 0
real, left = os.replace, [1]
def slow(old, new):
    if os.path.dirname(new) == {str(tmp_path)!r}:
        left[0] -= 1
        if left[0] < 0:
            print("now", flush=True)
            sys.stdin.readline()
    real(old, new)
os.replace = slow
optimize({str(tmp_path / "new.onnx")!r}, {str(target)!r}, device="cpu")
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "now\n" and read(target) == 1
        process.kill()
        process.stdin.close()
        process.wait(60)
    assert read(target) in (1, 2)
    write(3, target)
    assert read(target) == 3 and not [name for name in names(tmp_path) if name.startswith(".")]


def test_only_data_that_twinop_wrote_and_nobody_names_goes(tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    first = write(1, target)
    other = tmp_path / "other.onnx"
    other.write_bytes(target.read_bytes())
    foreign = {FOREIGN: b"somebody's", "model.onnx.data": b"old", "model.data": b""}
    foreign["notmodel." + first.name[6:]] = first.read_bytes()
    for name, content in foreign.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "model.aaaaaaaaaaaaaaaa.data").mkdir()
    for number in (2, 3, 4):
        last = write(number, target)
    assert read(other) == 1 and read(target) == 4
    assert names(tmp_path) >= {*foreign, first.name, last.name, "model.aaaaaaaaaaaaaaaa.data"}
    assert len(list(tmp_path.glob("model.*.data"))) == 5 + 1, "first, former, last, foreign, a folder"
    other.unlink()
    write(5, target)
    assert not first.exists()


@pytest.mark.parametrize("kind", ["unreadable", "fifo", "folder", "damaged"])
def test_a_model_that_cannot_be_read_keeps_all_data(kind: str, tmp_path: Path) -> None:
    """One that is damaged still names its data."""
    target, strange = tmp_path / "model.onnx", tmp_path / "strange.onnx"
    first = write(1, target)
    if kind == "fifo":
        os.mkfifo(strange)
    elif kind == "folder":
        strange.mkdir()
    elif kind == "damaged":
        strange.write_bytes(b"\xff" * ((1 << 20) - 9) + first.name.encode() + b"\xff")
    else:
        strange.symlink_to("strange.onnx")
    for number in (2, 3):
        write(number, target)
    assert first.exists()


def test_hard_links_and_links_of_the_target(tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "model.onnx", tmp_path / "copy.bin"
    write(1, target)
    elsewhere.hardlink_to(target)
    before = elsewhere.read_bytes()
    write(2, target)
    assert elsewhere.read_bytes() == before and read(target) == 2
    assert read(before, tmp_path) == 1


def test_work_folders_of_dead_processes_go(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from twinop.system.publish import work_folder
with work_folder(Path(sys.argv[1])) as folder:
    (folder / "big").write_bytes(b"1")
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with publish.work_folder(tmp_path) as alive:
        command = [sys.executable, "-c", program, str(tmp_path)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        dead = Path(ended.stdout.strip())
        assert ended.returncode == -signal.SIGKILL and dead.exists()
        write(1, tmp_path / "model.onnx")
        assert alive.exists() and not dead.exists()
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_writers_at_once(tmp_path: Path) -> None:
    """Whoever is last: the graph has its data, and at most one former generation is there."""
    target = tmp_path / "model.onnx"
    threads = [threading.Thread(target=write, args=(number, target)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(target) in range(1, 9) and len(names(tmp_path)) <= 3


def test_a_place_that_is_taken_leaves_the_old_model(tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    write(1, target)
    blocked = write(2, tmp_path / "elsewhere.onnx").name.replace("elsewhere", "model")
    (tmp_path / blocked / "x").mkdir(parents=True)
    with pytest.raises(ExportError, match=f"{blocked}: cannot be written: Is a directory"):
        write(2, target)
    assert read(target) == 1


def test_folders_change_places_in_one_step(tmp_path: Path) -> None:
    new, place = tmp_path / "new", tmp_path / "place"
    for folder in (new, place):
        folder.mkdir()
        (folder / "of").write_text(folder.name)
    publish.replace_folder(new, place)
    assert (place / "of").read_text() == "new" and (new / "of").read_text() == "place"
    publish.replace_folder(new, tmp_path / "third")
    assert names(tmp_path) == {"place", "third"}
