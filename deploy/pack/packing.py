"""Writes the packed folder, whole or not at all."""

import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import onnx

import twinop
from twinop.library import checksum

from ..errors import PackError
from ..service.model_settings import ModelSettings, Provider
from ..service.settings import checked
from ..service.triton_config import make_config, write_config
from .contents import Contents, needed_version, read_contents, without_bodies
from .options import Options

MODELS_IN_CONTAINER = "/mnt/models"  # where KServe mounts what it downloads
MANIFEST = "twinop-pack.json"
TRITON_IMAGE = "nvcr.io/nvidia/tritonserver:26.09-py3"
PYTHON_IMAGE = "python:3.13.11-slim-trixie"  # the Python that requirements/lock.py locks packages for
_PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
_SOURCES = {".py", ".html"}
_NOT_SERVING = {
    *("__pycache__", "bench", "building", "aot_kernels", "doctor"),
    *("export", "lib", "optimize", "pack", "testing", "torch_op", "triton"),
}
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
    """What was written. `libraries` are the paths of the libraries in the container."""

    contents: Contents
    name: str
    kube_name: str
    image: str
    libraries: list[str]


def pack(options: Options) -> Packed:
    """Checks the model and writes the folder.

    Raises:
        TwinopError: the model, the library or an option does not fit, or the folder may not be written.
    """
    name = _model_name(options)
    kube_name = kubernetes_name(name)
    image = _image(options, kube_name)
    _check_options(options)
    _check_output(options)
    contents = read_contents(
        options.model,
        options.library or (),
        options.gpu,
        options.max_batch_size > 0,
        options.allow_model_libraries,
    )
    folder = f"{MODELS_IN_CONTAINER}/{name}/{options.version}"
    libraries = [f"{folder}/{library.path.name}" for library in contents.libraries]
    packed = Packed(contents, name, kube_name, image, libraries)
    config = _config(options, packed)
    try:
        _write_whole(options, packed, config)
    except OSError as error:
        raise PackError(
            f"{options.output}: cannot be written: {error.strerror} ({error.filename})"
        ) from error
    return packed


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


def _check_options(options: Options) -> None:
    if options.bodies and not options.triton:
        raise PackError(
            "--bodies without --triton: what is packed for twinop serve always has the function bodies, with "
            "which it compares the kernels. Leave the option out, or add --triton"
        )


def _check_output(options: Options) -> None:
    """Refuses to overwrite a folder that `twinop pack` did not write."""
    output = options.output
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MANIFEST).is_file():
        raise PackError(f"{output} is there, and not from twinop pack. Choose another folder, or remove it")
    if not options.force:
        raise PackError(f"{output} already exists. --force replaces it")
    inside = output.resolve()
    for path in (options.model, *(options.library or ())):
        if path.resolve().is_relative_to(inside):
            raise PackError(f"{path} lies in {output}, which --force would replace. Choose another folder")


# -------------------------------------------------------------------------------- contents


def _values(options: Options, packed: Packed) -> dict[str, Any]:
    """Returns the values for the templates: the options, the contents, and what follows from them."""
    contents = packed.contents
    memory = _memory(contents)
    return vars(options) | vars(contents) | _settings(options, contents) | {
        "name": packed.name, "kube_name": packed.kube_name, "image": packed.image,
        "image_title": packed.image.rpartition(":")[0].rpartition("/")[2],
        "memory": memory, "memory_limit": 2 * memory,
        "library_paths": packed.libraries, "library_sha256": contents.library_sha256,
        "cuda_archs": contents.cuda_archs,
        "needs_glibc": _needed(contents, "GLIBC"), "needs_glibcxx": _needed(contents, "GLIBCXX"),
        "models_in_container": MODELS_IN_CONTAINER, "platform": _PLATFORMS[os.uname().machine],
        "python_image": PYTHON_IMAGE, "triton_image": TRITON_IMAGE,
        "runtime_version": _runtime_version(contents.gpu), "twinop_version": twinop.__version__,
    }  # fmt: skip


