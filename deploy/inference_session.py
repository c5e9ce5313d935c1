"""Runs sessions with numpy arrays or torch tensors; the outputs are of the same kind."""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from twinop.record.dtypes import is_foreign_to_numpy

from .custom_nodes import Model, nodes_of_graph
from .errors import FeedError, RunError
from .registration import SealedLibrary
from .tensor_specs import RIGHT_PADDED, Spec, guarded, kind_of, to_numpy, to_ort_value, unknown_name

_SUFFIX = "_kernel_time"


@dataclass(frozen=True)
class NodeRun:
    """The runs of one node. `node` is ONNX Runtime's name for it; unnamed nodes are named after their op."""

    node: str
    op_type: str
    provider: str
    runs: int
    microseconds: float


def _node_runs(profile: str) -> list[NodeRun]:
    """Returns the nodes of ONNX Runtime's profile in the order of their first run, once for each provider."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for event in json.loads(profile):
        arguments = event.get("args", {})
        if event.get("cat") == "Node" and event["name"].endswith(_SUFFIX) and "provider" in arguments:
            key = (event["name"].removesuffix(_SUFFIX), arguments["op_name"], arguments["provider"])
            found.setdefault(key, []).append(event["dur"])
    return [NodeRun(*key, runs=len(times), microseconds=float(sum(times))) for key, times in found.items()]


class Session:
    """A model that is ready to run, made by `twinop.deploy.session`. Several threads may run it at once.

    Attributes:
        device: "cpu" or "cuda:<index>".
        reason: why this provider was chosen.
        providers: ONNX Runtime's list of the providers of this session.
        libraries: the registered custom-op libraries, one for each domain.
        library: the first of them, or None.
        checksums: the SHA-256 of each library's code.
        inputs, outputs: a `Spec` by name.
        required: the inputs that have no default in the model.
        shareable: the inputs whose memory an output may have, by output (`run`).
        stream: the `torch.cuda.Stream` that the session works on, or None.
        cuda_graph: whether runs on the GPU are captured as CUDA graphs.
        ort: the `onnxruntime.InferenceSession`.
    """

    def __init__(
        self,
        inner: Any,
        model: Model,
        *,
        libraries: Sequence[SealedLibrary],
        device: int | None,
        reason: str,
        stream: Any = None,
        cuda_graph: bool = False,
        profile: tempfile.TemporaryDirectory[str] | None = None,  # where ONNX Runtime writes one
    ) -> None:
        import onnxruntime  # late, because torch must be imported first where CUDA is used

        self.ort = inner
        self.libraries = list(libraries)
        self.library = self.libraries[0] if self.libraries else None
        self.checksums = [library.copy.sha256 for library in libraries]
        self.device = "cpu" if device is None else f"cuda:{device}"
        self.reason = reason
        self.stream = stream
        self.providers: list[str] = list(inner.get_providers())
        required = _specs(model, inner.get_inputs())
        self.inputs = required | _specs(model, inner.get_overridable_initializers())
        if (mask := self.inputs.get(model.metadata.get(RIGHT_PADDED, ""))) is not None:
            self.inputs[mask.name] = replace(mask, right_padded=True)
        self.outputs = _specs(model, inner.get_outputs())
        needed = (name for name, spec in required.items() if not spec.type.startswith("optional"))
        self.required = [self.inputs[name] for name in needed]
        self.shareable = _shareable(model, libraries)
        self._names = list(self.outputs)
        self._shared_sizes = _shared_sizes(self.inputs)
        self._profile, self._runs = profile, list[NodeRun]()
        self._custom = {node.proto.op_type for node in model.nodes}
        self._inner = inner._sess  # calls below the Python class take 2 us less
        self.foreign = any(
            spec.element is not None and is_foreign_to_numpy(spec.element)
            for spec in (*self.inputs.values(), *self.outputs.values())
        )
        self.cuda_graph = cuda_graph
        self._options = None
        if cuda_graph:  # these feeds are not at a captured graph's addresses, so they run without it
            self._options = onnxruntime.RunOptions()
            self._options.add_run_config_entry("gpu_graph_id", "-1")
        self._tensors: Any = None  # a TensorRunner, from the first torch tensors on
        if stream is not None:
            self._tensor_runner()

    def run(
        self,
        feeds: Mapping[str, Any],
        outputs: Sequence[str] | Mapping[str, Any] | None = None,
        *,
        options: Any = None,
    ) -> dict[str, Any]:
        """Runs the model once.

        Args:
            feeds: the inputs by name, all of one kind: numpy arrays (bfloat16 and 8-bit floats as ml_dtypes)
                or torch tensors. Torch tensors are read in place, on the CPU or on the session's
                GPU. Tensors that are not contiguous are copied first. Inputs with a default in the model may
                be left out.
            outputs: the names of the outputs to return. Default: all. With torch tensors it may be a dict of
                contiguous tensors, into which the run writes. One of them may be an input, such as a cache,
                if one node writes it and no other reads it: it is then not copied.
            options: an `onnxruntime.RunOptions`, for numpy arrays. `options.terminate = True`
                in another thread ends the run after its current node.

        Returns:
            The outputs by name, of the same kind as the feeds. Torch outputs are on the device of the inputs.
            On a GPU the work is queued on the current stream, like that of any torch op. One run of a
            hundred waits for it, which frees memory that ONNX Runtime keeps.

        Raises:
            FeedError: a name, kind, dtype, shape or device does not fit, an output shares the memory of an
                input that another node reads, or a mask in the CPU's memory has its zeros at another place
                than the model was optimised for.
            RunError: ONNX Runtime or a kernel refused the run.
        """
        names = self._checked_names(feeds, outputs)
        first = next(iter(feeds.values()), None)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(first, torch.Tensor):
            if options is not None:
                raise FeedError("run options are for numpy arrays, not for torch tensors")
            runner = self._tensors or self._tensor_runner()
            return runner.run(feeds, outputs if isinstance(outputs, Mapping) else dict.fromkeys(names))
        if isinstance(outputs, Mapping):
            raise FeedError("output tensors need torch tensors as inputs: pass a list of output names")
        return self.run_checked(self._checked_arrays(feeds), names, options or self._options)

    def check(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None) -> list[str]:
        """Checks the numpy arrays of a run as `run` does, and returns the names of its outputs."""
        names = self._checked_names(feeds, outputs)
        self._checked_arrays(feeds)
        return names

    def allow_other_sizes(self) -> None:
        """Lets axes of one name have several sizes, as ONNX Runtime does; a model may broadcast them."""
        self._shared_sizes = {}

    def run_checked(self, arrays: Mapping[str, Any], names: list[str], options: Any) -> dict[str, Any]:
        """Runs the model with numpy arrays that `check` has accepted; RunError: ONNX Runtime refused it."""
        if self.foreign:
            return self._run_foreign(arrays, names, options)
        return dict(zip(names, guarded(self._inner.run, names, arrays, options), strict=True))

    def executed_on(self, custom_only: bool = True) -> list[NodeRun]:
        """Returns the nodes that have run and their provider, from ONNX Runtime's profile.

        The first call ends the recording. Nodes that a function body replaced are not among the custom ones.
        RunError: the session was made without profile=True.
        """
        if self._profile is None:
            raise RunError("nothing was recorded: make the session with profile=True, run it, then ask again")
        if not self._runs:
            self._runs = _node_runs(Path(self.ort.end_profiling()).read_text())
        return [run for run in self._runs if not custom_only or run.op_type in self._custom]

    def _tensor_runner(self) -> Any:
        from .torch_binding import TensorRunner

        self._tensors = TensorRunner(self, self._inner, self.cuda_graph)
        return self._tensors

    def _checked_names(self, feeds: Any, outputs: Any) -> list[str]:
        """Returns the names of the outputs, after a look at the names of the feeds."""
        if not isinstance(feeds, dict | Mapping) or isinstance(outputs, str) or hasattr(outputs, "shape"):
            example = ", ".join(f'"{name}": {name}' for name in self.inputs)
            kinds = " and ".join(kind_of(value) for value in (feeds, outputs) if value is not None)
            raise FeedError(
                "run takes a dict of the inputs by name and, if wanted, a list of output names: "
                f"run({{{example}}}); given: {kinds or 'nothing'}"
            )
        for name in feeds:
            if name not in self.inputs:
                raise unknown_name("input", name, self.inputs)
        if missing := [f"{spec.name} ({spec})" for spec in self.required if spec.name not in feeds]:
            raise FeedError(f"input missing: {', '.join(missing)}; given: {', '.join(feeds) or 'none'}")
        if outputs is None:
            return self._names
        for name in outputs:
            if name not in self.outputs:
                raise unknown_name("output", name, self.outputs)
        return list(dict.fromkeys(outputs))

    # -------------------------------------------------------------------------------- numpy

    def _checked_arrays(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        arrays = {}
        for name, value in feeds.items():
            spec = self.inputs[name]
            if not isinstance(value, np.ndarray) and spec.element is not None:
                value = _as_array(name, value)
            dtype = spec.numpy_dtype
            if isinstance(value, np.ndarray) and not value.dtype.isnative:
                raise FeedError(
                    f"input {name} has its bytes in the other order ({value.dtype.str}): pass "
                    f"{name}.astype({name}.dtype.newbyteorder('='))"
                )
            if dtype is not None:
                fits = value.dtype == dtype or (dtype.kind == "O" and value.dtype.kind in "US")
                if not fits or not spec.accepts(value.shape):
                    raise spec.mismatch(value.dtype.name, value.shape)
            if spec.right_padded:
                spec.require_right_padded(value)
            arrays[name] = value
        for dimension, places in self._shared_sizes.items():
            sizes = {
                sum(arrays[name].shape[axis] for name, axis in parts): " and ".join(dict(parts))
                for parts in places
                if arrays.keys() >= dict(parts).keys()
            }
            if len(sizes) > 1:  # ONNX Runtime does not always notice
                given = " and ".join(f"{size} in input {name}" for size, name in sizes.items())
                raise FeedError(f"dimension {dimension} is {given}: it must be the same in all inputs")
        return arrays

    def _run_foreign(self, arrays: Mapping[str, Any], names: list[str], options: Any) -> dict[str, Any]:
        """Runs with OrtValues on the arrays' memory: ONNX Runtime does not convert all dtypes from numpy."""
        values = {}
        for name, array in arrays.items():
            spec = self.inputs[name]
            if spec.element is None or spec.dtype == "str":
                raise FeedError(
                    f"input {name} is {spec.type}, which ONNX Runtime takes from numpy only in models "
                    "without bfloat16 and 8-bit floats"
                )
            values[name] = to_ort_value(np.ascontiguousarray(array).reshape(array.shape), spec.element)
        found = guarded(self.ort.run_with_ort_values, names, values, options)
        for name in [name for name, each in zip(names, found, strict=True) if not each.is_tensor()]:
            text = f"output {name} is {self.outputs[name].type}, which ONNX Runtime does not return as arrays"
            raise RunError(f"{text} from models with bfloat16 or 8-bit floats", "NotImplemented")
        return {name: to_numpy(each, self.outputs[name]) for name, each in zip(names, found, strict=True)}


