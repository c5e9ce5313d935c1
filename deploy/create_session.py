"""Creates sessions: model and library checked, the library registered, the provider proven to be there."""

import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinop.deploy import cuda
from twinop.deploy.check_nodes import Libraries, library_paths, require_fit
from twinop.deploy.choose_library import choose_libraries
from twinop.deploy.custom_nodes import Model, ModelSource, load_model
from twinop.deploy.errors import ProviderError, RunError
from twinop.deploy.inference_session import Session
from twinop.deploy.node_providers import Profile
from twinop.deploy.registration import register
from twinop.errors import LibraryError
from twinop.library import Library
from twinop.record import DOMAIN

_OLDEST = (1, 18)  # what the libraries' C side needs
_CPU = "CPUExecutionProvider"
_DATA_FOLDER = "session.model_external_initializers_file_folder_path"
Provider = str | tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Choice:
    """The providers to ask ONNX Runtime for, the CUDA device or None, and why.

    `automatic`: nobody asked for them, so that a session may come out on another one.
    """

    providers: list[Provider]
    device: int | None
    reason: str
    automatic: bool


def session(
    model: ModelSource,
    providers: Sequence[Provider] | None = None,
    library: Libraries | bool = None,
    *,
    session_options: Any = None,
    enable_cuda_graph: bool = False,
    profile: bool = False,
    folder: str | os.PathLike[str] | None = None,
) -> Session:
    """Opens a model for running, with the custom-op libraries that it needs.

    Args:
        model: a path, the bytes of a model, or a ModelProto.
        providers: execution providers as ONNX Runtime takes them, names or (name, options). None takes CUDA
            where it works, else the CPU; `Session.reason` says why. One asked for is used, or an error.
        library: the path of a library, or several paths, one for each domain. The libraries of other
            domains are looked for beside the model, then where the built or installed ones are. False
            registers none: the model's function bodies run, or ops that `session_options` has.
        session_options: an `onnxruntime.SessionOptions` to start from. The library is registered on it, so it
            serves one call.
        enable_cuda_graph: capture the run, once per combination of input shapes, and replay it (CUDA, torch
            tensors).
        profile: record which provider runs each node, for `Session.executed_on`.
        folder: where external data lies, if the model is not given as a path.

    Raises:
        ModelError: the model is damaged, or its custom nodes do not fit the library.
        LibraryError: a library is missing, damaged, not the one that the model needs, or there already.
        ReplacedLibraryError: its file was replaced after this process loaded it.
        ProviderError: ONNX Runtime is missing or too old, or a provider asked for cannot be used.
        RunError: ONNX Runtime refuses the model for another reason.
    """
    loaded = load_model(model, Path(folder) if folder is not None else None)
    found = _libraries(loaded, library)
    require_fit(loaded, found)
    choice = choose_providers(providers, found)
    if choice.automatic and choice.device is None and cuda.has_gpu():  # somebody may be waiting for it
        _warn_of_cpu(choice.reason)
    opened = open_session(
        loaded, found, choice, options=session_options, enable_cuda_graph=enable_cuda_graph, profile=profile
    )
    if choice.device is not None and opened.device == "cpu":
        _warn_of_cpu(opened.reason)
    return opened


def open_session(
    model: Model,
    libraries: Sequence[Library],
    choice: Choice,
    *,
    options: Any = None,
    enable_cuda_graph: bool = False,
    profile: bool = False,
) -> Session:
    """`session` for a model that is read and checked, without its warnings: `Session.reason` has them.

    Raises:
        TwinopError: as `session` does.
    """
    device, reason = choice.device, choice.reason
    if enable_cuda_graph and device is None:
        raise ProviderError(f"enable_cuda_graph needs CUDA, which is not used here: {reason}")
    ort = _onnxruntime()

    options = options if options is not None else ort.SessionOptions()
    if model.path is None and model.folder is not None:
        options.add_session_config_entry(_DATA_FOLDER, str(model.folder))
    record = Profile(options, {node.op_type for node in model.nodes}) if profile else None
    checksums = [register(options, library) for library in libraries]
    stream = _torch_stream(device) if device is not None else None
    requested = [_with_cuda_options(each, stream, enable_cuda_graph) for each in choice.providers]

    with _current_device_kept(stream):
        inner = _create(ort, model, options, requested)
    if choice.automatic and device is not None and cuda.CUDA not in inner.get_providers():
        reason = "ONNX Runtime could not start CUDA (its log above says why)"
        device = stream = None
    for name in () if choice.automatic else map(_name, requested):
        if name not in inner.get_providers():
            raise ProviderError(
                f"{name} was asked for, but ONNX Runtime could not start it (its log above says why) and "
                f"would use {', '.join(inner.get_providers())} instead. Nothing was run"
            )
    return Session(
        inner,
        model,
        libraries=libraries,
        checksums=checksums,
        device=device,
        reason=reason,
        stream=stream,
        cuda_graph=enable_cuda_graph and device is not None,
        profile=record,
    )


