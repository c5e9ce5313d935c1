"""Runs sessions on torch tensors, bound by address, on the CPU and on the session's GPU."""

import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import onnxruntime
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from twinop.record.dtypes import to_array, to_tensor, torch_name

from .errors import FeedError, RunError
from .tensor_specs import NOWHERE, Spec, guarded, kind_of, to_numpy

# ONNX Runtime's own CUDA kernels load 16 bytes at a time without checking the alignment.
_ALIGNMENT = 16
_RELEASED = "has lost its memory: its storage was released or cut, as FSDP does. Gather it before the run"
_NOT_SYNCHRONIZED = {"disable_synchronize_execution_providers": "1"}
_MAX_QUEUED = 100  # runs. ONNX Runtime keeps pinned memory of some nodes until it waits for a run.
Outputs = Mapping[str, torch.Tensor | None]
"""The wanted outputs by name: the memory that the caller gives, or None."""

_MAX_GRAPHS = 16  # each captured graph holds memory. Further combinations of shapes run without one.


class TensorRunner:
    """Runs one `inference_session.Session`, which imports this module late, on torch tensors."""

    def __init__(self, session: Any, inner: Any, cuda_graph: bool) -> None:
        self._inner = inner
        self._inputs = session.inputs
        self._outputs = session.outputs
        self._shareable = session.shareable
        self._stream = session.stream
        index = int(session.device[5:]) if session.device != "cpu" else 0
        self._session_device = session.device
        self._reason = session.reason
        self._cuda = torch.device("cuda", index) if self._stream is not None else None
        self._devices = {"cpu": onnxruntime.OrtDevice.make("cpu", 0)._get_c_device()}
        if self._cuda is not None:
            self._devices["cuda"] = onnxruntime.OrtDevice.make("cuda", index)._get_c_device()
        specs = self._inputs | self._outputs
        self._dtypes = {name: getattr(torch, spec.dtype, None) for name, spec in specs.items()}
        self._elements = {name: spec.element for name, spec in specs.items()}
        self._shapes: dict[str, Any] = {
            name: spec.sources(session.required) for name, spec in self._outputs.items()
        }
        no_graph = {"gpu_graph_id": "-1"} if cuda_graph else {}
        self._options = _run_options(no_graph)
        self._queued = _run_options(no_graph | _NOT_SYNCHRONIZED)
        self._local = threading.local()
        self._guard = self._cuda is not None and torch.cuda.device_count() > 1
        self._graphs: dict[tuple[Any, ...], _Graph] | None = {} if cuda_graph else None
        self._lock = threading.Lock()
        # Held while a run is queued: a later run frees only pinned memory of runs that do not overlap it.
        self._queue_lock = threading.Lock()
        self._queued_runs = 0
        self._last_shapes: dict[str, torch.Size] = {}  # of the last queued run
        if self._stream is not None:
            weakref.finalize(session.ort, self._free_pinned, self._stream.device)

    def run(self, feeds: Mapping[str, Any], wanted: Outputs) -> dict[str, torch.Tensor]:
        """Runs the model as `Session.run` does; it has the `wanted` outputs."""
        device = self._device(feeds)
        if device.type == "cpu":
            return self._run_bound(feeds, wanted, device)
        with torch.cuda.device(device) if self._guard else nullcontext():  # ONNX Runtime changes it
            return self._run_cuda(feeds, wanted, device)

    def _run_cuda(
        self, feeds: Mapping[str, Any], wanted: Outputs, device: torch.device
    ) -> dict[str, torch.Tensor]:
        if self._graphs is None:
            return self._run_bound(feeds, wanted, device)
        checked = {name: self._checked(name, value, device) for name, value in feeds.items()}
        shared = self._shared(checked, wanted)
        key = (  # a graph is fixed to shapes, and to the addresses of what it writes in place
            *((name, tuple(tensor.shape)) for name, tensor in sorted(checked.items())),
            *((to, checked[name].data_ptr()) for to, name in sorted(shared.items())),
        )
        with self._lock:  # a graph has one set of buffers
            graph = self._graphs.get(key)
            if graph is None and len(self._graphs) < _MAX_GRAPHS:
                graph = self._graphs[key] = self._new_graph(checked, shared, device, len(self._graphs))
            if graph is not None:
                return self._replay(graph, checked, wanted, shared)
            return self._run_bound(checked, wanted, device)  # on the stream that another thread may capture

    # -------------------------------------------------------------------------------- checks

    def _device(self, feeds: Mapping[str, Any]) -> torch.device:
        """Returns the device of all feeds. Raises FeedError for several devices or one of another session."""
        device = next(iter(feeds.values())).device
        for name, value in feeds.items():
            if not isinstance(value, torch.Tensor):
                raise FeedError(
                    f"input {name} is {kind_of(value)} and others are torch tensors: give one kind"
                )
            if value.device != device:
                places = ", ".join(f"{name} on {each.device}" for name, each in feeds.items())
                raise FeedError(f"the inputs are on several devices: {places}. Move them to one")
        if device.type == "cpu" or device == self._cuda:
            return device
        name = next(iter(feeds))
        if device.type == "meta":
            raise FeedError(f"input {name} is a meta tensor: it has no data to run on")
        where = f"this session runs on {self._session_device} ({self._reason})"
        raise FeedError(f"input {name} is on {device}, {where}: move it there")

    def _checked(self, name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns the tensor, or a copy that is contiguous and, on the GPU, aligned."""
        spec = self._inputs[name]
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else f"sparse ({tensor.layout})"
            raise FeedError(f"input {name} is {kind}: pass a dense tensor")
        if tensor.dtype is not self._dtypes[name] or not spec.accepts(tensor.shape):
            raise spec.mismatch(torch_name(tensor.dtype), tensor.shape)
        if type(tensor) is not torch.Tensor and (
            isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor)
        ):  # their data_ptr() is no address
            raise FeedError(f"input {name} has no storage that can be read: it is a {type(tensor).__name__}")
        try:
            if _is_released(tensor):
                raise FeedError(f"input {name} {_RELEASED}")
            if tensor.is_neg():
                tensor = tensor.resolve_neg()
            if spec.right_padded and device.type == "cpu":  # a GPU's memory takes a synchronization
                spec.require_right_padded(to_array(tensor))
            if not tensor.is_contiguous():
                return tensor.contiguous()
            if tensor.data_ptr() % _ALIGNMENT and device.type == "cuda":
                return tensor.clone()
        except RuntimeError as error:  # torch.func's wrappers
            raise FeedError(f"input {name} has no storage that can be read: {error}") from error
        return tensor

    def _shared(self, feeds: Mapping[str, torch.Tensor], wanted: Outputs) -> dict[str, str]:
        """Checks the memory for outputs; returns the inputs, such as caches, that outputs are written to."""
        spans, shared = [], {}
        for name, output in wanted.items():
            if output is not None:
                if output is not feeds.get(self._shareable.get(name, "")):
                    self._require_fit(name, output, feeds)
                spans.append((*_memory(output), name))
        spans.sort()  # a decoder has a hundred caches, too many to compare each with each
        for (_, end, name), (start, _, other) in pairwise(spans):
            if start < end:
                raise FeedError(f"the outputs {other} and {name} share memory: give each output its own")
        ends = [end for _, end, _ in spans]
        for name, tensor in feeds.items() if spans else ():
            start, end = _memory(tensor)
            at = bisect_right(ends, start)  # the first that ends behind the start
            if at == len(spans) or spans[at][0] >= end:
                continue
            first, last, to = spans[at]
            if (first, last) != (start, end) or self._shareable.get(to) != name:
                raise FeedError(
                    f"output {to} shares memory with input {name}, which a run may overwrite before it is "
                    f"read: the node of {to} does not compute in place on {name}, or another node reads "
                    f"{name} as well. Give the output its own memory"
                )
            shared[to] = name
        return shared

    def _require_fit(self, name: str, output: Any, feeds: Mapping[str, torch.Tensor]) -> None:
        spec, shape = self._outputs[name], self._output_shape(name, feeds)
        device, is_tensor = next(iter(feeds.values())).device, isinstance(output, torch.Tensor)
        is_tensor = is_tensor and output.layout is torch.strided and not output.is_nested
        fits = is_tensor and (output.dtype, output.device) == (self._dtypes[name], device)
        fits = fits and spec.accepts(output.shape) and shape in (None, tuple(output.shape))
        if not fits or not output.is_contiguous():
            given = f" ({output.dtype} {tuple(output.shape)} on {output.device})" if is_tensor else ""
            raise FeedError(
                f"the memory of output {name} is {kind_of(output)}{given}; expected a contiguous torch "
                f"tensor, {spec.dtype} {shape or spec.shape} on {device}"
            )
        if _is_released(output):
            raise FeedError(f"the memory of output {name} {_RELEASED}")

    # -------------------------------------------------------------------------------- a run

    def _run_bound(
        self, feeds: Mapping[str, torch.Tensor], wanted: Outputs, device: torch.device
    ) -> dict[str, torch.Tensor]:
        binding = onnxruntime.SessionIOBinding(self._inner)
        place = self._devices[device.type]
        kept = {}  # alive until the run has been queued
        for name, tensor in feeds.items():
            kept[name] = tensor = self._checked(name, tensor, device)
            binding.bind_input(name, place, self._elements[name], tensor.shape, tensor.data_ptr())
        shared = self._shared(kept, wanted)
        results: dict[str, Any] = {}  # None where ONNX Runtime allocates
        bound = []
        for name, output in wanted.items():
            if name in kept:  # an output that is an input: ONNX Runtime would return the input's memory
                results[name] = kept[name].clone() if output is None else output.copy_(kept[name])
                continue
            bound.append(name)
            if output is None and (shape := self._output_shape(name, kept)) is not None:
                # Memory of torch, whose allocator knows which stream may reuse it when.
                output = torch.empty(shape, dtype=self._dtypes[name], device=device)
            results[name] = output
            if output is None:
                binding.bind_output(name, place)
            else:
                at = output.data_ptr() or NOWHERE
                binding.bind_output(name, place, self._elements[name], output.shape, at)
        if not bound:
            return results
        try:
            if device.type == "cpu":
                guarded(self._inner.run_with_iobinding, binding, self._options)
                self._take(binding, results, bound)
            else:
                self._queue(binding, results, bound, kept)
        except RunError:
            if shared or not any(self._shapes.values()):
                raise
            # Perhaps an output has another shape than the model declares. Where ONNX Runtime allocates the
            # outputs, it only warns of that. If that helps, it does so from now on.
            declared, self._shapes = self._shapes, dict.fromkeys(self._shapes)
            try:
                return self._run_bound(kept, wanted, device)
            except RunError:
                self._shapes = declared
                raise
        return results

    def _queue(
        self, binding: Any, results: dict[str, Any], bound: list[str], feeds: Mapping[str, torch.Tensor]
    ) -> None:
        """Runs on the session's stream. No memory is reused too early: torch waits as for its own work."""
        with self._forked() as current:
            with self._queue_lock:
                self._queued_runs += 1
                waits = self._queued_runs % _MAX_QUEUED == 0
                guarded(self._inner.run_with_iobinding, binding, self._options if waits else self._queued)
                self._last_shapes = {name: tensor.shape for name, tensor in feeds.items()}
            if any(output is None for output in results.values()):
                # The next run may reuse ONNX Runtime's memory while other streams still read it.
                with torch.cuda.stream(self._stream):
                    self._take(binding, results, bound)
                for output in results.values():
                    output.record_stream(current)

    @contextmanager
    def _forked(self) -> Iterator[torch.cuda.Stream]:
        """Puts the session's stream between the past and the future work of the current one: yields that."""
        current = torch.cuda.current_stream(self._cuda)
        if current == self._stream:
            yield current
            return
        events = self._local.__dict__.setdefault("events", (torch.cuda.Event(), torch.cuda.Event()))
        events[0].record(current)
        self._stream.wait_event(events[0])
        try:
            yield current
        finally:
            events[1].record(self._stream)
            current.wait_event(events[1])

    def _free_pinned(self, device: torch.device) -> None:
        """Frees the pinned memory of queued runs by one more run, when nobody uses the session any more.

        Otherwise ONNX Runtime frees it in a callback of CUDA that outlives the session. CUDA refuses that,
        and the process ends (seen with 1.31).
        """
        self._queued = self._options
        with suppress(Exception), torch.cuda.device(device):  # nobody is there to hear of a failure
            if self._last_shapes:
                feeds = {
                    name: torch.ones(shape, dtype=self._dtypes[name], device=device)
                    for name, shape in self._last_shapes.items()
                }
                self._run_bound(feeds, dict.fromkeys(self._outputs), device)
            torch.cuda.synchronize()  # the callbacks of the last runs, too

    def _take(self, binding: Any, results: dict[str, Any], bound: list[str]) -> None:
        """Adds the outputs that ONNX Runtime allocated to the results."""
        if all(results[name] is not None for name in bound):
            return
        for name, value in zip(bound, binding.get_outputs(), strict=True):
            if results[name] is None:
                output = self._to_torch(value, self._outputs[name])
                results[name] = output.clone() if output.is_cuda else output

    def _to_torch(self, value: Any, spec: Spec) -> torch.Tensor:
        dtype = self._dtypes[spec.name]
        if dtype is None:
            raise RunError(
                f"output {spec.name} is {spec.type}, which torch has no tensor for: run with numpy arrays"
            )
        # ONNX Runtime's DLPack does not know float8, and CPU builds before 1.23 have none.
        if "float8" in spec.type and value.device_name().lower() == "cuda":
            shape, place = tuple(value.shape()), (value.data_ptr(), False)
            memory = SimpleNamespace(value=value)  # torch keeps it as long as the tensor
            memory.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": place, "version": 3}
            return torch.as_tensor(memory, device=self._cuda).view(dtype)
        if "float8" in spec.type or not hasattr(value, "to_dlpack"):
            return to_tensor(to_numpy(value, spec))
        return torch.utils.dlpack.from_dlpack(value.to_dlpack()).view(dtype)

    def _output_shape(self, name: str, feeds: Mapping[str, torch.Tensor]) -> tuple[int, ...] | None:
        sources = self._shapes[name]
        if sources is None or self._dtypes[name] is None:
            return None
        return tuple(
            source if isinstance(source, int) else feeds[source[0]].shape[source[1]] for source in sources
        )

    # -------------------------------------------------------------------------------- CUDA graphs

    def _new_graph(
        self, feeds: Mapping[str, torch.Tensor], shared: Mapping[str, str], device: torch.device, number: int
    ) -> "_Graph":
        """Binds fixed addresses: `shared` inputs where they are, others and the outputs in own buffers.

        ONNX Runtime captures a thread's first run with them. Nothing here keeps the memory of `shared`.
        """
        binding, place = onnxruntime.SessionIOBinding(self._inner), self._devices[device.type]
        buffers = {}
        for name, tensor in feeds.items():
            if name not in shared.values():
                tensor = buffers[name] = torch.empty_like(tensor, device=device)
            binding.bind_input(name, place, self._elements[name], tensor.shape, tensor.data_ptr())
        for name in self._outputs.keys() - feeds.keys():
            shape = self._output_shape(name, feeds)
            if name in shared:
                output = feeds[shared[name]]
            elif shape is None:
                raise RunError(f"enable_cuda_graph: the shape of output {name} is not known before the run")
            else:
                output = buffers[name] = torch.empty(shape, dtype=self._dtypes[name], device=device)
            binding.bind_output(name, place, self._elements[name], output.shape, output.data_ptr() or NOWHERE)
        return _Graph(binding, _run_options({"gpu_graph_id": str(number)} | _NOT_SYNCHRONIZED), buffers)

    def _replay(
        self, graph: "_Graph", feeds: Mapping[str, torch.Tensor], wanted: Outputs, shared: Mapping[str, str]
    ) -> dict[str, torch.Tensor]:
        own = graph.buffers
        results = {name: torch.empty_like(own[name]) if to is None else to for name, to in wanted.items()}
        captured = self._local.__dict__.setdefault("captured", set())
        with self._forked(), torch.cuda.stream(self._stream):
            for name in feeds.keys() & own.keys():
                own[name].copy_(feeds[name])
            if graph not in captured:  # ONNX Runtime also runs the model before it captures it
                before = {name: feeds[name].clone() for name in shared.values()}
                try:
                    guarded(self._inner.run_with_iobinding, graph.binding, graph.options)
                finally:
                    for name, tensor in before.items():
                        feeds[name].copy_(tensor)
                captured.add(graph)
            guarded(self._inner.run_with_iobinding, graph.binding, graph.options)
            for name in results.keys() - shared.keys():
                results[name].copy_(own[name])
        return results


def _run_options(entries: Mapping[str, str]) -> Any:
    options = onnxruntime.RunOptions()
    for key, value in entries.items():
        options.add_run_config_entry(key, value)
    return options


def _is_released(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage was released or, on the CPU, cut: that look takes a microsecond."""
    if not tensor.numel() or not tensor.data_ptr() or tensor.device.type != "cpu":
        return bool(tensor.numel() and not tensor.data_ptr())
    end = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() < (tensor.storage_offset() + end) * tensor.itemsize


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


@dataclass(frozen=True, eq=False)
class _Graph:
    binding: Any
    options: Any
    buffers: dict[str, torch.Tensor]