_Place = tuple[tuple[str, int], ...]
"""An input and an axis, or several whose sizes are added."""


def _shared_sizes(inputs: Mapping[str, Spec]) -> dict[str, list[_Place]]:
    """Returns the inputs and axes of each dimension that several have; those of parts in "past + new" first.

    In optimum's merged decoders, the mask's length has the name of the new tokens', but covers the cache too.
    """
    found: dict[str, list[tuple[str, int]]] = {}
    is_merged = "use_cache_branch" in inputs
    for spec in inputs.values():
        for axis, size in enumerate(spec.shape or ()):
            if isinstance(size, str) and spec.element is not None and not (is_merged and "mask" in spec.name):
                found.setdefault(size, []).append((spec.name, axis))
    shared = {size: list[_Place]((place,) for place in places) for size, places in found.items()}
    for size, places in shared.items():
        parts = size.split(" + ")
        if len(parts) > 1 and found.keys() >= {*parts}:
            places.insert(0, tuple(found[part][0] for part in parts))
    return {size: places for size, places in shared.items() if len(places) > 1}


def _as_array(name: str, value: Any) -> np.ndarray:
    module = type(value).__module__.split(".")[0]
    if module in ("torch", "onnxruntime"):
        raise FeedError(f"input {name} is {kind_of(value)} and others are numpy arrays: give one kind")
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        raise FeedError(f"input {name} is {kind_of(value)}, not an array: {error}") from error


