"""Creates sessions: checks model and library, registers the library, requires the provider to be active."""

import importlib.util
import math
import os
import re
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from twinop.errors import LibraryError, TwinopWarning, option
from twinop.installation import version_numbers
from twinop.libraries.find import package_key
from twinop.libraries.library import Library
from twinop.system.memory import free_bytes

from . import cuda
from .check_nodes import require_fit
from .choose_library import NO_BODIES, Libraries, choose_libraries
from .custom_nodes import Model, ModelSource, custom_nodes, is_custom, load_model
from .errors import ModelError, ProviderError, RunError
from .inference_session import Session
from .registration import SealedLibrary, register

_OLDEST = (1, 20)  # it takes bfloat16 from Python; the libraries need the C API of 1.18
_CPU = "CPUExecutionProvider"
PROVIDERS: dict[str, "list[Provider] | None"] = {"auto": None, "cpu": [_CPU], "cuda": [cuda.CUDA, _CPU]}
_WITHOUT = "optimization.disable_specified_optimizers"
_DATA_FOLDER = "session.model_external_initializers_file_folder_path"
Provider = str | tuple[str, dict[str, Any]]
_SMALL = 1 << 30  # bytes that are not worth a look at what is free
_HALF = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_PACK = ("Gemm", "MatMul", "MatMulNBits")
_LOOK_UP = "CustomEmbedLayerNorm"


@dataclass(frozen=True)
class Choice:
    """The providers to request from ONNX Runtime, and why."""

    providers: list[Provider]
    device: int | None  # of CUDA
    reason: str
    automatic: bool  # the caller named none, so a session may run on another one
    uses_torch: bool = True  # a session works on a stream of torch's and takes its tensors


def session(
    model: ModelSource | Model,
    providers: Sequence[Provider] | None = None,
    library: Libraries | bool = None,
    *,
    session_options: Any = None,
    enable_cuda_graph: bool = False,
    profile: bool = False,
    folder: str | os.PathLike[str] | None = None,
    allow_model_libraries: bool = False,
) -> Session:
    """Opens a model with the custom-op libraries that it needs.

    Args:
        model: a path, the bytes of a model, a ModelProto, or what `load_model` has read.
        providers: execution providers as ONNX Runtime takes them: names, or pairs of a name and options. A
            provider named here is used, or an error is raised. None chooses CUDA where it works and the CPU
            otherwise; `Session.reason` says why.
        library: the path of a library, or several paths, one for each domain. The libraries of other domains
            are looked for among those that `twinop build` put into `build/` of the current folder, in the
            installed package of the domain (`twinop.libraries.find`), and among twinop's own. False registers
            none: the model's function bodies run, or ops that are registered on `session_options`.
        session_options: an `onnxruntime.SessionOptions` to start from. The library is registered on it, so
            that it can be used for one call only.
        enable_cuda_graph: whether to capture the run once per combination of input shapes and of places of
            written inputs (`Session.run`), and to replay it. This needs CUDA and torch tensors.
        profile: whether to record which provider runs each node, for `Session.executed_on`.
        folder: the folder of external data, if `model` is not a path.
        allow_model_libraries: whether to take libraries from the model's own folder, first. Whoever can write
            there can then run code in this process. Otherwise a library there is an error.

    Raises:
        ModelError: the model is damaged, or its custom nodes do not fit the library.
        LibraryError: a library is missing, damaged, not the one that the model needs, or already registered.
        ProviderError: ONNX Runtime is missing or too old, or a named provider cannot be used.
        RunError: ONNX Runtime refuses the model for another reason.
    """
    if isinstance(model, Model):
        loaded = model
    else:
        loaded = load_model(model, Path(folder) if folder is not None else None)
    found = _libraries(loaded, library, allow_model_libraries)
    require_fit(loaded, found)
    choice = choose_providers(providers, found)
    found = with_kernels(loaded, found, choice)
    opened = open_session(
        loaded, found, choice, options=session_options, enable_cuda_graph=enable_cuda_graph, profile=profile
    )
    if opened.device == "cpu" and choice.automatic and cuda.has_gpu():
        warnings.warn(f"the CPU is used, not the GPU: {opened.reason}", TwinopWarning, stacklevel=2)
    return opened


