"""ONNX Runtime's side of the reports: models, sessions, and bindings to torch's memory."""

import tempfile
import weakref
from collections.abc import Container, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import torch  # before onnxruntime, so that both use the same CUDA libraries
from onnx import NodeProto, helper

from twinop.libraries.library import find_library
from twinop.record.op_spec import OpSpec
from twinop.testing import one_node
from twinop.testing.one_node import onnx_type

from .measurements import BenchError
from .timing import DeviceTimer, Run

share_pool = True
"""Whether all sessions of this process share one thread pool. Then no session can have its own."""


@cache
def onnxruntime(cpu_threads: int) -> Any:
    """Returns the module, with a pool of `cpu_threads` threads for all sessions (see `share_pool`).

    Threads of separate pools would spin for a while after each run, on the cores that the next session needs.
    """
    ort = one_node.onnxruntime()
    if share_pool:
        ort.set_global_thread_pool_sizes(cpu_threads, 1)
    return ort


def parse_nodes(text: str) -> list[NodeProto]:
    """Returns nodes from ONNX's text format; semicolons separate them."""
    return [onnx.parser.parse_node(node) for node in text.split(";")]


def custom_node(record: OpSpec, given: Container[str], attributes: Mapping[str, Any]) -> NodeProto:
    """Returns the node of an op with the `given` inputs; all have the names of its record."""
    inputs = [entry.name if entry.name in given else "" for entry in record.inputs]
    return one_node.node_of(record, inputs, attributes)


def one_op(
    nodes: Sequence[NodeProto],
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    opset: int = 20,
    constants: Mapping[str, torch.Tensor] | None = None,
) -> onnx.ModelProto:
    """Returns a model of these nodes with constants; its inputs and outputs have these dtypes and ranks."""

    def value(name: str, tensor: torch.Tensor) -> onnx.ValueInfoProto:
        shape = [f"{name}_{axis}" for axis in range(tensor.dim())]
        return helper.make_tensor_value_info(name, onnx_type(tensor), shape)

    first, last = ([value(*each) for each in tensors.items()] for tensors in (inputs, outputs))
    graph = helper.make_graph(nodes, "graph", first, last)
    for name, tensor in (constants or {}).items():
        content = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        made = helper.make_tensor(name, onnx_type(tensor), tensor.shape, content, raw=True)
        graph.initializer.append(made)
    opsets = {"": opset} | {node.domain: 1 for node in nodes if node.domain}
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid(*each) for each in opsets.items()], ir_version=10
    )


def open_session(
    model: onnx.ModelProto | Path,
    device: torch.device,
    *,
    library: Path | None = None,
    cpu_threads: int = 1,
    stream: torch.cuda.Stream | None = None,
    cuda_graph: bool = False,
    optimize: bool = False,
    fallback: bool = False,
    planned_nodes: list[str] | None = None,
) -> Any:
    """Opens a session that runs the model unchanged: no graph optimisation, no second provider.

    `library` is that of the custom ops, by default twinop's. To `optimize` lets ONNX Runtime optimise the
    graph fully, which may change its nodes; `fallback` allows nodes on the CPU beside the GPU.
    `planned_nodes` receives the types of the nodes that will run, which are not known of a file. BenchError:
    the provider is missing or refuses a node, or other nodes would run than the model has.
    """
    ort = onnxruntime(cpu_threads)
    options = ort.SessionOptions()
    options.use_per_session_threads = not share_pool
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    options.register_custom_ops_library(str(library or find_library("custom_ops")))
    provider = one_node.PROVIDERS[device.type]
    provider_options = {}
    if device.type == "cuda":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", str(int(not fallback)))
        provider_options = {"device_id": str(device.index or 0), "enable_cuda_graph": str(int(cuda_graph))}
        if stream is not None:
            provider_options["user_compute_stream"] = str(stream.cuda_stream)
    cpu = [one_node.PROVIDERS["cpu"]] if fallback and device.type == "cuda" else []
    with tempfile.TemporaryDirectory() as folder:
        planned = Path(folder) / "planned.onnx"
        source = str(model) if isinstance(model, Path) else model.SerializeToString()
        if isinstance(source, bytes):
            options.optimized_model_filepath = str(planned)
        try:
            session = ort.InferenceSession(source, options, providers=[(provider, provider_options), *cpu])
        except Exception as error:  # onnxruntime's errors have no common base class
            raise BenchError(f"ONNX Runtime's {provider} does not run this model: {error}") from error
        if session.get_providers()[0] != provider:
            raise BenchError(
                f"ONNX Runtime did not take {provider}; `twinop run model.onnx --provider cuda` says why"
            )
        if isinstance(model, Path):
            return session
        wanted = [node.op_type for node in model.graph.node]
        found = [node.op_type for node in onnx.load(planned).graph.node]
    if planned_nodes is not None:
        planned_nodes += found
    if found != wanted and not optimize:
        raise BenchError(
            f"a chain of {len(wanted)} {wanted[0]} would run as {len(found)} nodes: {set(found)}"
        )
    return session


def bind(
    session: Any,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    *,
    synchronize: bool = True,
    graph: int | None = None,
) -> Run:
    """Returns a run of the session on these tensors' own memory.

    An output without elements gets memory from ONNX Runtime. It waits for the device if it is to
    `synchronize`. `graph` is the number of the CUDA graph, one for each set of tensors, or -1 for none. It
    has been captured if the run does not wait.
    """
    import onnxruntime as ort

    binding = session.io_binding()
    binding.tensors = (dict(inputs), dict(outputs))  # a binding holds addresses only: keep the tensors alive
    for bind_tensor, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
        for name, tensor in tensors.items():
            place = (tensor.device.type, tensor.device.index or 0)
            if tensor.numel() == 0 and name in outputs:
                binding.bind_output(name, *place)
                continue
            bind_tensor(name, *place, onnx_type(tensor), list(tensor.shape), tensor.data_ptr())
    run_options = ort.RunOptions()
    if graph is not None:
        run_options.add_run_config_entry("gpu_graph_id", str(graph))
    if not synchronize:
        run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    if not synchronize and graph is None:
        # Frees the pinned memory of these runs before the session ends, as deploy/torch_binding.py does.
        weakref.finalize(session, _run_and_wait, session._sess, binding)
    return partial(session.run_with_iobinding, binding, run_options)


def run_of(
    nodes: Sequence[NodeProto],
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    timer: DeviceTimer | None,
    *,
    constants: Mapping[str, torch.Tensor] | None = None,
    opset: int = 20,
    **options: Any,
) -> Run:
    """Returns a run of these nodes on these tensors' memory: on the timer's stream, or one that waits."""
    session = open_session(
        one_op(nodes, inputs, outputs, opset, constants=constants),
        next(iter(inputs.values())).device,
        stream=None if timer is None else timer.stream,
        **options,
    )
    return bind(session, inputs, outputs, synchronize=timer is None)


def _run_and_wait(inner: Any, binding: Any) -> None:
    inner.run_with_iobinding(binding._iobinding, None)
    torch.cuda.synchronize()
