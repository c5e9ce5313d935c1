"""Writes the packed folder, whole or not at all."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jinja2
import onnx

import twinop
from twinop.libraries.library import checksum
from twinop.system.progress import Progress, silent
from twinop.system.publish import MANIFEST, replace_folder, work_folder

from ..errors import PackError
from ..service.model_settings import ModelSettings, Provider
from ..service.settings import checked
from ..service.triton_config import make_config, write_config
from .contents import Contents, read_contents, without_bodies
from .options import Options

MODELS_IN_CONTAINER = "/mnt/models"  # where KServe mounts what it downloads
_OF_OPTIMIZE = ("device", "library", "allow_model_libraries", "invariant", "timeout")
_OF_GENAI = ("model", "output", "force", "genai", *_OF_OPTIMIZE)
TRITON_IMAGE = "nvcr.io/nvidia/tritonserver:26.09-py3"
PYTHON_IMAGE = "python:3.13.11-slim-trixie"  # the Python that requirements/lock.py locks packages for
_NOT_SERVING = (
    *("__pycache__", "bench", "building", "aot_kernels", "doctor", "include"),
    *("export", "lib", "model", "optimize", "pack", "testing", "torch_op", "triton"),
)
_FILES = {
    "twinop.toml.j2": "models/{name}/twinop.toml",
    "Dockerfile.j2": "Dockerfile",
    "dockerignore.j2": ".dockerignore",
    "deployment.yaml.j2": "kubernetes/deployment.yaml",
    "inferenceservice.yaml.j2": "kubernetes/kserve/inferenceservice.yaml",
    "README.md.j2": "README.md",
}
_TRITON_FILES = {"triton.md.j2": "README.md"}


@dataclass(frozen=True)
class Packed:
    """What was written. `library_paths` are the paths in the container."""

    contents: Contents
    name: str
    kube_name: str
    image: str
    library_paths: list[str]


def pack(options: Options) -> Packed:
    """Checks the model and writes the folder.

    Raises:
        TwinopError: the model, the library or an option does not fit, or the folder may not be written.
    """
    if options.device != "cuda":
        raise PackError("--device is for --genai: choose an image's with --gpu or --cpu")
    if options.invariant:
        raise PackError("--invariant is for --genai: give it to twinop optimize, and pack what that writes")
    name = _model_name(options)
    kube_name = kubernetes_name(name)
    image = _image(options, kube_name)
    _check_output(options)
    contents = read_contents(options)
    folder = f"{MODELS_IN_CONTAINER}/{name}/{options.version}"
    libraries = [f"{folder}/{library.path.name}" for library in contents.libraries]
    packed = Packed(contents, name, kube_name, image, libraries)
    with _written_whole(options.output) as new:
        _write(new, options, packed)
        for each in (new, *new.rglob("*")):  # another user reads it in the container
            each.chmod(0o755 if each.is_dir() else 0o644)
    return packed


def pack_genai(options: Options, progress: Progress = silent) -> Any:
    """Optimises a folder of onnxruntime-genai for a device, and returns the report.

    Raises:
        TwinopError: the folder, the library or an option does not fit, or the folder may not be written.
    """
    from twinop.optimize import optimize_folder  # late: pack without --genai needs no onnx_ir

    given = [each.name for each in fields(options) if getattr(options, each.name) != each.default]
    if others := [name for name in given if name not in _OF_GENAI]:
        raise PackError(f"--{others[0].replace('_', '-')} says nothing of a folder for --genai: leave it out")
    _check_output(options)
    if options.output.resolve().is_relative_to(source := options.model.resolve()):
        raise PackError(f"{options.output} is in the folder that it is made of. Name one outside {source}")
    asked = {name: getattr(options, name) for name in _OF_OPTIMIZE}
    with _written_whole(options.output) as root:
        report = optimize_folder(options.model, root, progress=progress, **asked)
        _write_manifest(root, root)
    return report


# -------------------------------------------------------------------------------- options


def _model_name(options: Options) -> str:
    name = options.model.stem if options.name is None else options.name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", name):
        raise PackError(
            f"{name!r} cannot be a model's name: expected letters, digits, _ . and -, and a letter or digit "
            "first. Pass another with --name"
        )
    return name


def kubernetes_name(name: str) -> str:
    """Returns a name for Kubernetes. KServe adds up to 23 characters and a namespace to it, within 63."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (plain if plain[0].isalpha() else f"model-{plain}")[:40].rstrip("-")


