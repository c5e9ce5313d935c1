"""What is packed: the model, its data files and its library, checked as far as that is possible here."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import external_data_helper

from twinop.errors import LibraryError
from twinop.library import Library, checksum

from ..check_nodes import require_fit
from ..choose_library import only_library
from ..create_session import session
from ..custom_nodes import Model, load_model, tensors
from ..errors import RunError
from ..service.datatypes import DATATYPES, datatype_of
from ..tensor_specs import Spec
from .errors import PackError

# Of the two base images, Debian 13 (our service) and Ubuntu 24.04 (Triton), the older version of each.
BASE_IMAGES_HAVE = {"GLIBC": (2, 39), "GLIBCXX": (3, 4, 33)}


@dataclass(frozen=True)
class Contents:
    """A model that can be packed.

    Attributes:
        data: the model's external data files, relative to its folder.
        inputs, outputs: as ONNX Runtime sees them, or as the graph has them where no session opens here.
        size: bytes of the model with its data.
        notes: what the user should know before deploying it.
    """

    model: Path
    data: tuple[Path, ...]
    library: Library | None
    gpu: bool
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    size: int
    custom_nodes: tuple[str, ...]
    notes: list[str] = field(default_factory=list)

    @property
    def library_sha256(self) -> str | None:
        return checksum(self.library.path) if self.library is not None else None


def read_contents(path: Path, library: Path | None, gpu: bool | None, max_batch_size: int) -> Contents:
    """Reads and checks what is to be packed; `gpu` None takes the GPU if the library has code for it.

    Raises:
        ModelError: the model or its data is missing, damaged or elsewhere, or no library fits it.
        LibraryError: the library is not one, built without CUDA, or too new for the base images.
        RunError: ONNX Runtime refuses the model.
        PackError: a type that the protocol has no name for, no batch axis, or what config.pbtxt cannot say.
    """
    model = load_model(path, confined=True)
    data = data_files(model)
    found = only_library(model, library, bodies=False)
    require_fit(model, [found] if found is not None else [])
    gpu = _wants_gpu(gpu, found)
    notes: list[str] = []
    if found is not None:
        require_old_enough(found.path)
    inputs, outputs = _specs(path, model, found, gpu, notes)
    _check_inputs(path, inputs)
    for spec in (*inputs, *outputs):
        _check(spec, max_batch_size, notes)
    sizes = [path.stat().st_size, *((path.parent / each).stat().st_size for each in data)]
    custom = sorted({node.op_type for node in model.nodes})
    return Contents(path, data, found, gpu, inputs, outputs, sum(sizes), tuple(custom), notes)


def data_files(model: Model) -> tuple[Path, ...]:
    """The files with the model's external data, relative to its folder."""
    external = filter(external_data_helper.uses_external_data, tensors(model.proto))
    locations = (external_data_helper.ExternalDataInfo(tensor).location for tensor in external)
    return tuple(sorted(set(map(Path, locations))))


def require_old_enough(path: Path) -> None:
    """Raises LibraryError if the library was linked with a newer C or C++ library than the images have."""
    for name, newest in BASE_IMAGES_HAVE.items():
        needed = needed_version(path, name)
        if needed > newest:
            raise LibraryError(
                f"{path}: needs {name} {_dotted(needed)}, and the images have {_dotted(newest)}: it was "
                "built on a newer system. Build it on Debian 12, Ubuntu 24.04 or older, or in a container"
            )


def needed_version(path: Path, name: str) -> tuple[int, ...]:
    """The newest version of GLIBC or GLIBCXX that a library asks for; the names stand in its string table."""
    found = re.findall(rb"\0" + name.encode() + rb"_(\d+(?:\.\d+)+)(?=\0)", path.read_bytes())
    return max((tuple(map(int, version.split(b"."))) for version in found), default=(0,))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _wants_gpu(asked: bool | None, library: Library | None) -> bool:
    has_code = library is not None and library.cuda_archs not in ("", "none")
    if asked and library is not None and not has_code:
        raise LibraryError(
            f"{library.path} was built without CUDA: on a GPU its nodes would run on the CPU. Build it with "
            "./build.sh where nvcc is on PATH, or pass --cpu"
        )
    return has_code if asked is None else asked


def _specs(
    path: Path, model: Model, library: Library | None, gpu: bool, notes: list[str]
) -> tuple[tuple[Spec, ...], tuple[Spec, ...]]:
    """The inputs and outputs, from a session on the CPU: the same check and shapes as in Triton's backend."""
    try:
        opened = session(path, ["CPUExecutionProvider"], library.path if library is not None else False)
    except RunError as error:
        if not gpu:  # some types have kernels on the GPU only
            raise
        notes.append(f"not opened here, where there is only a CPU: {str(error).splitlines()[0]}")
        return _specs_of_graph(model.proto)
    return tuple(opened.required), tuple(opened.outputs.values())


def _specs_of_graph(proto: onnx.ModelProto) -> tuple[tuple[Spec, ...], tuple[Spec, ...]]:
    """The inputs without a default, and the outputs with the shapes that ONNX infers, as a session does."""
    with suppress(Exception):  # a broken model, which ONNX Runtime refuses where it is opened
        proto = onnx.shape_inference.infer_shapes(proto)
    graph = proto.graph
    defaults = {each.name for each in graph.initializer}
    defaults |= {each.values.name for each in graph.sparse_initializer}
    inputs = tuple(Spec.of_value(each) for each in graph.input if each.name not in defaults)
    return inputs, tuple(Spec.of_value(each) for each in graph.output)


def _check_inputs(path: Path, inputs: Sequence[Spec]) -> None:
    if not inputs:
        raise PackError(
            f"{path}: the model has no input that must be given, and Triton would complete config.pbtxt by "
            "itself. Export it with an input that has no default"
        )
    for spec in inputs:
        if spec.shape is None:
            raise PackError(
                f"input {spec.name} has no declared rank, which config.pbtxt must say (Triton would read one "
                "element of it). Export the model with a shape for it; its sizes may be dynamic"
            )


def _check(spec: Spec, max_batch_size: int, notes: list[str]) -> None:
    datatype = datatype_of(spec.numpy_dtype) if spec.numpy_dtype is not None else None
    if datatype is None:
        raise PackError(
            f"{spec.name} is {spec.type}, which the Open Inference Protocol cannot carry: it has "
            f"{', '.join(DATATYPES)}. Convert it inside the model, with a Cast"
        )
    if datatype == "BF16":
        notes.append(f"{spec.name} is bfloat16, which Triton's ONNX Runtime backend takes from 26.03 on")
    if max_batch_size and (not spec.shape or isinstance(spec.shape[0], int)):
        raise PackError(
            f"--max-batch-size {max_batch_size}: {spec.name} is {spec}, and batching needs a dynamic first "
            "dimension on every input and output. Export it with --dynamic, or leave the option out"
        )
    if spec.shape is not None and len(spec.shape) == bool(max_batch_size):
        ours, theirs = ("[N]", "[N, 1]") if max_batch_size else ("[]", "[1]")
        notes.append(
            f"{spec.name} has shape {ours} in twinop serve and {theirs} in Triton, whose config.pbtxt has no "
            "empty shapes"
        )
