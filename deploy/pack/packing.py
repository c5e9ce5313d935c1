"""Reads and checks what is packed, and writes the folder, whole or not at all."""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import onnx
from onnx import external_data_helper

import twinop
from twinop.errors import LibraryError
from twinop.installation import how_to_build
from twinop.libraries.library import Library, checksum
from twinop.system.progress import Progress, silent
from twinop.system.publish import MANIFEST, replace_folder, work_folder
from twinop.system.regular_file import real_path

from ..check_nodes import require_fit
from ..choose_library import choose_libraries
from ..create_session import choose_providers, open_session, with_kernels
from ..custom_nodes import Model, load_model, tensors
from ..errors import PackError, RunError
from ..service.datatypes import require_servable
from ..tensor_specs import Spec
from .command import Options
from .triton_config import make_config, write_config

MODELS_IN_CONTAINER = (
    "/mnt/models"  # as in examples/serving/Dockerfile; KServe mounts what it downloads there
)
TRITON_IMAGE = "nvcr.io/nvidia/tritonserver:26.09-py3"
_OF_OPTIMIZE = ("device", "dtype", "library", "allow_model_libraries", "invariant", "timeout")
_OF_GENAI = ("model", "output", "force", "genai", *_OF_OPTIMIZE)


@dataclass(frozen=True)
class Packed:
    """A model that can be packed, and what is written of it."""

    name: str
    version: int
    model: Path
    data: tuple[Path, ...]  # external data, relative to the model's folder
    libraries: tuple[Library, ...]
    gpu: bool
    inputs: tuple[Spec, ...]  # those that clients see
    outputs: tuple[Spec, ...]
    note: str  # what the user should know before deployment

    @property
    def library_paths(self) -> list[str]:
        """The libraries' paths in the container."""
        folder = f"{MODELS_IN_CONTAINER}/{self.name}/{self.version}"
        return [f"{folder}/{library.path.name}" for library in self.libraries]


def read_contents(options: Options) -> Packed:
    """Reads and checks a model and its libraries; TwinopError: they do not fit, or are refused."""
    path = options.model
    model = load_model(path, confined=True)
    data = data_files(model)
    allowed = options.allow_model_libraries
    found = choose_libraries(model, options.library, bodies=False, allow_model_libraries=allowed)
    require_fit(model, found)
    names = [library.path.name for library in found]
    if len(set(names)) < len(names):
        files = " and ".join(str(library.path) for library in found)
        raise LibraryError(f"{files}: packed libraries lie in one folder, so their names must differ")
    gpu, note = _wants_gpu(options.gpu, found), ""
    try:  # which checks the model as Triton's backend does
        choice = choose_providers(["CPUExecutionProvider"], found)
        open_session(model, with_kernels(model, found, choice, bodies=False), choice)
    except RunError as error:
        if not gpu:  # some types have kernels for GPUs only
            raise
        note = f"not opened here, where there is only a CPU: {str(error).splitlines()[0]}"
    inputs, outputs = _specs(model.proto)
    require_servable(str(path), inputs, outputs, options.max_batch_size > 0)
    name, libraries = _model_name(options), tuple(found)
    return Packed(name, options.version, path, data, libraries, gpu, inputs, outputs, note)


def data_files(model: Model) -> tuple[Path, ...]:
    """Returns the files of the model's external data, relative to its folder."""
    external = filter(external_data_helper.uses_external_data, tensors(model.proto))
    locations = (external_data_helper.ExternalDataInfo(tensor).location for tensor in external)
    return tuple(sorted(set(map(Path, locations))))


def without_bodies(packed: Packed) -> onnx.ModelProto:
    """Returns the model without bodies of ops that the libraries have: a runtime without them refuses it."""
    proto = onnx.load(packed.model, load_external_data=False)
    in_libraries = {record.node_type for each in packed.libraries for record in each.by_onnx_name.values()}
    kept = [each for each in proto.functions if (each.domain, each.name) not in in_libraries]
    del proto.functions[:]
    proto.functions.extend(kept)
    return proto


def _wants_gpu(asked: bool | None, libraries: Sequence[Library]) -> bool:
    without = [library for library in libraries if library.cuda_archs in ("", "none")]
    if asked and without:
        raise LibraryError(
            f"{without[0].path} was built without CUDA: on a GPU its nodes would run on the CPU. "
            f"{how_to_build(without[0].domain, needs_cuda=True)}, or pass --cpu"
        )
    return bool(libraries) and not without if asked is None else asked


