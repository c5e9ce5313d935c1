"""Runs models in ONNX Runtime on the CPU, in another process, so that results can be compared."""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from twinop.errors import ExportError, TwinopError, option
from twinop.libraries.library import Library
from twinop.record.dtypes import to_array

from . import registration
from .choose_library import Libraries
from .create_session import plain_options, without_optimizations
from .create_session import session as open_session
from .custom_nodes import Model, load_model
from .errors import RunError
from .ort_process import SERVER, Endless, OrtCrash
from .tensor_specs import to_ort_value

_PACKED = {"float4_e2m1fn", "int2", "int4", "uint2", "uint4"}
"""Elements of less than a byte."""


@dataclass(frozen=True)
class Parts:
    """A model in memory without its large weights, which the process that runs it reads.

    `graph` has the bytes of the model, whose large initializers are external data without a file. `weights`
    has these by name: arrays, or what `numpy()` makes one of, such as a place in a file. They are sent to the
    other process, so such an object is small there.
    """

    graph: bytes
    weights: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Earlier:
    """In the place of an input: an output of the case of that index in the same call, such as a cache."""

    case: int
    output: str


@dataclass(frozen=True)
class Answer:
    """What ONNX Runtime made of a model."""

    libraries: Sequence[Library]  # those that were registered
    outputs: list[list[Any]]  # of each case, as numpy arrays in the model's order; none of one that failed
    note: str = ""  # what a user should know about the runs
    failed: Mapping[int, str] = field(default_factory=dict)  # why cases have no outputs, by index


_loaded = set[str]()  # SHA-256 of libraries that a model has run with: the next process need not try them


class NotRunnable(Exception):
    """ONNX Runtime cannot run the model on this machine's CPU; the model itself may be right."""


def run(
    model: Path | bytes | Parts,
    library: Libraries | bool,
    cases: Sequence[Mapping[str, Any]] = (),
    *,
    optimize: bool = True,
    prepack: bool = True,
    required: float = inf,
    may_skip: bool = False,
) -> Answer:
    """Runs a model on the CPU provider in another process, so that a crash of ONNX Runtime is reported.

    Args:
        library: as in `deploy.session`.
        cases: the inputs of each run: tensors, arrays, or outputs of cases before (`Earlier`). Inputs that
            the model does not have are ignored: an exporter removes those that it finds to be unused.
        optimize: whether ONNX Runtime may run its own graph optimizations.
        prepack: whether kernels may keep a copy of their weights in a layout of their own.
        required: how many of the cases must run; others that fail, or do not end, have no outputs.
        may_skip: where ONNX Runtime refuses the model or a run with its graph optimizations only, run it
            without them; `Answer.note` says so. After a crash in an optimization that is always done.

    NotRunnable: an operator of the model has no kernel there, or ONNX Runtime crashes. ExportError: it
    refuses the model or a run for another reason. TwinopError: the library is missing, damaged, or not the
    one that the model needs. Endless: the model does not come to an end (`ort_process.time_limit`).
    """
    arrays = [
        {name: each if isinstance(each, Earlier) else to_array(each) for name, each in case.items()}
        for case in cases
    ]
    name, note = f"ONNX Runtime {ort.__version__}", ""

    def attempt(optimize: bool) -> list[Any]:
        try:
            return SERVER.run(_runs, model, library, arrays, optimize, prepack, required, frozenset(_loaded))
        except Endless as error:
            if not required < len(error.answers) <= len(arrays):  # the first answer is the libraries
                raise
            return error.answers + [str(error)] * (1 + len(arrays) - len(error.answers))

    try:
        try:
            (libraries, loaded), *outputs = attempt(optimize)
        except OrtCrash as crash:
            (libraries, loaded), *outputs = attempt(False)
            note = without_optimizations(f"crashes ({crash})")
        except (ExportError, RunError) as error:
            if not (optimize and may_skip):
                raise
            try:
                (libraries, loaded), *outputs = attempt(False)
            except (TwinopError, OrtCrash, Endless):
                raise error from None
            note = without_optimizations("fails", str(error).splitlines()[0])
    except OrtCrash as crash:
        raise NotRunnable(f"{name} crashes ({crash}) on this model on the CPU") from crash
    except RunError as error:
        if error.code == "NotImplemented":
            op = re.search(r"(?:implementation|CPU kernel) for (?:\S+:)?(\w+)", str(error))
            raise NotRunnable(f"{name} has no CPU kernel for {op[1]}" if op else str(error)) from error
        raise ExportError(str(error)) from error
    _loaded.update(loaded)
    failed = {index: each for index, each in enumerate(outputs) if isinstance(each, str)}
    return Answer(libraries, [[] if isinstance(each, str) else each for each in outputs], note, failed)


