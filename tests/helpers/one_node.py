"""A model of one custom node, run by plain onnxruntime on torch's memory: the other half of parity."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import helper

from twinop.dtypes import ELEMENT_TYPES
from twinop.library import Library, find_library, read_library
from twinop.record import DOMAIN, DOMAIN_VERSION, Record

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def onnx_type(tensor: torch.Tensor) -> int:
    return ELEMENT_TYPES[str(tensor.dtype).removeprefix("torch.")]


@cache
def onnxruntime() -> Any:
    """onnxruntime, imported after torch so that both use one set of CUDA libraries."""
    import onnxruntime as ort

    if torch.cuda.is_available():
        ort.preload_dlls()
    ort.set_default_logger_severity(3)
    return ort


@cache
def _libraries() -> tuple[Library, ...]:
    return tuple(read_library(find_library(stem)) for stem in ("custom_ops", "test_ops"))


def library_of(record: Record) -> Path:
    return next(library.path for library in _libraries() if record.name in library.records)


def one_node_model(
    record: Record, dtypes: Mapping[str, str], present: Sequence[bool], attributes: Mapping[str, Any]
) -> onnx.ModelProto:
    """The op alone, with inputs of unknown rank; absent optional inputs are "" (left out at the end)."""
    names = [entry.name if given else "" for entry, given in zip(record.inputs, present, strict=True)]
    while names and not names[-1]:
        names.pop()
    node = helper.make_node(
        record.onnx_name, names, list(record.outputs), name="node", domain=DOMAIN, **dict(attributes)
    )
    graph = helper.make_graph(
        [node],
        record.name,
        [helper.make_tensor_value_info(name, ELEMENT_TYPES[dtypes[name]], None) for name in names if name],
        [helper.make_tensor_value_info(name, ELEMENT_TYPES[dtypes[name]], None) for name in record.outputs],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def make_session(model: onnx.ModelProto, library: Path, device: str, **provider_options: Any) -> Any:
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library))
    provider = PROVIDERS[device]
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=[(provider, provider_options)]
    )
    assert session.get_providers()[0] == provider, f"{provider} was not taken"
    return session


def run_bound(session: Any, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
    """Runs on the tensors' own memory (contiguous, any alignment); ORT writes into `outputs`."""
    binding = session.io_binding()
    for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
        for name, tensor in tensors.items():
            device = tensor.device
            place = (device.type, device.index or 0, onnx_type(tensor), list(tensor.shape))
            bind(name, *place, pointer(tensor))
    if any(tensor.is_cuda for tensor in inputs.values()):
        torch.cuda.synchronize()
    session.run_with_iobinding(binding)
    binding.synchronize_outputs()


def pointer(tensor: torch.Tensor) -> int:
    """The data's address; for an empty tensor any address that is not null (onnxruntime refuses null)."""
    return tensor.data_ptr() or torch.empty(64, dtype=torch.uint8).data_ptr()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers: NaN payloads and the sign of zero count."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (
        f"{what}: {actual.dtype}{tuple(actual.shape)} instead of {expected.dtype}{tuple(expected.shape)}"
    )
    different = (bits(actual) != bits(expected)).flatten()
    if different.any():
        first = int(different.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.numel()} elements differ, first at {first}: "
            f"{actual.flatten()[first].item()} instead of {expected.flatten()[first].item()}"
        )
