"""Load one version of a model. All problems are found here, before the version is served."""

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
from onnx.external_data_helper import uses_external_data

from twinop.errors import LibraryError, TwinopError
from twinop.installation import version_numbers
from twinop.libraries.find import places_of, project_libraries
from twinop.libraries.library import library_folders
from twinop.record.op_spec import DOMAIN
from twinop.system.regular_file import real_path

from ..check_nodes import require_fit
from ..choose_library import allow, choose_libraries
from ..create_session import PROVIDERS, Choice, choose_providers, open_session, with_kernels
from ..cuda import CUDA, has_gpu
from ..custom_nodes import Model, custom_nodes, load_model, tensors
from ..errors import ModelError, ProviderError, RunError
from ..inference_session import Session
from ..registration import SealedLibrary
from ..tensor_specs import Spec
from .datatypes import NAMES, datatype_of, has_rows, require_servable
from .errors import ServiceError
from .folders import VersionFolder
from .instance import Instance, LoadedModel, without_paths
from .settings import ModelSettings, ServerSettings, SettingsError
from .warm_up import compared, joined_differently, make_warmup_inputs, warm_up

_log = logging.getLogger(__name__)

_MOST_OF_BODIES = 2 << 30  # bytes of dense weights
_STAYS_INSIDE = (1, 27)  # from then on ONNX Runtime refuses external data outside of a model's folder
_LEVEL = "graph_optimization_level"
_ENUMS = {_LEVEL: "GraphOptimizationLevel", "execution_mode": "ExecutionMode"}
_GROUPS, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_QUIET = 4  # severity "fatal" only: ONNX Runtime's errors arrive as exceptions


def load(where: VersionFolder, settings: ModelSettings, server: ServerSettings) -> LoadedModel:
    """Find and check the library, open the sessions, warm them up, and compare kernels with function bodies.

    This takes seconds: do not call it on the event loop's thread. It raises no other exceptions than
    TwinopError.
    """
    started = time.monotonic()
    _log.info("model %s version %d: loading %s", where.model, where.version, where.path)
    try:
        loaded = _load(where, settings, server)
    except TwinopError:
        raise
    except MemoryError as error:  # NumPy's says for which shape
        raise ModelError(f"{where.path}: not enough memory to load it: {error}") from error
    except Exception as error:  # a broken model must not end a server that has other models
        _log.exception("model %s version %d: unexpected", where.model, where.version)
        raise ModelError(f"{where.path}: cannot be loaded: {error or type(error).__name__}") from error
    loaded.load_seconds = time.monotonic() - started
    return loaded


def _load(where: VersionFolder, settings: ModelSettings, server: ServerSettings) -> LoadedModel:
    import onnxruntime

    model = load_model(where.path, confined=True)
    is_old = version_numbers(onnxruntime.__version__) < _STAYS_INSIDE
    if is_old and any(map(uses_external_data, tensors(model.proto))):
        raise ProviderError(
            f"{where.path} has external data, and onnxruntime {onnxruntime.__version__} follows links out of "
            "a model's folder: install 1.27 or newer"
        )
    libraries = libraries_for(model, where, settings, server)
    choice, sessions = _open(model, libraries, settings)
    first = sessions[0]
    inputs = _inputs(first, settings)
    outputs = {name: replace(spec, names=NAMES) for name, spec in first.outputs.items()}
    require_servable(model.name, inputs.values(), outputs.values(), settings.max_batch_size > 0)
    for each in sessions:  # what clients may send, in messages with the protocol's names
        each.inputs, each.outputs = inputs, outputs
        each.required = [inputs[spec.name] for spec in each.required]

    ops = Counter(node.proto.op_type for node in model.nodes)
    loops = custom_nodes(model.proto, lambda node: node.op_type in ("Loop", "Scan", "SequenceMap"))
    shared = sessions if len(sessions) > 1 else sessions * settings.instances
    loaded = LoadedModel(
        where.model,
        where.version,
        settings,
        first,
        [Instance(session) for session in shared],
        [f"{op} x{count}" for op, count in sorted(ops.items())],
        may_run_on_loop=first.device == "cpu" and not ops and not any(loops),
    )
    _try(model, loaded, choice, len(sessions))
    # Warn: the user may expect the GPU to be used.
    unused = first.device == "cpu" and settings.provider == "auto" and has_gpu()
    level = logging.WARNING if unused else logging.INFO
    _log.log(level, "model %s version %d %s", where.model, where.version, loaded.summary())
    return loaded