def _specs(proto: onnx.ModelProto) -> tuple[tuple[Spec, ...], tuple[Spec, ...]]:
    """Reads the inputs without a default, and the outputs with the shapes that ONNX infers."""
    with suppress(Exception):  # ONNX Runtime refuses a broken model where it is opened
        proto = onnx.shape_inference.infer_shapes(proto)
    graph = proto.graph
    defaults = {each.name for each in graph.initializer}
    defaults |= {each.values.name for each in graph.sparse_initializer}
    inputs = tuple(Spec.of_value(each) for each in graph.input if each.name not in defaults)
    return inputs, tuple(Spec.of_value(each) for each in graph.output)


def pack(options: Options) -> Packed:
    """Checks the model and writes the folder; TwinopError: they, or an option, do not fit."""
    if options.device != "cuda":
        raise PackError("--device is for --genai: choose a packed model's with --gpu or --cpu")
    for name in ("invariant", "dtype"):
        if getattr(options, name):
            raise PackError(f"--{name} is for --genai: give it to twinop optimize, and pack what that writes")
    _model_name(options)
    _check_output(options)
    packed = read_contents(options)
    with _written_whole(options.output) as new:
        _write(new, options, packed)
        for each in (new, *new.rglob("*")):  # another user reads it in the container
            each.chmod(0o755 if each.is_dir() else 0o644)
    return packed


def pack_genai(options: Options, progress: Progress = silent) -> Any:
    """Optimises a folder of onnxruntime-genai for a device, and returns the report; errors as of `pack`."""
    from twinop.optimize import optimize_folder  # late: pack without --genai needs no onnx_ir

    given = [each.name for each in fields(options) if getattr(options, each.name) != each.default]
    if others := [name for name in given if name not in _OF_GENAI]:
        raise PackError(f"--{others[0].replace('_', '-')} does not apply to --genai: leave it out")
    _check_output(options)
    if real_path(options.output).is_relative_to(source := real_path(options.model)):
        raise PackError(f"{options.output}: lies inside the source folder. Choose one outside {source}")
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


def _check_output(options: Options) -> None:
    """Refuses to overwrite a folder that `twinop pack` did not write."""
    output = options.output
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MANIFEST).is_file():
        raise PackError(f"{output} already exists, and is not from twinop pack. Choose another, or remove it")
    if not options.force:
        raise PackError(f"{output} already exists. --force replaces it")
    inside = real_path(output)
    for path in (options.model, *(options.library or ())):
        if real_path(path).is_relative_to(inside):
            raise PackError(f"{path} lies in {output}, which --force would replace. Choose another folder")


# -------------------------------------------------------------------------------- writing


@contextmanager
def _written_whole(output: Path) -> Iterator[Path]:
    """Lets its block write beside the folder and renames, so that a failure leaves the old folder."""
    try:
        place = real_path(output)
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
    model = root / "models" / packed.name
    version = model / str(options.version)
    _copy(packed.model, version / "model.onnx")
    for each in packed.data:
        _copy(packed.model.parent / each, version / each)
    for library in packed.libraries:
        _copy(library.path, version / library.path.name)
    if options.triton:
        onnx.save(without_bodies(packed), version / "model.onnx")
        config = make_config(
            packed.name,
            packed.inputs,
            packed.outputs,
            gpu=packed.gpu,
            max_batch_size=options.max_batch_size,
            threads=options.cpus,
            libraries=packed.library_paths,
        )
        (model / "config.pbtxt").write_text(write_config(config))
    else:
        settings: dict[str, Any] = {
            "provider": "cuda" if packed.gpu else "cpu",
            "max_batch_size": options.max_batch_size,
            # The container's CPUs: ONNX Runtime would count those of the machine.
            "intra_op_threads": options.cpus,
            # A longer run is ended; where it cannot be, the service ends with code 70 and must be restarted.
            "run_timeout_seconds": 60,
        }
        if packed.libraries:  # others are not loaded
            settings["library_sha256"] = [checksum(library.path) for library in packed.libraries]
        lines = (f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
        (model / "twinop.toml").write_text("".join(lines))
    _write_manifest(root, model)


def _write_manifest(root: Path, folder: Path) -> None:
    files = {
        str(path.relative_to(root)): checksum(path) for path in sorted(folder.rglob("*")) if path.is_file()
    }
    manifest = {"twinop": twinop.__version__, "sha256": files}
    (root / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