def open_session(
    model: Model,
    libraries: Sequence[SealedLibrary],
    choice: Choice,
    *,
    options: Any = None,
    may_retry: bool = False,
    enable_cuda_graph: bool = False,
    profile: bool = False,
) -> Session:
    """Opens a model that has been read and checked; errors as of `session`, warnings in `Session.reason`.

    `may_retry`: whether to try again without ONNX Runtime's own optimizations, with `options` too.
    """
    device, reason = choice.device, choice.reason
    if enable_cuda_graph:
        _require_known_sizes(model, libraries)
    if enable_cuda_graph and device is None:
        raise ProviderError(f"enable_cuda_graph needs CUDA, which is not used here: {reason}")
    ort = _onnxruntime()

    given = options is not None and not may_retry
    options = options or ort.SessionOptions()
    if model.path is None and model.folder is not None:
        options.add_session_config_entry(_DATA_FOLDER, str(model.folder))
    folder = tempfile.TemporaryDirectory(prefix="twinop-profile-") if profile else None
    if folder is not None:
        options.enable_profiling, options.profile_file_prefix = True, f"{folder.name}/ort"
    for library in libraries:
        register(options, library)
    stream, on_callers_device = _torch_stream(device if choice.uses_torch else None)
    requested = [_with_cuda_options(each, stream, enable_cuda_graph) for each in choice.providers]

    if choice.providers == [_CPU]:
        require_memory(model, libraries)
        if not given and _may_crash(model.proto):
            options.add_session_config_entry(_WITHOUT, "MatmulTransposeFusion")
    with on_callers_device:  # ONNX Runtime makes its own the current one
        inner = _create(ort, model, options, requested, given)
    if choice.automatic and device is not None and cuda.CUDA not in inner.get_providers():
        reason = "ONNX Runtime could not start CUDA (its log above says why)"
        device = stream = None
    for name, _ in map(_split, requested):
        if not choice.automatic and name not in inner.get_providers():
            raise ProviderError(
                f"{name} was asked for, but ONNX Runtime could not start it (its log above says why) and "
                f"would use {', '.join(inner.get_providers())} instead. Nothing was run"
            )
    return Session(
        inner,
        model,
        libraries=libraries,
        device=device,
        reason=reason,
        stream=stream,
        cuda_graph=enable_cuda_graph and device is not None,
        profile=folder,
    )


def _require_known_sizes(model: Model, libraries: Sequence[SealedLibrary]) -> None:
    """Refuses nodes that wait for the GPU to know the sizes of their outputs."""
    records = {record.node_type: record for library in libraries for record in library.by_onnx_name.values()}
    for node in model.nodes:
        if (record := records.get(node.node_type)) and record.sizes:
            raise ModelError(
                f"{node.label}: its output shapes are data-dependent, so a run synchronizes with the GPU, "
                "which a CUDA graph cannot capture. Open the session without enable_cuda_graph"
            )


def _libraries(model: Model, library: Libraries | bool, allow: bool) -> list[SealedLibrary]:
    if library is False:
        return []
    if library is True:
        raise LibraryError("library=True: pass a path, None to look for the library, or False for none")
    found = choose_libraries(model, library, allow_model_libraries=allow)
    domains = {node.proto.domain for node in model.nodes} - {each.domain for each in found}
    if domains:
        packages = " ".join(filter(None, (model.metadata.get(package_key(each)) for each in sorted(domains))))
        install = f"pip install {packages}, or " if packages else ""
        warnings.warn(
            f"{model.name}: no custom-op library found for {', '.join(sorted(domains))}, so its function "
            f"bodies run instead, which is slower: {install}name the library ({option('library')})",
            TwinopWarning,
            stacklevel=3,
        )
    return found