def _image(options: Options, kube_name: str) -> str:
    image = options.image or kube_name
    part = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
    host = r"(?:[A-Za-z0-9.-]+(?::\d+)?/)?"
    reference = rf"{host}{part}(?:/{part})*(?P<tag>:[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?"
    found = re.fullmatch(reference, image)
    if found is None:
        raise PackError(f"--image {image}: expected a name such as registry.example.com/team/{kube_name}:1")
    return image if found["tag"] else f"{image}:{options.version}"


def _check_output(options: Options) -> None:
    """Refuses to overwrite a folder that `twinop pack` did not write."""
    output = options.output
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MANIFEST).is_file():
        raise PackError(f"{output} already exists, and is not from twinop pack. Choose another, or remove it")
    if not options.force:
        raise PackError(f"{output} already exists. --force replaces it")
    inside = output.resolve()
    for path in (options.model, *(options.library or ())):
        if path.resolve().is_relative_to(inside):
            raise PackError(f"{path} lies in {output}, which --force would replace. Choose another folder")


# -------------------------------------------------------------------------------- writing


@contextmanager
def _written_whole(output: Path) -> Iterator[Path]:
    """Lets its block write beside the folder and renames, so that a failure leaves the old folder."""
    try:
        place = output.resolve()
        place.parent.mkdir(parents=True, exist_ok=True)
        with work_folder(place.parent) as scratch:
            new = scratch / "new"
            yield new
            replace_folder(new, place)
    except OSError as error:
        raise PackError(
            f"{output}: cannot be written: {error.strerror} ({error.filename or place})"
        ) from error


def _write(root: Path, options: Options, packed: Packed) -> None:
    contents, model = packed.contents, root / "models" / packed.name
    version = model / str(options.version)
    _copy(contents.model, version / "model.onnx")
    for each in contents.data:
        _copy(contents.model.parent / each, version / each)
    for library in contents.libraries:
        _copy(library.path, version / library.path.name)
    settings = {
        "provider": Provider.CUDA if contents.gpu else Provider.CPU,
        "max_batch_size": options.max_batch_size,
        # The container's CPUs: ONNX Runtime would count those of the machine.
        "intra_op_threads": options.cpus,
    }
    if options.triton:
        onnx.save(without_bodies(contents), version / "model.onnx")
        checked_settings = checked(ModelSettings, settings, "the options")
        inputs, outputs = ({spec.name: spec for spec in each} for each in (contents.inputs, contents.outputs))
        config = make_config(packed.name, checked_settings, inputs, outputs, libraries=packed.library_paths)
        (model / "config.pbtxt").write_text(write_config(config))
    else:
        requirements = f"requirements-{'gpu' if contents.gpu else 'cpu'}.txt"
        _copy(Path(__file__).with_name(requirements), root / "service/requirements.txt")
        _copy_sources(root / "service/twinop")
    _render(root, options, packed, settings)
    _write_manifest(root, model, image=packed.image)


def _write_manifest(root: Path, folder: Path, **entries: str) -> None:
    files = {
        str(path.relative_to(root)): checksum(path) for path in sorted(folder.rglob("*")) if path.is_file()
    }
    manifest = {"twinop": twinop.__version__, **entries, "sha256": files}
    (root / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _render(root: Path, options: Options, packed: Packed, settings: dict[str, Any]) -> None:
    contents = packed.contents
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    values = vars(options) | vars(contents) | vars(packed) | settings | {
        "memory": _memory(contents), "library_sha256": contents.library_sha256,
        "models_in_container": MODELS_IN_CONTAINER, "python_image": PYTHON_IMAGE,
        "triton_image": TRITON_IMAGE, "twinop_version": twinop.__version__,
    }  # fmt: skip
    for template, path in (_TRITON_FILES if options.triton else _FILES).items():
        target = root / path.format(name=packed.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(environment.get_template(template).render(values), encoding="utf-8")


def _memory(contents: Contents) -> int:
    """Returns the MiB to request: for Python, ONNX Runtime, the model, and copies of its weights."""
    base = 2048 if contents.gpu else 512
    return base + -(-3 * contents.size // (256 << 20)) * 256


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _copy_sources(target: Path) -> None:
    """Copies the part of the Python package that serves; the library is beside the model."""

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [
            name
            for name in names
            if name in _NOT_SERVING or (not name.endswith(".py") and not os.path.isdir(f"{folder}/{name}"))
        ]

    source = Path(twinop.__file__).parent
    shutil.copytree(source, target, ignore=left_out, copy_function=shutil.copyfile)