def libraries_for(
    model: Model, where: VersionFolder, settings: ModelSettings, server: ServerSettings
) -> list[SealedLibrary]:
    """Return the checked libraries that the model needs, one for each domain of its custom nodes."""
    if not model.nodes:
        return []
    own = [where.folder, *([where.model_folder] if where.model_folder is not None else [])]
    # `build/` of this folder is not taken from where models are served, or a link leads there: whoever can
    # add models could put libraries there.
    build = Path.cwd() / "build"
    served = () if where.root.is_file() else (where.root, *where.root.iterdir(), *own)
    above = {build, *build.parents, real_path(build), *real_path(build).parents}
    project = [] if above.intersection(real_path(each) for each in served) else project_libraries()

    def places(domain: str) -> list[Path]:
        found = [place for place in places_of(domain) if place.parent != build]
        return [*server.library_folders, *(project if domain != DOMAIN else ()), *found]

    permitted = [*server.library_folders, *library_folders(), *project]
    permitted += own if server.allow_model_libraries else []
    trusted = {real_path(place) for place in permitted}
    for path in settings.library:
        if not os.path.isfile(path):
            raise LibraryError(f"{path}: no such library. Put it there, or correct the setting `library`")
        target = real_path(path)
        inside = real_path(path.parent) in trusted and any(target.is_relative_to(each) for each in trusted)
        if target not in trusted and not inside:
            raise LibraryError(
                f"{path}: a library can do all that the server can, so libraries are loaded only from "
                f"{', '.join(map(str, sorted(trusted)))}, and this one is in {target.parent}. If you trust "
                f"all who can write there, start with --library-folder {target.parent}. To trust all models' "
                f"own folders: {allow()}"
            )
    libraries = choose_libraries(
        model,
        settings.library,
        others=places,
        own=own,
        allow_model_libraries=server.allow_model_libraries,
        confined=True,
        bodies=False,
    )
    require_fit(model, libraries, bodies=False)
    allowed = [each.lower() for each in settings.library_sha256]
    for library in libraries if allowed else ():
        if (found := library.copy.sha256) not in allowed:
            raise LibraryError(
                f"{library.path}: its SHA-256 is {found}, but library_sha256 is {', '.join(allowed)}: it is "
                "not the expected library. Restore that one, or correct the setting"
            )
    return libraries


# ------------------------------------------------------------------------------------------------ sessions


def _open(
    model: Model, libraries: Sequence[SealedLibrary], settings: ModelSettings
) -> tuple[Choice, list[Session]]:
    """Open a session for each instance on CUDA, so that each has a stream; on the CPU all share one."""
    choice = choose_providers(PROVIDERS[settings.provider], libraries, uses_torch=False)
    with_kernels(model, libraries, choice, bodies=False)
    if settings.provider_options and choice.device is not None:
        options = {name: _text(value) for name, value in settings.provider_options["cuda"].items()}
        device = int(options.get("device_id", choice.device))
        choice = replace(choice, providers=[(CUDA, options), *choice.providers[1:]], device=device)

    def opened() -> Session:
        may_retry = _LEVEL not in settings.session
        return open_session(model, libraries, choice, options=_options(settings), may_retry=may_retry)

    first = opened()
    more = settings.instances - 1 if first.device != "cpu" else 0
    return choice, [first, *(opened() for _ in range(more))]


