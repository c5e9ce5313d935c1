"""Runs ops that are declared in Python (`twinop.triton_op`) in torch: with their library, or without one.

CUDA tensors run the launcher: Triton compiles its kernels at the first launch. In torch.compile the kernels
are part of the graph (`torch.library.triton_op`). CPU tensors run the function body, also where the op has a
library, which has no kernels for the CPU.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from twinop.errors import ExportError, LibraryError, RecordError, TwinopWarning
from twinop.libraries.declare import library_beside
from twinop.libraries.find import find_library_of
from twinop.libraries.kernel_op import DECLARED, KernelOp, describe_source
from twinop.libraries.library import read_library
from twinop.record.op_spec import OpSpec
from twinop.record.shapes import largest_sizes, output_shapes
from twinop.triton.compile import check_triton
from twinop.triton.helion import helion_kernels

from .arguments import bind, signature_of, tensors_of
from .autograd import make_function
from .mutation import register_mutating, torch_library
from .registry import functions_by_namespace, load
from .rules import as_tuple, run_body, unbacked_sizes, vmap_kernel
from .sharding import register_sharding_rule

_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "int[]": Sequence[int]}


def load_declared(key: str) -> Callable[..., Any] | None:
    """Returns the Python function of a declared op, by its `OpSpec.key`; None: no such op is declared.

    The library is taken if it was built from the op's file as it is. Otherwise the op runs without, which
    takes a Triton of a tested version.
    """
    declared = DECLARED.get(key)
    if declared is None:
        return None
    functions = functions_by_namespace[declared.record.namespace]
    if declared.name not in functions:
        path = _library_of(declared)
        if path is not None:
            load(path)
        else:
            for each in DECLARED.values():  # with the ops that its derivative may call
                if each.domain == declared.domain and each.file == declared.file:
                    register(each, functions)
    return functions[declared.name]


def _library_of(declared: KernelOp) -> Path | None:
    """Returns the op's library, unless there is none or the op's file has changed since it was built."""
    for find in (library_beside(declared.file), lambda: find_library_of(declared.domain)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TwinopWarning)  # the one below says more
                library = read_library(find())
        except LibraryError:
            continue
        if library.domain != declared.domain or declared.name not in library.records:
            continue
        # Only the hashes are compared: the file has another name in an installed package.
        hashes = [part.rpartition("=")[2] for part in library.source.split()]
        if describe_source([declared.file]).rpartition("=")[2] in hashes:
            return library.path
        warnings.warn(
            f"{library.path} was built from another version of {declared.file.name}: its ops run without the "
            f"library. Build it again: twinop build {declared.file.name}",
            TwinopWarning,
            stacklevel=2,
        )
        return None
    return None


def register(declared: KernelOp, functions: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Registers a declared op with torch as `torch.ops.<domain>.<op>`, and returns its Python function.

    `functions` has the ops of its domain, which its derivative may call. BuildError: Triton is missing.
    """
    check_triton()
    record = declared.record
    make = torch.library.triton_op if _is_traced(declared) else torch.library.custom_op
    op: Any = make(record.torch_name, _implementation(declared), mutates_args=())
    op.register_fake(_implementation(declared, fake=True))
    overload = getattr(getattr(torch.ops, record.namespace), record.functional_name).default
    function, _, derivative = make_function(record, overload, functions)
    op.register_autograd(derivative.backward, setup_context=derivative.setup_context)
    library = torch_library(record.namespace)
    library.impl(record.functional_name, vmap_kernel(record, overload), "FuncTorchBatched")
    functions[record.functional_name] = function
    if record.written:
        library.define(record.schema)
        fake, on_cuda = _implementation(declared, fake=True), _implementation(declared, mutates=True)
        functions[record.name] = register_mutating(record, library, fake, overload, on_cuda)
    return functions[record.name]


def _is_traced(declared: KernelOp) -> bool:
    """Whether torch.compile takes the launches into its graph. An op that reads sizes is one node there."""
    return not declared.record.sizes


def _implementation(declared: KernelOp, fake: bool = False, mutates: bool = False) -> Callable[..., Any]:
    """Returns what the op does, as a function that torch can trace, with the schema's types.

    It returns copies of the inputs that the op writes, unless it `mutates`: then it writes into them.
    """
    record = declared.record
    count = len(record.inputs)
    signature = _typed_signature(record)

    def run(*args: Any, **kwargs: Any) -> Any:
        if fake:
            register_sharding_rule(record)  # DTensor runs the fake before it looks for the rule
        if "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export():
            raise ExportError(
                f"{record.name} ({declared.place}) has no library yet, which the exporter needs to write its "
                f"node. Build it: twinop build {declared.file.name}"
            )
        arguments = list(bind(signature, args, kwargs).items())
        inputs, attributes = [value for _, value in arguments[:count]], dict(arguments[count:])
        on_cpu = not fake and tensors_of(inputs)[0].device.type == "cpu"
        if record.sizes and not fake and not on_cpu and torch.cuda.is_current_stream_capturing():
            raise RecordError(
                f"{record.qualified_name}: its output shapes are data-dependent, so the call synchronizes "
                "with the GPU, which a CUDA graph cannot capture. Run it outside the graph"
            )
        given, written = list(inputs), []
        for i, entry in enumerate(record.inputs):
            if entry.written and not mutates:
                given[i] = inputs[i].clone(memory_format=torch.contiguous_format)
                written.append(given[i])
        launched = _launched if _is_traced(declared) and not mutates else _launched_at_once
        with _launches(_skipped if fake or on_cpu else launched):
            outputs = declared.launch(given, attributes)
        if isinstance(outputs, list):
            outputs = tuple(outputs)
        if written:
            returned = () if outputs is None else as_tuple(outputs)
            outputs = (*returned, *written) if len(returned) + len(written) > 1 else written[0]
        if record.sizes:
            outputs, counts = _without_counts(declared, outputs)
        if on_cpu:
            results = run_body(record, as_tuple(outputs), inputs, attributes, declared.place)
        elif record.sizes:
            results = _of_true_sizes(declared, outputs, None if fake else counts, inputs, attributes)
        if not record.sizes:
            return outputs
        return results if len(results) > 1 else results[0]

    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__name__ = record.name
    return run


