"""Reads and checks what is packed: the model, its data files and its libraries."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import external_data_helper

from twinop.errors import LibraryError
from twinop.installation import how_to_build
from twinop.libraries.library import Library, checksum

from ..check_nodes import require_fit
from ..choose_library import choose_libraries
from ..create_session import session
from ..custom_nodes import Model, load_model, tensors
from ..errors import RunError
from ..service.datatypes import datatype_of, require_servable
from ..tensor_specs import Spec
from .options import Options

# The older version of each in the two base images: Debian 13 (the service) and Ubuntu 24.04 (Triton).
BASE_IMAGES_HAVE = {"GLIBC": (2, 39), "GLIBCXX": (3, 4, 33)}


@dataclass(frozen=True)
class Contents:
    """A model that can be packed.

    Attributes:
        data: the model's external data files, relative to its folder.
        inputs, outputs: as ONNX Runtime reports them, or from the graph where no session can be opened here.
        size: the bytes of the model and its data.
        custom_nodes: the types of the custom nodes.
        notes: what the user should know before deployment.
    """

    model: Path
    data: tuple[Path, ...]
    libraries: tuple[Library, ...]
    gpu: bool
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    size: int
    custom_nodes: tuple[str, ...]
    notes: list[str] = field(default_factory=list)

    @property
    def library_sha256(self) -> list[str]:
        return [checksum(library.path) for library in self.libraries]

    @property
    def cuda_archs(self) -> str:
        """The GPU architectures of the kernels, or "" without a library."""
        return ", ".join(dict.fromkeys(library.cuda_archs for library in self.libraries))


def read_contents(options: Options) -> Contents:
    """Reads and checks a model and its libraries.

    Raises:
        ModelError: the model or its data is missing, damaged or elsewhere, no library fits it, the protocol
            cannot carry an input or output, or it lacks the batch axis.
        LibraryError: a library is not twinop's, was built without CUDA, is too new for the base images, or
            has the file name of another one.
        RunError: ONNX Runtime refuses the model.
    """
    path, batched = options.model, options.max_batch_size > 0
    model = load_model(path, confined=True)
    data = data_files(model)
    allowed = options.allow_model_libraries
    found = choose_libraries(model, options.library, bodies=False, allow_model_libraries=allowed)
    require_fit(model, found)
    gpu = _wants_gpu(options.gpu, found)
    notes: list[str] = []
    for each in found:
        require_old_enough(each.path)
    _require_names_differ(found)
    inputs, outputs = _specs(path, model, found, gpu, notes)
    require_servable(str(path), inputs, outputs, batched)
    for spec in (*inputs, *outputs) if options.triton else ():
        _note(spec, batched, notes)
    sizes = [path.stat().st_size, *((path.parent / each).stat().st_size for each in data)]
    custom = sorted({node.proto.op_type for node in model.nodes})
    return Contents(path, data, tuple(found), gpu, inputs, outputs, sum(sizes), tuple(custom), notes)


def data_files(model: Model) -> tuple[Path, ...]:
    """Returns the files of the model's external data, relative to its folder."""
    external = filter(external_data_helper.uses_external_data, tensors(model.proto))
    locations = (external_data_helper.ExternalDataInfo(tensor).location for tensor in external)
    return tuple(sorted(set(map(Path, locations))))


def without_bodies(contents: Contents) -> onnx.ModelProto:
    """Returns the model without the function bodies of the libraries' ops, and without its external data.

    A runtime that lacks a library or one of its ops refuses this model; with the bodies, it would run them.
    """
    proto = onnx.load(contents.model, load_external_data=False)
    in_libraries = {record.node_type for each in contents.libraries for record in each.by_onnx_name.values()}
    kept = [each for each in proto.functions if (each.domain, each.name) not in in_libraries]
    del proto.functions[:]
    proto.functions.extend(kept)
    return proto


def _require_names_differ(libraries: Sequence[Library]) -> None:
    names = [library.path.name for library in libraries]
    if len(set(names)) < len(names):
        paths = " and ".join(str(library.path) for library in libraries)
        raise LibraryError(
            f"{paths}: packed libraries lie in one folder, so their file names must differ. Rename one"
        )


def require_old_enough(path: Path) -> None:
    """Raises LibraryError if the library needs a newer C or C++ runtime than the images have."""
    for name, newest in BASE_IMAGES_HAVE.items():
        needed = needed_version(path, name)
        if needed > newest:
            raise LibraryError(
                f"{path}: needs {name} {_dotted(needed)}, and the images have {_dotted(newest)}: it was "
                "built on a newer system. Build it on Debian 12, Ubuntu 24.04 or older, or in a container"
            )


def needed_version(path: Path, name: str) -> tuple[int, ...]:
    """Returns the newest version of GLIBC or GLIBCXX that a library needs, from its string table."""
    found = re.findall(rb"\0" + name.encode() + rb"_(\d+(?:\.\d+)+)(?=\0)", path.read_bytes())
    return max((tuple(map(int, version.split(b"."))) for version in found), default=(0,))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _wants_gpu(asked: bool | None, libraries: Sequence[Library]) -> bool:
    without = [library for library in libraries if library.cuda_archs in ("", "none")]
    if asked and without:
        raise LibraryError(
            f"{without[0].path} was built without CUDA: on a GPU its nodes would run on the CPU. "
            f"{how_to_build(without[0].domain, needs_cuda=True)}, or pass --cpu"
        )
    return bool(libraries) and not without if asked is None else asked


def _specs(
    path: Path, model: Model, libraries: Sequence[Library], gpu: bool, notes: list[str]
) -> tuple[tuple[Spec, ...], tuple[Spec, ...]]:
    """Opens a session on the CPU, which checks the model as Triton's backend does."""
    try:
        paths: list[str | os.PathLike[str]] = [library.path for library in libraries]
        opened = session(path, ["CPUExecutionProvider"], paths or False)
    except RunError as error:
        if not gpu:  # some types have kernels for GPUs only
            raise
        notes.append(f"not opened here, where there is only a CPU: {str(error).splitlines()[0]}")
        return _specs_of_graph(model.proto)
    return tuple(opened.required), tuple(opened.outputs.values())


def _specs_of_graph(proto: onnx.ModelProto) -> tuple[tuple[Spec, ...], tuple[Spec, ...]]:
    """Reads the inputs without a default, and the outputs with the shapes that ONNX infers."""
    with suppress(Exception):  # ONNX Runtime refuses a broken model where it is opened
        proto = onnx.shape_inference.infer_shapes(proto)
    graph = proto.graph
    defaults = {each.name for each in graph.initializer}
    defaults |= {each.values.name for each in graph.sparse_initializer}
    inputs = tuple(Spec.of_value(each) for each in graph.input if each.name not in defaults)
    return inputs, tuple(Spec.of_value(each) for each in graph.output)


def _note(spec: Spec, batched: bool, notes: list[str]) -> None:
    if datatype_of(spec.numpy_dtype) == "BF16":
        notes.append(f"{spec.name} is bfloat16, which Triton's ONNX Runtime backend takes from 26.03 on")
    if spec.shape is not None and len(spec.shape) == batched:
        ours, theirs = ("[N]", "[N, 1]") if batched else ("[]", "[1]")
        notes.append(
            f"{spec.name} has shape {ours} in the model and {theirs} in Triton, whose config.pbtxt has no "
            "empty shapes"
        )
