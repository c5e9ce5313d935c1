"""Declares ops whose kernels are written in Python: `triton_op`.

    @twinop.triton_op("mish(Tensor x) -> Tensor", body=torch.nn.functional.mish)
    def mish(x):
        y = torch.empty_like(x)
        mish_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
        return y

The decorated function is the op's launcher. It allocates the outputs and launches kernels; in a call its
tensors are contiguous. `twinop build mish.py` traces it and compiles the kernels into a library. The op also
runs in torch before that (`twinop/torch_op/eager_kernels.py`).

This module imports neither torch nor triton.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ..errors import RecordError, TwinopError
from ..record.body_registry import body as register_body
from ..record.body_registry import misfit
from ..record.names import check_domain, check_op_name
from ..record.op_spec import DTYPES, OpSpec
from ..record.schema_text import record_of, redeclared
from ..record.shapes import first_part, nodes_of
from .declare import CPU_FUNCTIONS, DERIVATIVES, SECOND_DERIVATIVES, Op, body_on_cpu, declared_domain

Launcher = Callable[..., Any]

DECLARED: dict[str, "KernelOp"] = {}
"""The declared ops by `OpSpec.key`."""

_KINDS: dict[str, Any] = {"int": Integral, "float": Real, "bool": Integral, "str": str, "int[]": Sequence}
_DTYPES = [name for name in DTYPES if not name.startswith("complex")]


class KernelOp(Op):
    """An op whose kernels are written in Python. Called with tensors, it runs in torch.

    Its `record` is what the declaration says of the op. The traces of the launcher add the shapes and dtypes
    of the outputs (`twinop/triton/build.py`).
    """

    def __init__(
        self, launcher: Launcher, record: OpSpec, body: Launcher, backward: Any, samples: Launcher | None
    ) -> None:
        super().__init__(launcher, record.domain)
        self.name, self.launcher, self.record = record.name, launcher, record
        self.body, self.backward, self.samples = body, backward, samples

    @property
    def place(self) -> str:
        """Where the launcher is defined, as `place_of` says it."""
        return place_of(self.launcher)

    @property
    def file(self) -> Path:
        return Path(inspect.unwrap(self.launcher).__code__.co_filename)

    @cached_property
    def body_in_torch(self) -> Callable[..., Any] | None:
        """The body as a torch function of inputs and attributes; None: it is an ONNX builder."""
        if _is_builder(self.body):
            return None
        return _functional(self.body, self.record) if self.record.written else self.body

    def launch(self, inputs: Iterable[Any], attributes: Mapping[str, Any]) -> Any:
        """Runs the launcher on contiguous tensors; attributes that are not given have their defaults."""
        given = {entry.name: entry.default for entry in self.record.attributes} | dict(attributes)
        return self.launcher(*(None if each is None else each.contiguous() for each in inputs), **given)

    def calls(self, dtype: str, size: int) -> list[dict[str, Any]] | None:
        """Returns the calls of `samples`, inputs and attributes by name; None if there is no such function.

        Raises:
            TwinopError: the function fails, or a sample does not fit the schema.
        """
        import torch

        samples, where = self.samples, f"{self.place}: samples({dtype}, {size}) of {self.name}"
        given = getattr(torch, dtype), size
        return samples and calls_of(self.record, where, lambda: iter(samples(*given)))


def calls_of(
    record: OpSpec, where: str, samples: Callable[[], Iterable[Any] | None]
) -> list[dict[str, Any]] | None:
    """Returns the calls that a function gives, inputs and attributes by name; None if it gives None.

    `where` is its place, for messages. TwinopError: it fails, or a call does not fit the schema.
    """
    import torch

    try:
        if (found := samples()) is None:
            return None
        given = list(found)
    except Exception as error:
        raise TwinopError(f"{where} failed: {type(error).__name__}: {error}") from error
    names = [entry.name for entry in record.inputs]
    kinds = {entry.name: _KINDS[entry.kind] for entry in record.attributes}
    kinds |= {entry.name: (torch.Tensor, *[type(None)] * entry.optional) for entry in record.inputs}
    calls = []
    for sample in given:
        if isinstance(sample, Mapping):
            call, count = dict(sample), len(sample)
            said = f"a dict of {', '.join(map(str, sample)) or 'nothing'}"
        else:
            values = tuple(sample) if isinstance(sample, Sequence) else (sample,)
            call, count = dict(zip(names, values, strict=False)), len(values)
            said = f"{count} values"
        needed = {entry.name for entry in record.inputs if not entry.optional}
        if not needed <= call.keys() <= {*record.parameters} or len(call) < count:
            raise TwinopError(
                f"{where} gave {said}; expected tensors in the order of {record.schema}, or a dict of inputs "
                "and attributes by name"
            )
        if wrong := [name for name, value in call.items() if not isinstance(value, kinds[name])]:
            kind = type(call[wrong[0]]).__name__
            raise TwinopError(f"{where} gave a {kind} for {wrong[0]} of {record.schema}")
        calls.append(call)
    return calls


def _version(given: Any) -> Any:
    """Returns what a write changes; None of tensors that were made in torch.inference_mode."""
    return None if given is None or given.is_inference() else given._version


def _functional(body: Callable[..., Any], record: OpSpec) -> Callable[..., Any]:
    """Returns a body that refuses to write into its inputs, which the op itself does."""

    @functools.wraps(body)
    def call(*inputs: Any, **attributes: Any) -> Any:
        versions = list(map(_version, inputs))
        results = body(*inputs, **attributes)
        for entry, given, version in zip(record.inputs, inputs, versions, strict=True):
            if _version(given) != version:
                raise RecordError(
                    f"the body of {record.qualified_name} writes into {entry.name}. A body is functional: "
                    f"return {', '.join(record.outputs)}, with index_copy, scatter or where"
                )
        return results

    return call


def triton_op(
    schema: str,
    *,
    body: Callable[..., Any],
    dtypes: Sequence[str] = ("float32", "float16", "bfloat16"),
    backward: "Callable[..., Any] | KernelOp | None" = None,
    domain: str | None = None,
    samples: Callable[..., Iterable[Any]] | None = None,
    shapes: str = "",
    input_shapes: str | None = None,
    choices: str = "",
    limits: str = "",
    sizes: str = "",
) -> Callable[[Launcher], KernelOp]:
    """Makes an op of a function that launches Triton kernels.

    Args:
        schema: in torch's language: `rms_norm(Tensor x, Tensor weight, float eps=1e-6) -> Tensor`. Kernels
            store to new tensors, which the launcher returns, and to inputs that are `Tensor(a!)`.
        body: what the op means. A torch function of the inputs and, by name, the attributes, or an ONNX
            builder, whose first parameter is named `op` (`twinop/model/bodies.py`). 16-bit inputs arrive as
            float32. It runs on the CPU, and becomes the function body of exported models. It returns all
            outputs, at the end the new content of the inputs that the op writes.
        dtypes: the dtypes of the inputs. Each entry is a dtype for all tensors, or names others:
            "float16 mean=float32".
        backward: the derivative. A torch function that returns a gradient for each input (None: no gradient),
            or another op whose outputs are the gradients. Its parameters are some of the op's inputs, outputs
            and attributes and the incoming gradients, by name: `grad`, or `grad_<output>`.
        domain: the op is `torch.ops.<domain>.<name>`. Default: the top-level name of the function's module.
        samples: `samples(dtype, size)` yields inputs for tests and benchmarks: a tuple, or a dict of inputs
            and attributes by name. Needed where the op is not elementwise.
        shapes: the shapes of the outputs in the language of records, where they do not follow from traces.
        input_shapes: the shapes that inputs must have, in the same language. Default: without `samples`, all
            inputs have one shape.
        choices: the values of str attributes, "activation = none | relu".
        limits: the values of int and float attributes, "eps > 0; groups in 1 | 2".
        sizes: sizes of outputs that come from the data, with bounds: "n <= numel(x)". `shapes` then says
            which outputs begin with them, "y = [n]". The launcher returns its outputs with the largest sizes
            and, last, an int64 tensor in which the kernels wrote the sizes.

    Returns:
        A decorator; the decorated function becomes a `KernelOp`.

    Raises:
        RecordError: the schema does not parse, the launcher does not take its inputs and attributes, or a
            dtype is unknown.
        TwinopError: a name that the op or the domain cannot have, or a backward that does not fit.
    """

    def declare(launcher: Launcher) -> KernelOp:
        place = declared_domain(launcher, domain)
        check_domain(place)
        if isinstance(dtypes, str) or not dtypes or not all(isinstance(each, str) for each in dtypes):
            raise RecordError(
                f"{place_of(launcher)}: dtypes is {dtypes!r}; expected a tuple of texts, such as "
                '("float32", "float16 mean=float32")'
            )
        texts = {"shapes": shapes, "choices": choices, "limits": limits, "sizes": sizes}
        record = record_of(schema, place, dtypes="; ".join(dtypes), input_shapes=input_shapes or "", **texts)
        check_op_name(record.name)
        first, *others = (entry.name for entry in record.inputs)
        if input_shapes is None and samples is None:
            record = redeclared(record, input_shapes="; ".join(f"{name} = {first}" for name in others))
        record = replace(record, devices=("cuda",))
        if wrong := misfit(launcher, record):
            raise RecordError(wrong)
        _check_sizes(launcher, record)
        _check_dtypes(launcher, record, dtypes)
        record = redeclared(record, gradient=_gradient_text(record, backward))
        declared = KernelOp(launcher, record, body, backward, samples)
        register_body(_builder(declared), domain=place)
        if record.is_backward and declared.body_in_torch is not None:
            SECOND_DERIVATIVES[record.key] = with_signature(declared.body_in_torch, record)
        if isinstance(backward, KernelOp):
            taken, several = backward.record.parameters, len(record.outputs) > 1
            if several and any(name in taken and f"grad_{name}" not in taken for name in record.outputs):
                # The outputs without a gradient, as a norm's mean, would be constants in its derivative.
                SECOND_DERIVATIVES.pop(backward.record.key, None)
        elif backward is not None:
            DERIVATIVES[record.key] = backward
        CPU_FUNCTIONS[record.key] = declared.body_in_torch or functools.partial(body_on_cpu, record)
        DECLARED[record.key] = declared
        return declared

    return declare


def describe_source(files: Iterable[Path]) -> str:
    """Returns the names of source files with a hash of each: so a library that is outdated is noticed."""
    return " ".join(f"{file.name}={hashlib.sha256(file.read_bytes()).hexdigest()[:16]}" for file in files)


def place_of(launcher: Launcher) -> str:
    """Returns where a launcher is defined: "mish.py:12"."""
    code = inspect.unwrap(launcher).__code__
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def _check_dtypes(launcher: Launcher, record: OpSpec, dtypes: Sequence[str]) -> None:
    tensors = {*(entry.name for entry in record.inputs), *record.outputs}
    for text, each in zip(dtypes, record.combinations, strict=True):
        where = f"{place_of(launcher)}: {text!r} in dtypes of {record.name}"
        if unknown := sorted(each.keys() - tensors):
            raise RecordError(f"{where}: {unknown[0]} is not a tensor of {record.schema}")
        if unknown := sorted({*each.values()} - {*_DTYPES}):
            said = f"{unknown[0] or 'nothing'} is not supported; expected one of {', '.join(_DTYPES)}"
            raise RecordError(f"{where}: {said}")


def _check_sizes(launcher: Launcher, record: OpSpec) -> None:
    for name, bound in record.sizes.items():
        named = [(tree, [*nodes_of(tree)].count(name)) for tree in (s.tree for s in record.shapes.values())]
        used = [(tree, count) for tree, count in named if count]
        first = [count == 1 and first_part(tree)[:2] == ["list", name] for tree, count in used]
        if record.written:
            raise RecordError(
                f"{place_of(launcher)}: {record.name} has data-dependent shapes, so it cannot write to "
                "an input"
            )
        if not bound or not used or not all(first):
            raise RecordError(
                f"{place_of(launcher)}: {name} in sizes of {record.name}: the launcher allocates the largest "
                f"outputs, so {name} has a bound and is the first dimension of outputs. Expected "
                f'sizes="{name} <= numel({record.inputs[0].name})", shapes="{record.outputs[0]} = [{name}]"'
            )


def _gradient_text(record: OpSpec, backward: "Callable[..., Any] | KernelOp | None") -> str:
    """Returns the record's derivative formula, which names the backward op; "" for a torch function."""
    known = [*record.parameters, *record.outputs]
    known += [f"grad_{name}" for name in record.outputs] + (["grad"] if len(record.outputs) == 1 else [])
    if backward is None:
        return ""
    if isinstance(backward, KernelOp):
        names = backward.record.parameters
    else:
        try:
            names = list(inspect.signature(backward).parameters)
        except ValueError:
            raise TwinopError(
                f"{record.qualified_name}: its backward is a function of C++; expected one whose parameters "
                f"have names, some of {', '.join(known)}"
            ) from None
    if unknown := [name for name in names if name not in known]:
        raise TwinopError(
            f"{record.qualified_name}: its backward takes {', '.join(unknown)}; expected some of "
            f"{', '.join(known)}"
        )
    if not isinstance(backward, KernelOp):
        return ""
    if backward.domain != record.domain:
        raise TwinopError(
            f"{record.qualified_name}: its backward is in the domain {backward.domain}; expected one domain"
        )
    inputs = [entry.name for entry in record.inputs]
    gradients = [name.removeprefix("grad_") for name in backward.record.outputs]
    if len(gradients) == 1 and gradients[0] not in inputs:
        gradients = inputs[:1]
    if wrong := [name for name in gradients if name not in inputs]:
        raise TwinopError(
            f"{record.qualified_name}: its backward returns gradients of {', '.join(wrong)}; the inputs are "
            f"{', '.join(inputs)}: name the results grad_<input>"
        )
    single = {f"grad_{name}": "grad" for name in record.outputs} if len(record.outputs) == 1 else {}
    attributes = {entry.name for entry in backward.record.attributes}
    arguments = [
        f"{name}={name}" if name in attributes else single.get(name, name)
        for name in backward.record.parameters
    ]
    return f"{', '.join(gradients)} = {backward.name}({', '.join(arguments)})"