def _warn_of_cpu(reason: str) -> None:
    warnings.warn(f"the CPU is used, not the GPU: {reason}", RuntimeWarning, stacklevel=3)


def _libraries(model: Model, library: Libraries | bool) -> list[Library]:
    if library is False:
        return []
    if library is True:
        raise LibraryError("library=True: pass a path, None to look for the library, or False for none")
    found = choose_libraries(model, library_paths(library))
    domains = {node.domain for node in model.nodes} - {each.domain for each in found}
    if domains:
        of = "" if domains == {DOMAIN} else f" for {', '.join(sorted(domains))}"
        warnings.warn(
            f"{model.name}: no custom-op library found{of}, so its function bodies run instead, which is "
            "slower. library=False says that this is meant",
            RuntimeWarning,
            stacklevel=3,
        )
    return found


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise ProviderError(
            f"ONNX Runtime cannot be imported ({error}). pip install onnxruntime, or onnxruntime-gpu for CUDA"
        ) from error
    version = onnxruntime.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ProviderError(
            f"onnxruntime {version} is too old, custom ops need 1.18 or newer. "
            "pip install 'onnxruntime>=1.18' (or onnxruntime-gpu)"
        )
    return onnxruntime


def _name(provider: Provider) -> str:
    return provider if isinstance(provider, str) else provider[0]


def choose_providers(providers: Sequence[Provider] | None, libraries: Sequence[Library]) -> Choice:
    """What to ask for: `providers` if they can be used; for None CUDA where it works, else the CPU.

    Raises:
        ProviderError: ONNX Runtime is missing or too old, or a provider asked for cannot be used.
    """
    if isinstance(providers, str):
        providers = [providers]
    if (providers is None or cuda.CUDA in map(_name, providers)) and cuda.driver_version() is not None:
        cuda.import_torch()
    available = _onnxruntime().get_available_providers()
    if providers is None:
        if found := cuda.obstacles(0, libraries):
            # The one that comes first: without a GPU, the wheel is as it should be.
            return Choice([_CPU], None, found[0], automatic=True)
        return Choice([cuda.CUDA, _CPU], 0, "CUDA works here", automatic=True)
    device = None
    for provider in providers:
        name, options = (provider, {}) if isinstance(provider, str) else provider
        if name == cuda.CUDA:
            device = int(options.get("device_id", 0))
            if found := cuda.obstacles(device, libraries):
                lines = "".join(f"\n  - {text}" for text in found)
                raise ProviderError(
                    f"{name} was asked for and cannot be used here (the CPU was not used instead):{lines}"
                )
        elif name not in available:
            raise ProviderError(f"{name} is not in this ONNX Runtime; it has: {', '.join(available)}")
    return Choice(list(providers), device, "asked for", automatic=False)


def _torch_stream(device: int) -> Any:
    """The session's stream, to be ordered against torch's; None without a torch that has CUDA."""
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.Stream(device) if torch.cuda.is_available() else None


def _current_device_kept(stream: Any) -> AbstractContextManager[Any]:
    """ONNX Runtime leaves its own GPU current in this thread; the caller's comes back."""
    if stream is None:
        return nullcontext()
    import torch

    return torch.cuda.device(torch.cuda.current_device())


def _with_cuda_options(provider: Provider, stream: Any, cuda_graph: bool) -> Provider:
    if _name(provider) != cuda.CUDA:
        return provider
    options = dict(provider[1]) if not isinstance(provider, str) else {}
    if stream is not None:
        if "user_compute_stream" in options:
            raise ProviderError("user_compute_stream is the session's own: order work by Session.stream")
        options["user_compute_stream"] = str(stream.cuda_stream)
    if cuda_graph:
        options["enable_cuda_graph"] = "1"
    return cuda.CUDA, options


def _create(ort: Any, model: Model, options: Any, providers: list[Provider]) -> Any:
    source = str(model.path) if model.path is not None else model.data
    try:
        # Without its fallback: that would retry on the CPU, and only print so.
        return ort.InferenceSession(source, options, providers=providers, enable_fallback=0)
    except Exception as error:
        if "Domain already set" in str(error):
            raise LibraryError(
                "these session options have a custom-op library already, and ONNX Runtime takes one per "
                "domain and session. Pass fresh options each time, or library=False to use what they have"
            ) from error
        raise RunError(f"{model.name}: ONNX Runtime refuses it: {error}") from error