def _without_counts(declared: KernelOp, returned: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Returns the outputs, which have the largest sizes, and the tensor with the sizes."""
    record = declared.record
    *outputs, counts = as_tuple(returned)
    if len(outputs) != len(record.outputs) or counts.dtype != torch.int64:
        raise RecordError(
            f"{declared.place}: {record.name} returns {len(outputs) + 1} tensors, the last one of "
            f"{counts.dtype}; expected those of {record.schema} and, last, an int64 tensor for: "
            f"{record.texts['sizes']}"
        )
    return tuple(outputs), counts


def _of_true_sizes(
    declared: KernelOp,
    outputs: Sequence[torch.Tensor],
    counts: torch.Tensor | None,
    inputs: Sequence[Any],
    attributes: dict[str, Any],
) -> tuple[torch.Tensor, ...]:
    """Returns the beginning of the outputs; without counts: tensors of unbacked sizes."""
    record = declared.record
    shapes = {
        entry.name: None if tensor is None else tensor.shape
        for entry, tensor in zip(record.inputs, inputs, strict=True)
    }
    if counts is None:
        sizes = unbacked_sizes(record, shapes, attributes)
    else:
        sizes = dict(zip(record.sizes, counts.tolist(), strict=True))
        for name, most in largest_sizes(record, shapes, attributes).items():
            if not 0 <= sizes[name] <= most:
                bound = getattr(record.sizes[name], "text", "")
                raise RecordError(
                    f"{record.qualified_name}: its kernel counted {name} = {sizes[name]}, expected 0 to "
                    f"{bound} = {most}: a defect of the kernel"
                )
    found = zip(outputs, output_shapes(record, shapes, attributes | sizes).values(), strict=True)
    return tuple(y.new_empty(shape) if counts is None else y[: shape[0]].clone() for y, shape in found)


def _typed_signature(record: OpSpec) -> inspect.Signature:
    signature = signature_of(record)
    types: dict[str, Any] = {entry.name: _TYPES[entry.kind] for entry in record.attributes}
    for entry in record.inputs:
        types[entry.name] = torch.Tensor | None if entry.optional else torch.Tensor
    parameters = [each.replace(annotation=types[name]) for name, each in signature.parameters.items()]
    outputs = (torch.Tensor,) * len(record.outputs)
    returned = tuple[outputs] if len(outputs) > 1 else torch.Tensor  # type: ignore[valid-type]
    return signature.replace(parameters=parameters, return_annotation=returned)


# ------------------------------------------------------------------------------------- kernel launches

_Change = Callable[[Any, Any, Any], Any]
_change: ContextVar[_Change | None] = ContextVar("twinop_launches", default=None)


@contextmanager
def _launches(change: _Change) -> Iterator[None]:
    """Changes what a launch is within the block: `change(kernel, grid, launch)`."""
    if triton := sys.modules.get("triton.runtime.jit"):
        _watch(triton.KernelInterface)
        _watch_run(triton.JITFunction)
    token = _change.set(change)
    try:
        with helion_kernels():
            yield
    finally:
        _change.reset(token)


@cache
def _watch(kernels: Any) -> None:
    original = kernels.__getitem__

    def __getitem__(self: Any, grid: Any) -> Any:
        change = _change.get()
        return original(self, grid) if change is None else change(self, grid, original(self, grid))

    kernels.__getitem__ = __getitem__


@cache
def _watch_run(kernels: Any) -> None:
    """Watches what Helion's code calls in place of `kernel[grid]`."""
    original = kernels.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        change, launch = _change.get(), partial(original, self, grid=grid, warmup=warmup)
        if kwargs.get("launch_cooperative_grid") is False:  # torch.compile does not know this option
            del kwargs["launch_cooperative_grid"]
        return (launch if change is None or warmup else change(self, grid, launch))(*args, **kwargs)

    kernels.run = run


def _skipped(kernel: Any, grid: Any, launch: Any) -> Any:
    return lambda *args, **kwargs: None


def _launched(kernel: Any, grid: Any, launch: Any) -> Any:
    """Launches at once; where torch traces a `triton_op`, the launch goes into the graph."""
    if torch._library.triton.is_wrap_triton_enabled():
        return torch.library.wrap_triton(kernel)[grid]
    return _launched_at_once(kernel, grid, launch)


def _launched_at_once(kernel: Any, grid: Any, launch: Any) -> Any:
    # As in the library: results have the same bits.
    return partial(launch, enable_fp_fusion=True)