def _is_builder(body: Callable[..., Any]) -> bool:
    try:
        return next(iter(inspect.signature(body).parameters), "") == "op"
    except (TypeError, ValueError):  # a function of C++
        return False


def with_signature(function: Callable[..., Any], record: OpSpec, *first: str) -> Callable[..., Any]:
    """Returns the function with parameters of these names: `first`, then the op's inputs and attributes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        return function(*bound.args, **bound.kwargs)

    kind, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    positional = [*first, *(entry.name for entry in record.inputs)]
    signature = inspect.Signature(
        [inspect.Parameter(name, kind) for name in positional]
        + [inspect.Parameter(entry.name, keyword) for entry in record.attributes]
    )
    call.__name__ = call.__qualname__ = record.name
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _builder(declared: KernelOp) -> Callable[..., Any]:
    """Returns the body as an ONNX builder."""
    if declared.body_in_torch is None:
        body = with_signature(declared.body, declared.record, "op")
        body.__wrapped__ = declared.body  # type: ignore[attr-defined]
    else:

        def build(op: Any, *inputs: Any, **attributes: Any) -> Any:
            from ..export.torch_bodies import replay

            return replay(declared, op, inputs, attributes)

        body = with_signature(build, declared.record, "op")
    body.__module__, body.__qualname__ = declared.launcher.__module__, declared.launcher.__qualname__
    return body