def with_kernels(
    model: Model, libraries: Sequence[SealedLibrary], choice: Choice, bodies: bool = True
) -> list[SealedLibrary]:
    """Leaves out libraries that lack a CPU kernel that the session needs, with a warning: bodies run instead.

    RunError: the model does not have these function bodies, or they may not run (`bodies`).
    """
    if choice.device is not None:
        return [*libraries]
    kept = []
    for library in libraries:
        needed = {node.proto.op_type for node in model.nodes if node.proto.domain == library.domain}
        records = [library.by_onnx_name[op] for op in sorted(needed) if op in library.by_onnx_name]
        lacking = [each.onnx_name for each in records if "cpu" not in each.devices]
        text = f"{model.name}: {library.path} has no CPU kernel of {', '.join(lacking)}"
        if not lacking:
            kept.append(library)
        elif bodies and {(library.domain, op) for op in needed} <= model.bodies:
            said = f"{text}, so the function bodies of {library.domain} run instead, which is slower"
            warnings.warn(said, TwinopWarning, stacklevel=3)
        else:
            why = "the model lacks function bodies" if bodies else NO_BODIES
            raise RunError(
                f"{text}, and {why}. Run it on a GPU, or give the op a CPU kernel", "NotImplemented"
            )
    return kept


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise ProviderError(
            f"ONNX Runtime cannot be imported ({error}). pip install onnxruntime, or onnxruntime-gpu for CUDA"
        ) from error
    if version_numbers(onnxruntime.__version__) < _OLDEST:
        raise ProviderError(
            f"onnxruntime {onnxruntime.__version__} is too old: twinop.deploy needs 1.20 or newer. "
            "pip install 'onnxruntime>=1.20' (or onnxruntime-gpu)"
        )
    return onnxruntime


def _split(provider: Provider) -> tuple[str, dict[str, Any]]:
    return (provider, {}) if isinstance(provider, str) else provider


def choose_providers(
    providers: Sequence[Provider] | None, libraries: Sequence[Library], *, uses_torch: bool = True
) -> Choice:
    """Returns `providers` if they can be used; for None, CUDA where it works and the CPU otherwise.

    If sessions take torch tensors (`uses_torch`), torch is imported, where it is installed, and ONNX Runtime
    uses its CUDA libraries; otherwise those of pip's nvidia packages. ProviderError: as of `session`.
    """
    if isinstance(providers, str):
        providers = [providers]
    wants_cuda = providers is None or cuda.CUDA in dict(map(_split, providers))
    if uses_torch and wants_cuda and cuda.driver_version() is not None:
        cuda.import_torch()
    available = _onnxruntime().get_available_providers()
    if providers is None:
        if found := cuda.unavailable_reasons(0, libraries):
            # Only the first: without a GPU, the wheel for the CPU is the right one.
            return Choice([_CPU], None, found[0], True, uses_torch)
        return Choice([cuda.CUDA, _CPU], 0, "CUDA works here", True, uses_torch)
    device = None
    for provider in providers:
        name, options = _split(provider)
        if name == cuda.CUDA:
            device = int(options.get("device_id", 0))
            if found := cuda.unavailable_reasons(device, libraries):
                lines = "".join(f"\n  - {text}" for text in found)
                raise ProviderError(
                    f"{name} was asked for and cannot be used here (the CPU was not used instead):{lines}"
                )
        elif name not in available:
            raise ProviderError(f"{name} is not in this ONNX Runtime; it has: {', '.join(available)}")
    return Choice(list(providers), device, "asked for", False, uses_torch)


def _torch_stream(device: int | None) -> tuple[Any, AbstractContextManager[Any]]:
    """Makes the session's stream, which is ordered with torch's, and what restores the current GPU."""
    if device is not None and importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return torch.cuda.Stream(device), torch.cuda.device(torch.cuda.current_device())
    return None, nullcontext()


def _with_cuda_options(provider: Provider, stream: Any, cuda_graph: bool) -> Provider:
    name, given = _split(provider)
    if name != cuda.CUDA:
        return provider
    options = dict(given)
    if stream is not None:
        if "user_compute_stream" in options:
            raise ProviderError("user_compute_stream is the session's own: order work by Session.stream")
        options["user_compute_stream"] = str(stream.cuda_stream)
    if cuda_graph:
        options["enable_cuda_graph"] = "1"
    return cuda.CUDA, options


