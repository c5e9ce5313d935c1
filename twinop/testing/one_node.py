"""A model of one custom node, run by plain onnxruntime on torch's memory: the other half of parity."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import helper

from twinop.deploy.create_session import session
from twinop.deploy.inference_session import Session
from twinop.deploy.tensor_specs import NOWHERE
from twinop.record.dtypes import ELEMENT_TYPES, torch_name
from twinop.record.op_spec import OpSpec

from .samples import Sample
from .under_test import library_of

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def onnx_type(tensor: torch.Tensor) -> int:
    return ELEMENT_TYPES[torch_name(tensor.dtype)]


@cache
def onnxruntime() -> Any:
    """onnxruntime, imported after torch so that both use one set of CUDA libraries."""
    import onnxruntime as ort

    if torch.cuda.is_available():
        ort.preload_dlls()
    ort.set_default_logger_severity(3)
    return ort


def node_of(record: OpSpec, inputs: Sequence[str], attributes: Mapping[str, Any]) -> onnx.NodeProto:
    """The node of an op; absent inputs are "" (left out at the end)."""
    given = [*inputs]
    while given and not given[-1]:
        given.pop()
    outputs = list(record.outputs)
    return helper.make_node(record.onnx_name, given, outputs, "node0", domain=record.domain, **attributes)


def one_node_model(
    record: OpSpec, dtypes: Mapping[str, str], present: Sequence[int], attributes: Mapping[str, Any]
) -> onnx.ModelProto:
    """The op alone, with inputs of unknown rank; absent ones are "" (left out at the end)."""
    names = [entry.name if given else "" for entry, given in zip(record.inputs, present, strict=True)]
    types = {name: dtypes[name] for name in names if name}
    node = node_of(record, names, attributes)
    types_of_outputs = {name: dtypes[name] for name in record.outputs}
    inputs, outputs = (
        [helper.make_tensor_value_info(name, ELEMENT_TYPES[dtype], None) for name, dtype in each.items()]
        for each in (types, types_of_outputs)
    )
    graph = helper.make_graph([node], record.name, inputs, outputs)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(record.domain, record.domain_version)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _options() -> Any:
    """Options with threads that sleep after a run: spinning, those of many sessions slow each other."""
    options = onnxruntime().SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def make_session(
    model: onnx.ModelProto, library: Path, device: str, *, threads: int = 0, **provider_options: Any
) -> Any:
    """Opens a session of one provider. `threads`: of its pool; 0 is ONNX Runtime's default."""
    ort = onnxruntime()
    options = _options()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(library))
    provider = PROVIDERS[device]
    opened = ort.InferenceSession(
        model.SerializeToString(), options, providers=[(provider, provider_options)]
    )
    assert opened.get_providers()[0] == provider, f"{provider} was not taken"
    return opened


def run_bound(session: Any, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
    """Runs on the tensors' own memory (contiguous, any alignment); ORT writes into `outputs`."""
    binding = session.io_binding()
    for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
        for name, tensor in tensors.items():
            device = tensor.device
            place = (device.type, device.index or 0, onnx_type(tensor), list(tensor.shape))
            bind(name, *place, tensor.data_ptr() or NOWHERE)  # ONNX Runtime refuses null
    if any(tensor.is_cuda for tensor in inputs.values()):
        torch.cuda.synchronize()
    session.run_with_iobinding(binding)
    binding.synchronize_outputs()


def body_session(model: onnx.ModelProto) -> Session:
    """Opens a session without the library, which runs the function bodies."""
    return session(model, [PROVIDERS["cpu"]], library=False, session_options=_options())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers: NaN payloads and the sign of zero count."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


class OrtRunner:
    """Runs samples. It keeps one session for each presence pattern and attribute set."""

    def __init__(self, record: OpSpec, dtypes: dict[str, str], device: str, threads: int = 0) -> None:
        self.record, self.dtypes, self.device, self.threads = record, dtypes, device, threads
        self.sessions: dict[str, Any] = {}

    def __call__(self, sample: Sample, outputs: tuple[torch.Tensor, ...]) -> None:
        present = [given is not None for given in sample.inputs.values()]
        key = f"{present}{sample.attributes}"
        if key not in self.sessions:
            model = one_node_model(self.record, self.dtypes, present, sample.attributes)
            self.sessions[key] = make_session(
                model, library_of(self.record), self.device, threads=self.threads
            )
        outputs_by_name = dict(zip(self.record.outputs, outputs, strict=True))
        run_bound(self.sessions[key], sample.tensors(), outputs_by_name)


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """Returns memory for an output, filled with a value that no op returns by chance."""
    return torch.full_like(like, 123, memory_format=torch.contiguous_format)
