"""Models and libraries that cannot be used, through the real process: what it says, that others go on."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import service_models as models
from models import node
from service_fixtures import Served, serve, start, tensor, wait_until
from service_loads import other_machine

from twinop.deploy.cuda import has_gpu
from twinop.deploy.service.protocol import pb

ROW = tensor("x", "FP32", [1, 4], [-1, 2, -3, 4])
Libraries = dict[str, Path]


@dataclass(frozen=True)
class Case:
    """`place` writes the model `bad` below a folder of models; `words` are in what is said about it."""

    place: Callable[[Path, Libraries], None]
    words: tuple[str, ...]


def external(location: str) -> Callable[[Path, Libraries], None]:
    """A model whose weights are elsewhere: outside.bin is beside the folder of models, and is a fit."""

    def place(folder: Path, libraries: Libraries) -> None:
        path = models.place(folder, "bad", models.relu())
        data = models.save_external(models.mlp(4, 8, 4), path)
        shutil.copy(data, folder.parent / "outside.bin")
        if location == "symlink":
            data.unlink()
            data.symlink_to(folder.parent / "outside.bin")
        else:
            models.point_external(path, location)

    return place


def library(name: str, data: Callable[[Libraries], bytes] | None, settings: str = "") -> Callable[..., None]:
    """A model that names a library beside it."""

    def place(folder: Path, libraries: Libraries) -> None:
        named = f'library = "{name}"\n' if name else ""
        path = models.place(folder, "bad", models.relu(), settings=named + settings)  # in its own folder
        if data is not None:
            (path.parents[1] / name).write_bytes(data(libraries))

    return place


def two_libraries(folder: Path, libraries: Libraries) -> None:
    models.place(folder, "bad", models.several_libraries())


PERMITS = "allow_fallback permits it"
CASES = {
    "external data missing": Case(external("nowhere.bin"), ("nowhere.bin is missing",)),
    "external data above": Case(external("../../../outside.bin"), ("outside of its folder",)),
    "external data by a link": Case(external("symlink"), ("outside of its folder, in 'weights.bin'",)),
    "external data by an absolute path": Case(external("/etc/passwd"), ("outside of its folder",)),
    "library missing": Case(library("libnone.so", None), ("libnone.so: no such library", PERMITS)),
    "wrong checksum": Case(
        library("", None, f'library_sha256 = "{"0" * 64}"'), ("its SHA-256 is", "0" * 64, PERMITS)
    ),
    "text for a library": Case(
        library("libtext.so", lambda _: b"#!/bin/sh\n"), ("libtext.so: not a shared library", PERMITS)
    ),
    "library of somebody else's": Case(
        library("libother.so", lambda _: Path(sys.executable).read_bytes()),
        ("without twinop records", PERMITS),
    ),
    "library for PyTorch": Case(
        library("libtorch.so", lambda built: built["twinop_torch"].read_bytes()),
        ("without twinop records", PERMITS),
    ),
    "library for another machine": Case(
        library("libriscv.so", lambda built: other_machine(built["custom_relu"])),
        ("libriscv.so", "built for riscv64, this machine is", PERMITS),
    ),
    "ops of two libraries": Case(
        two_libraries,
        (
            "CustomPadAffine is in libtest_ops.so; CustomSilu is in libcustom_ops.so",
            "one library per domain and session",
            "twinop_add_library(my_ops DOMAIN custom_domain OPS twinop_op_pad_affine twinop_op_silu)",
        ),
    ),
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, libraries: Libraries) -> dict[str, str]:
    """The environment in which these are all the installed libraries: there is one that has every op."""
    folder = tmp_path_factory.mktemp("libraries")
    for name in ("custom_relu", "custom_ops", "test_ops"):
        shutil.copy(libraries[name], folder)
    found = f"lambda: [pathlib.Path({str(folder)!r})]"
    patch = f"import pathlib, twinop.library\ntwinop.library.library_folders = {found}\n"
    (folder / "sitecustomize.py").write_text(patch)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, installed: dict[str, str]) -> Iterator[Served]:
    """A server that follows a folder, in which so far only `good` lies."""
    folder = tmp_path_factory.mktemp("root") / "models"
    models.place(folder, "good", models.relu())
    (folder / "twinop.toml").write_text("[server]\npoll_seconds = 0.1\n")
    with serve(folder, "--provider", "cpu", env=installed) as found:
        yield found


def entry(served: Served) -> tuple[str, str]:
    """The state of `bad` and why; nothing where the server does not know it."""
    return next((found for (name, _), found in served.versions().items() if name == "bad"), ("", ""))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_appears_and_cannot_be_served_is_said_and_disturbs_nobody(
    served: Served, libraries: Libraries, case: Case
) -> None:
    logged = len(served.log)
    staged = served.root.with_name("staged")  # a library that is still being copied is one cut short
    case.place(staged, libraries)
    (staged / "bad").rename(served.root / "bad")
    try:
        wait_until(lambda: entry(served)[0] == "unavailable")
        reason = entry(served)[1]
        errors = [line["message"] for line in served.log[logged:] if line["level"] == "error"]
        for word in case.words:
            assert word in reason and any(word in message for message in errors)
        assert str(served.root) not in reason and "/tmp" not in reason
        refused = served.infer("bad", ROW)
        assert refused.status == 503 and refused.error == "model bad is not ready"
        request = pb.ModelInferRequest(model_name="bad")
        with served.stub() as stub, pytest.raises(grpc.RpcError) as error:
            stub.ModelInfer(request, timeout=30)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert served.infer("good", ROW).json["outputs"][0]["data"] == [0, 2, 0, 4]
        assert "Traceback" not in served.log_path.read_text()
    finally:
        shutil.rmtree(served.root / "bad")
        wait_until(lambda: entry(served) == ("", ""))


def said_at_the_end(models: Path, log: Path, *options: str, env: dict[str, str] | None = None) -> str:
    """By a server that does not start, on one line."""
    process = start(models, log, *options, env=env)
    try:
        assert process.wait(60) == 1
    finally:
        process.kill()
        process.wait()
    said = " ".join(log.read_text().split())
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_alone_it_ends_the_start(
    tmp_path: Path, libraries: Libraries, installed: dict[str, str], case: Case
) -> None:
    case.place(tmp_path / "models", libraries)
    said = said_at_the_end(tmp_path / "models", tmp_path / "log", "--provider", "cpu", env=installed)
    for word in case.words:
        assert word in said


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_a_gpu_that_is_asked_for_and_absent(tmp_path: Path) -> None:
    models.place(tmp_path / "models", "good", models.relu())
    said = said_at_the_end(tmp_path / "models", tmp_path / "log", "--provider", "cuda")
    assert "CUDAExecutionProvider was asked for" in said and "no NVIDIA driver" in said


def test_two_models_with_two_libraries_both_answer(tmp_path: Path, installed: dict[str, str]) -> None:
    models.place(tmp_path, "relu", models.relu())
    pad = models._model(
        [node("CustomPadAffine", scale=2.0, pads=[0, 0])],
        [models._value("x", "FP32", ("N", 4))],
        [models._value("y", "FP32", None)],
    )
    models.place(tmp_path, "pad", pad)
    with serve(tmp_path, "--provider", "cpu", env=installed) as served:
        for model, expected in (("relu", [0, 2, 0, 4]), ("pad", [-2, 4, -6, 8])):
            assert served.infer(model, ROW).json["outputs"][0]["data"] == expected
        used = {
            model: served.ask("GET", f"/v2/models/{model}").json["parameters"]["library"]
            for model in ("relu", "pad")
        }
        assert used == {"relu": "libcustom_relu.so", "pad": "libtest_ops.so"}