def _shareable(model: Model, libraries: Sequence[SealedLibrary]) -> dict[str, str]:
    """Returns the inputs whose memory an output may have, by output: its node is their only reader."""
    records = {record.node_type: record for library in libraries for record in library.by_onnx_name.values()}
    reads = Counter(name for node in nodes_of_graph(model.proto) for name in node.proto.input)
    reads.update(value.name for value in model.proto.graph.output)
    found = {}
    for node in model.proto.graph.node:
        if (record := records.get((node.domain, node.op_type))) is None:
            continue
        values = dict(zip((entry.name for entry in record.inputs), node.input, strict=False))
        values |= zip(record.outputs, node.output, strict=False)
        for output, name in record.in_place.items():
            if output in values and name in values and reads[values[name]] == 1:
                found[values[output]] = values[name]
    return found


def _specs(model: Model, arguments: Sequence[Any]) -> dict[str, Spec]:
    """Makes the specs of NodeArgs, whose shape is [] both for a scalar and for an unknown rank."""
    values = [*model.proto.graph.input, *model.proto.graph.output]
    tensors = {value.name: value.type.tensor_type for value in values}
    scalars = {name for name, each in tensors.items() if each.HasField("shape") and not each.shape.dim}
    return {
        each.name: Spec.of(each.name, each.type, each.shape if each.shape or each.name in scalars else None)
        for each in arguments
    }
