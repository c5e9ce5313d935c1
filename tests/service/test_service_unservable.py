"""Models and libraries that cannot be used: what the service says, and that other models are served."""

import asyncio
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import service_models as models
from models import node
from service_fixtures import Served, serve, wait_until
from service_loads import only_these, other_machine, repository_of
from service_rows import QUICK, ROW

from twinop.deploy.service.protocol import pb
from twinop.errors import TwinopError

MODELS = ("--allow-model-libraries",)  # load libraries from the models' own folders
Libraries = dict[str, Path]


@dataclass(frozen=True)
class Case:
    """`place` writes the model `bad` to a folder of models. The message about it contains `words`."""

    place: Callable[[Path, Libraries], None]
    words: tuple[str, ...]


def external(location: str) -> Callable[[Path, Libraries], None]:
    """Place a model whose weights are elsewhere. A fitting outside.bin lies beside the folder of models."""

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
    """Place a model that names a library in its folder."""

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
def installed(tmp_path_factory: pytest.TempPathFactory, libraries: Libraries) -> Path:
    """Return a folder with libraries that together have every op."""
    folder = tmp_path_factory.mktemp("libraries")
    for name in ("custom_relu", "custom_ops", "test_ops"):
        shutil.copy(libraries[name], folder)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, installed: Path) -> Iterator[Served]:
    """A server that follows a folder with two models. It finds only the libraries in `installed`."""
    folder = tmp_path_factory.mktemp("root") / "models"
    models.place(folder, "good", models.relu())
    pad = models.make(
        [node("CustomPadAffine", scale=2.0, pads=[0, 0])],
        [models.info("x", "FP32", ("N", 4))],
        [models.info("y", "FP32", None)],
    )
    models.place(folder, "pad", pad)
    (folder / "twinop.toml").write_text("[server]\ncontrol = 'poll'\npoll_seconds = 0.05\n")
    patched = (
        "import pathlib, sys, twinop.library\n"
        f"twinop.library.library_folders = lambda: [pathlib.Path({str(installed)!r})]\n"
        "from twinop.cli import app\n"
        "app(sys.argv[1:])\n"
    )
    with serve(folder, *QUICK, *MODELS, program=("-c", patched)) as found:
        yield found


def entry(served: Served) -> tuple[str, str]:
    """Return the state of `bad` and the reason; empty texts if the server does not know it."""
    return next((found for (name, _), found in served.versions().items() if name == "bad"), ("", ""))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_unservable_model_is_reported_and_isolated(served: Served, libraries: Libraries, case: Case) -> None:
    logged = len(served.log)
    staged = served.root.with_name("staged")  # a library that is still being copied would be cut short
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
            stub.ModelInfer(request, timeout=60)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert served.infer("good", ROW).json["outputs"][0]["data"] == [0, 2, 0, 4]
        assert "Traceback" not in served.log_path.read_text()
    finally:
        shutil.rmtree(served.root / "bad")
        wait_until(lambda: entry(served) == ("", ""))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_alone_it_ends_the_start(
    tmp_path: Path, libraries: Libraries, installed: Path, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.place(tmp_path / "models", libraries)
    only_these(monkeypatch, installed)
    with pytest.raises(TwinopError) as error:
        asyncio.run(repository_of(monkeypatch, tmp_path / "models", *QUICK, *MODELS).load_all())
    said = " ".join(str(error.value).split())
    for word in case.words:
        assert word in said


def test_two_models_with_two_libraries_both_answer(served: Served) -> None:
    for model, expected in (("good", [0, 2, 0, 4]), ("pad", [-2, 4, -6, 8])):
        assert served.infer(model, ROW).json["outputs"][0]["data"] == expected
    used = {
        model: served.ask("GET", f"/v2/models/{model}").json["parameters"]["library"]
        for model in ("good", "pad")
    }
    assert used == {"good": "libcustom_relu.so", "pad": "libtest_ops.so"}
