"""A packed folder for the tests of `twinop pack`."""

import importlib
from pathlib import Path
from typing import Any

import onnx
from service_models import identity, relu

from twinop.deploy.pack.options import Options
from twinop.deploy.pack.packing import Packed, pack

yaml = importlib.import_module("yaml")
CASES: dict[str, dict[str, Any]] = {
    "gpu": {"gpu": True, "max_batch_size": 64, "image": "registry.example.com/team/relu:1"},
    "cpu": {"gpu": False},
    "no-library": {"gpu": False},
}


def saved(folder: Path, model: onnx.ModelProto | None = None, name: str = "custom_relu") -> Path:
    path = folder / f"{name}.onnx"
    onnx.save(relu() if model is None else model, path)
    return path


def packed(folder: Path, model: onnx.ModelProto | None = None, **options: Any) -> tuple[Path, Packed]:
    """The packed folder and what is said of it."""
    output = folder / "repo"
    return output, pack(Options(saved(folder, model), output, **options))


def packed_case(folder: Path, case: str) -> Path:
    """The packed folder of one of CASES."""
    model = identity("FP32") if case == "no-library" else None
    return packed(folder, model, **CASES[case])[0]


def document(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def plain(repo: Path) -> dict[str, Any]:
    """The objects for a cluster without KServe, by kind."""
    documents = yaml.safe_load_all((repo / "kubernetes/deployment.yaml").read_text())
    return {each["kind"]: each for each in documents}


def container(repo: Path) -> Any:
    return plain(repo)["Deployment"]["spec"]["template"]["spec"]["containers"][0]