def _create(ort: Any, model: Model, options: Any, providers: list[Provider], given: bool) -> Any:
    source = model.data if model.path is None else str(model.path)
    try:
        # The fallback would retry on the CPU and only print a message.
        return ort.InferenceSession(source, options, providers=providers, enable_fallback=0)
    except Exception as error:
        said = str(error).partition(", inferred types:")[0]  # a list of all types
        inner = None
        with suppress(Exception):
            plain = None if given else plain_options(options)
            inner = plain and ort.InferenceSession(source, plain, providers=providers, enable_fallback=0)
        if inner is not None:
            why = without_optimizations("fails", said)
            warnings.warn(f"{model.name}: {why}", TwinopWarning, stacklevel=4)
            return inner
        kernel = r" : Could not find an implementation for (\S+)\(\d+\) node with name (.*)"
        if providers == [_CPU] and (found := re.search(kernel, said)):
            said = (
                f"it has no CPU kernel for {found[1]} with the types of node {found[2]}. Run it on a GPU, or "
                "convert a file in 16 bits: twinop optimize --dtype float32"
            )
        if where := [node.label for node in model.nodes if " in function " in node.label]:
            said += (
                f". It infers few types in functions, and {where[0]} is in one: twinop.export.attach_bodies "
                "puts such functions into the graph"
            )
        if given and model.nodes:
            said += ". Session options that have a library already need library=False"
        raise RunError(f"{model.name}: ONNX Runtime refuses it: {said}", type(error).__name__) from error


def _may_crash(proto: onnx.ModelProto) -> bool:
    """Returns whether ONNX Runtime 1.24 to 1.31 may end the process while it fuses Transpose and MatMul: a
    Cast is between them, or the file has 16 bits, where it inserts some (microsoft/onnxruntime #28392)."""
    nodes = [each.proto for each in custom_nodes(proto, lambda node: True)]
    dtypes = {each.i for node in nodes if node.op_type == "Cast" for each in node.attribute}
    dtypes |= {value.type.tensor_type.elem_type for value in proto.graph.input}
    dtypes |= {tensor.data_type for tensor in proto.graph.initializer}
    moved = {name for node in nodes if node.op_type == "Transpose" for name in node.output}
    cast, formal = set[str](), {(each.domain, each.name): each.input for each in proto.functions}
    for node in nodes:  # those of functions come last
        for names in (moved, cast):
            pairs = zip(formal.get((node.domain, node.op_type), ()), node.input, strict=False)
            names.update(name for name, given in pairs if given in names)
        if node.op_type in ("Cast", "CastLike", "Identity") and not {*node.input[:1]}.isdisjoint(
            moved | cast
        ):
            cast.update(node.output)
        elif node.op_type in ("FusedMatMul", "MatMul") and not cast.isdisjoint(node.input):
            return True
    return not dtypes.isdisjoint(_HALF)


def plain_options(options: Any = None) -> Any:
    """Returns options of a session without ONNX Runtime's own optimizations."""
    ort = _onnxruntime()
    options = options or ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def without_optimizations(what: str, error: object = "") -> str:
    """Returns the note on a valid model that ONNX Runtime breaks when it optimizes it."""
    return (
        f"ONNX Runtime {_onnxruntime().__version__} {what} when it optimizes this model, so it ran without "
        "these optimizations. Where you run it, set graph_optimization_level to ORT_DISABLE_ALL"
        f"{f' ({error})' if error else ''}"
    )


def cpu_bytes(model: Model) -> int:
    """Returns what matmuls on the CPU pack of integer and fp32 weights, and of 16-bit ones, in fp32."""
    nodes = custom_nodes(
        model.proto, lambda node: node.op_type in _PACK or (is_custom(node) and node.op_type != _LOOK_UP)
    )
    read = {name for node in nodes for name in node.proto.input}
    weights = [each for each in model.proto.graph.initializer if len(each.dims) > 1 and each.name in read]
    return sum(math.prod(each.dims) * (4 if each.data_type in _HALF else _size(each)) for each in weights)


def require_memory(model: Model, libraries: Sequence[Library]) -> None:
    """Raises ModelError if a model takes more on the CPU than is free."""
    needed = cpu_bytes(model)
    if needed <= _SMALL or needed <= (free := free_bytes()):
        return
    cure = "Run it on a GPU or on a machine with more"
    if libraries and model.nodes:
        cure += ", or optimise the original for the CPU: twinop optimize --device cpu"
    raise ModelError(
        f"{model.name} takes about {needed / 1e9:.3g} GB of memory on the CPU, where matmuls repack their "
        f"weights (16-bit ones as fp32), and {free / 1e9:.3g} GB are free. {cure}"
    )


def _size(tensor: onnx.TensorProto) -> int:
    if tensor.data_type not in onnx.helper.get_all_tensor_dtypes():
        return 0  # ONNX Runtime says that it does not know it
    return int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