def _settings(options: Options, contents: Contents) -> dict[str, Any]:
    """Returns the model's settings, which both twinop.toml and config.pbtxt have."""
    return {
        "provider": Provider.CUDA if contents.gpu else Provider.CPU,
        "max_batch_size": options.max_batch_size,
        # The container's CPUs: ONNX Runtime would count those of the machine.
        "intra_op_threads": options.cpus,
    }


def _config(options: Options, packed: Packed) -> str:
    contents = packed.contents
    text = write_config(
        make_config(
            packed.name,
            checked(ModelSettings, _settings(options, contents), "the options"),
            {spec.name: spec for spec in contents.inputs},
            {spec.name: spec for spec in contents.outputs},
            libraries=packed.libraries,
        )
    )
    return f"# Triton's model configuration. twinop serve reads twinop.toml.\n{text}"


def _memory(contents: Contents) -> int:
    """Returns the MiB to request: for Python, ONNX Runtime, the model, and copies of its weights."""
    base = 2048 if contents.gpu else 512
    return base + -(-3 * contents.size // (256 << 20)) * 256


def _needed(contents: Contents, name: str) -> str:
    versions = [needed_version(library.path, name) for library in contents.libraries]
    return ".".join(map(str, max(versions, default=())))


def _requirements(gpu: bool) -> Path:
    return Path(__file__).with_name(f"requirements-{'gpu' if gpu else 'cpu'}.txt")


def _runtime_version(gpu: bool) -> str:
    found = re.search(r"^onnxruntime(?:-gpu)?==(\S+)", _requirements(gpu).read_text(), re.MULTILINE)
    assert found is not None, "requirements/lock.py writes it"
    return found[1]


# -------------------------------------------------------------------------------- writing


def _write_whole(options: Options, packed: Packed, config: str) -> None:
    """Writes beside the folder and renames, so that a failure leaves the old folder."""
    output = options.output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
        new = Path(scratch) / "new"
        _write(new, options, packed, config)
        if output.exists():
            output.rename(Path(scratch) / "old")
        for folder, _, _ in os.walk(new):  # another user reads it in the container
            os.chmod(folder, 0o755)
        new.rename(output)


def _write(root: Path, options: Options, packed: Packed, config: str) -> None:
    contents, values = packed.contents, _values(options, packed)
    version = root / "models" / packed.name / str(options.version)
    _copy(contents.model, version / "model.onnx")
    if options.triton and not options.bodies:
        onnx.save(without_bodies(contents), version / "model.onnx")
    for each in contents.data:
        _copy(contents.model.parent / each, version / each)
    for library in contents.libraries:
        _copy(library.path, version / library.path.name)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["quoted"] = _quoted
    for template, path in (_TRITON_FILES if options.triton else _FILES).items():
        _text(root / path.format(name=packed.name), environment.get_template(template).render(values))
    _text(root / "models" / packed.name / "config.pbtxt", config)
    manifest = _manifest(options, packed) | {"model_sha256": checksum(version / "model.onnx")}
    _text(root / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    if options.triton:
        return
    _copy(_requirements(contents.gpu), root / "service/requirements.txt")
    _copy_sources(root / "service/twinop")


def _copy_sources(target: Path) -> None:
    """Copies the part of the Python package that serves; the library is beside the model."""
    source = Path(twinop.__file__).parent
    for folder, folders, files in os.walk(source, followlinks=True):
        folders[:] = sorted(each for each in folders if each not in _NOT_SERVING)
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix in _SOURCES:
                _copy(path, target / path.relative_to(source))


def _manifest(options: Options, packed: Packed) -> dict[str, Any]:
    contents = packed.contents
    return {
        "twinop": twinop.__version__,
        "model": packed.name,
        "version": options.version,
        "data_sha256": {str(each): checksum(contents.model.parent / each) for each in contents.data},
        "libraries": packed.libraries,
        "library_sha256": contents.library_sha256,
        "custom_nodes": list(contents.custom_nodes),
        "gpu": contents.gpu,
        "image": packed.image,
    }


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o644)


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o644)


def _quoted(text: str) -> str:
    """Quotes a string for protobuf's text format, TOML, YAML and Dockerfiles, which escape alike."""
    return json.dumps(text, ensure_ascii=False)