def _runs(
    model: Path | bytes | Parts,
    library: Libraries | bool,
    cases: Sequence[Mapping[str, Any]],
    optimize: bool,
    prepack: bool,
    required: float,
    loaded_before: frozenset[str],
) -> Iterator[Any]:
    """Yields the libraries, and their SHA-256, then of each case the outputs or why it failed."""
    # A crash ends this process alone, and another one would take longer than a run.
    registration.skip_subprocess_probe, registration.loaded_before = True, loaded_before
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors come back as exceptions
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # nobody waits for a next run
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # floats, not int8
    if not optimize:
        plain_options(options)
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    source, _held = _with_weights(model, options) if isinstance(model, Parts) else (model, [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # no library found: the caller reports it
        session = open_session(source, ["CPUExecutionProvider"], library, session_options=options)
    session.allow_other_sizes()
    yield session.libraries, frozenset(registration.registered)
    fed = [{name: each for name, each in case.items() if name in session.inputs} for case in cases]
    wanted = {each for case in fed for each in case.values() if isinstance(each, Earlier)}
    kept = dict[Earlier, Any]()
    for index, case in enumerate(fed):
        feeds: dict[str, Any] = {
            name: kept.get(each) if isinstance(each, Earlier) else each for name, each in case.items()
        }
        try:
            if missing := [name for name, each in feeds.items() if each is None]:
                raise RunError(f"the case before that gives {', '.join(missing)} did not run")
            found = session.run(feeds)
            kept |= {each: found.get(each.output) for each in wanted if each.case == index}
            yield list(found.values())
        except TwinopError as error:
            if index < required and getattr(error, "code", "") == "NotImplemented":
                raise
            if index < required:
                shapes = ", ".join(f"{name} {np.shape(each)}" for name, each in feeds.items())
                raise ExportError(
                    f"the exported model fails in ONNX Runtime for {shapes}: {error}"
                ) from error
            yield str(error).splitlines()[0]


def _with_weights(parts: Parts, options: ort.SessionOptions) -> tuple[Model, list[Any]]:
    """Reads the weights of a model and gives them to a session's options; returns what must outlive it.

    A file that is mapped into memory is not copied. What ONNX Runtime takes from no array becomes a part of
    the model.
    """
    proto, values = onnx.ModelProto(), dict[str, Any]()
    for name, weight in parts.weights.items():
        array = weight if isinstance(weight, np.ndarray) else weight.numpy()
        array = np.require(array, requirements=["C_CONTIGUOUS", "ALIGNED"])
        element = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        if array.dtype.name not in _PACKED:
            values[name] = to_ort_value(array, element)
        else:
            if not proto.HasField("graph"):
                proto.ParseFromString(parts.graph)
            [stub] = [tensor for tensor in proto.graph.initializer if tensor.name == name]
            stub.CopyFrom(onnx.numpy_helper.from_array(array, name))
    options.add_external_initializers([*values], [*values.values()])
    data = proto.SerializeToString() if proto.HasField("graph") else parts.graph
    return load_model(data, given=values.keys()), [*values.values()]


def has_wrong_types(error: Exception) -> bool:
    """Returns whether `run` failed since types contradict each other, not for want of a kernel."""
    return isinstance(error.__cause__, RunError) and error.__cause__.code == "Fail"


def check_shown(graph: Any, outputs: Iterable[Sequence[Any]], allowed: bool, cure: str) -> list[str]:
    """Finds outputs of which no case shows a finite number; returns a note for each if they are allowed.

    `graph` is of onnx_ir; its outputs that never have elements are left out. `outputs` are those of each
    typical case. The ExportError names the cure: how other inputs are given.
    """
    notes = []
    for output, *values in zip(graph.outputs, *outputs, strict=True):
        arrays = [
            to_array(each) for value in values for each in (value if isinstance(value, list) else [value])
        ]
        if not any(array.size for array in arrays):
            reason = "has no elements"
        elif all(array.dtype.kind not in "OSUiub" and not np.isfinite(array).any() for array in arrays):
            reason = "has no finite number"
        else:
            reason = ""
        if not reason or 0 in (output.shape or ()):  # it never has elements
            continue
        text = f"output {output.name} {reason} for any of the inputs"
        if not allowed:
            raise ExportError(
                f"{text}, so it cannot be compared. {cure}, or keep the file anyway with "
                f"{option('allow_uncompared', True)}"
            )
        notes.append(f"{text}: it was not compared")
    return notes
