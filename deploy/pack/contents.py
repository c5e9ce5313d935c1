"""Reads and checks what is packed: the model, its data files and its libraries."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from ..service.datatypes import require_servable
from ..tensor_specs import Spec
from .options import Options


@dataclass(frozen=True)
class Contents:
    """A model that can be packed.

    Attributes:
        data: the model's external data files, relative to its folder.
        inputs, outputs: those that clients see.
        custom_nodes: the types of the custom nodes.
        note: what the user should know before deployment, or "".
    """

    model: Path
    data: tuple[Path, ...]
    libraries: tuple[Library, ...]
    gpu: bool
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    custom_nodes: tuple[str, ...]
    note: str

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
        LibraryError: a library is not twinop's, was built without CUDA, or has the file name of another one.
        RunError: ONNX Runtime refuses the model.
    """
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
        paths: list[str | os.PathLike[str]] = [library.path for library in found]
        session(path, ["CPUExecutionProvider"], paths or False)
    except RunError as error:
        if not gpu:  # some types have kernels for GPUs only
            raise
        note = f"not opened here, where there is only a CPU: {str(error).splitlines()[0]}"
    inputs, outputs = _specs(model.proto)
    require_servable(str(path), inputs, outputs, options.max_batch_size > 0)
    custom = sorted({node.proto.op_type for node in model.nodes})
    return Contents(path, data, tuple(found), gpu, inputs, outputs, tuple(custom), note)


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