def _options(settings: ModelSettings) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _QUIET
    # A pool for each model: the one that models can share (use_per_session_threads = False) always spins,
    # because Python's set_global_thread_pool_sizes has no switch for that.
    options.intra_op_num_threads = settings.intra_op_threads or quota()
    # Spinning threads take cores from the event loop and from other models, and gain nothing here.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    for name, value in settings.session.items():
        try:
            if "." in name:
                options.add_session_config_entry(name, _text(value))
                continue
            enum = getattr(onnxruntime, _ENUMS[name]) if name in _ENUMS else None
            setattr(options, name, getattr(enum, str(value)) if enum is not None else value)
        except Exception as error:  # which depend on its version
            raise SettingsError(
                f"session: onnxruntime.SessionOptions does not take {name} = {value!r}: {error}"
            ) from error
    return options


def _text(value: Any) -> str:
    """Return a value as ONNX Runtime takes it."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def quota() -> int:
    """Return the cores that the control group allows, which ONNX Runtime does not see; 0 for no limit."""
    with suppress(OSError, ValueError):  # none of version 2, or "max"
        folder = _GROUPS / _OWN_GROUP.read_text().strip().rpartition("::/")[2]
        most, period = map(int, (folder / "cpu.max").read_text().split())
        allowed = max(math.ceil(most / period), 1)
        return allowed if allowed < len(os.sched_getaffinity(0)) else 0
    return 0


def body_bytes(model: Model) -> int:
    """Return what the function bodies of a model make dense of its weights, copies included.

    Measured with a weight of 4 bits, of 32,768 x 4,096: 6.1 GB, so 90 bytes for one of the file's.
    """
    half = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    read = {name for node in model.nodes for name in node.proto.input}
    large = [each for each in model.proto.graph.initializer if each.name in read and len(each.dims) > 1]
    return sum(math.prod(each.dims) * (16 if each.data_type in half else 90) for each in large)


def _try(model: Model, loaded: LoadedModel, choice: Choice, sessions: int) -> None:
    """Run the model for the first time; raise ModelError if that fails, or kernels and bodies disagree."""
    session, settings = loaded.session, loaded.settings
    warmup = make_warmup_inputs(session.inputs, session.required, settings)
    if warmup is None:
        _log.warning("%s: not warmed up: the rank of an input is unknown, set warm_up", model.name)
        return
    outputs = list(session.outputs)
    found = warm_up(model.name, loaded, loaded.instances[:sessions], warmup)
    if isinstance(found, str):
        _log.warning("%s was not warmed up, set warm_up: %s", model.name, found)
        return
    if settings.max_batch_size > 1:
        why = joined_differently(loaded.instances[0], warmup, outputs, session.device)
        loaded.rows_independent = not why
        if why:
            _log.warning(
                "%s: its rows depend on each other, so requests are not batched: %s. Set max_batch_size to 0",
                model.name, why,
            )  # fmt: skip
    comparable = bool(model.nodes) and {node.node_type for node in model.nodes} <= model.bodies
    if not session.libraries or not comparable or not settings.compare_bodies:
        return
    if (needed := body_bytes(model)) > _MOST_OF_BODIES:
        loaded.difference = f"not compared: the function bodies take about {needed / 1e9:.3g} GB of memory"
        return
    try:
        bodies = Instance(open_session(model, [], choice, options=_options(settings)))
        loaded.difference = compared(model.name, warmup, found, bodies, session.device)
    except (RunError, ServiceError) as error:  # such as an operator that has a kernel on GPUs only
        loaded.difference = f"not compared: the function bodies do not run: {without_paths(str(error))}"
        _log.info("%s: its function bodies do not run: %s", model.name, error)


# ------------------------------------------------------------------------------------------------ interface


def _inputs(session: Session, settings: ModelSettings) -> dict[str, Spec]:
    """Return the inputs that clients may send: those with a default only if the protocol can carry them."""
    required = {spec.name: spec for spec in session.required}
    return {
        name: replace(spec, names=NAMES)
        for name, spec in (required | session.inputs).items()
        if name in required
        or (datatype_of(spec.numpy_dtype) and (not settings.max_batch_size or has_rows(spec)))
    }
