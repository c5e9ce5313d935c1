"""Reads what the user gives: example inputs, their names, dynamic axes, dtype, opset."""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from twinop.errors import ExportError, option
from twinop.model.attach import OPSETS
from twinop.record.dtypes import FLOATING

from .state import walk

Dynamic = Mapping[str, int | Sequence[int] | Mapping[int, str]]


class Inputs:
    """A model's example inputs: tensors, also in containers, by their names in the graph; others become
    constants. `returned` are tensors beside numbers, which torch does not export."""

    def __init__(self, bound: inspect.BoundArguments) -> None:
        self._bound, self.returned = bound, frozenset[str]()
        given = bound.arguments.items()
        found = [each for name, value in given for each in leaves(value, self._prefix(name))]
        self.tensors = dict(found)
        if len(self.tensors) < len(found):
            name = Counter(name for name, _ in found).most_common(1)[0][0]
            raise ExportError(f"two inputs would be named {name}; rename a key or a parameter")

    def _prefix(self, parameter: str) -> str:
        """Returns the prefix of the names of a parameter's tensors; `**kwargs` have names of their own."""
        kind = self._bound.signature.parameters[parameter].kind
        return "" if kind is inspect.Parameter.VAR_KEYWORD else parameter

    @property
    def plain(self) -> bool:
        """Whether every parameter is a tensor and is passed by position, and only tensors are returned."""
        are_tensors = [isinstance(value, torch.Tensor) for value in self._bound.arguments.values()]
        return not (self._bound.kwargs or self.returned) and all(are_tensors)

    def call(self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Calls the model with other tensors in the places of these."""
        bound = copy.copy(self._bound)
        given = bound.arguments.items()
        bound.arguments = {name: replace_leaves(value, tensors, self._prefix(name)) for name, value in given}
        return model(*bound.args, **bound.kwargs)


class _Function(torch.nn.Module):
    """A function as a module, with the modules that it uses: they are exported in eval mode."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        inner = getattr(function, "func", function)  # of functools.partial
        used = [getattr(inner, "__self__", None), inner, *getattr(function, "args", ())]
        if inspect.isfunction(inspect.unwrap(inner)):
            found = inspect.getclosurevars(inspect.unwrap(inner))
            used += [*found.nonlocals.values(), *found.globals.values()]
        self.used = torch.nn.ModuleList(each for each in used if isinstance(each, torch.nn.Module))
        self.forward = function


def as_module(model: Any) -> torch.nn.Module:
    """Returns a module to export: functions are wrapped, and torch.compile and DataParallel taken off.
    ExportError: it is neither a module nor a function, or torch's exporter does not take it."""
    wrappers = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    compiled = ("_orig_mod", "_torchdynamo_orig_callable")  # of a module, of a function
    while isinstance(model, wrappers) or any(hasattr(model, name) for name in compiled):
        name = "module" if isinstance(model, wrappers) else next(n for n in compiled if hasattr(model, n))
        model = getattr(model, name)
    if isinstance(model, torch.export.ExportedProgram) or "_guards_fn" in getattr(model, "_modules", {}):
        raise ExportError(
            "the model is an ExportedProgram, which cannot be exported again: pass the original module"
        )
    if not isinstance(model, torch.nn.Module):
        if not callable(model) or isinstance(model, type):
            name = getattr(model, "__name__", type(model).__name__)
            raise ExportError(f"the model is {name}; expected a torch.nn.Module or a function of tensors")
        return _Function(model)
    if any(torch.nn.parameter.is_lazy(each) for each in model.parameters()):
        raise ExportError(
            "the model has uninitialized parameters (Lazy modules): call it once before the export"
        )
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ExportError(
                f"{name or 'the model'} is a ScriptModule, which cannot be exported: use the module it "
                "was made from"
            )
    return model


def bind_inputs(model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any] | None) -> Inputs:
    """Binds the example inputs to the parameters of the model's forward; ExportError: they do not fit it, or
    hold no tensor."""
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    try:
        signature = inspect.signature(model.forward)
    except ValueError as error:  # a function of C++
        raise ExportError(f"the signature of {model.forward} is not known: wrap it in a def") from error
    try:
        inputs = Inputs(signature.bind(*args, **(kwargs or {})))
    except TypeError as error:
        raise ExportError(
            f"the example inputs do not fit {type(model).__name__}.forward{signature}: {error}"
        ) from error
    if not inputs.tensors:
        raise ExportError(
            "the example inputs hold no tensor; expected at least one, such as torch.randn(4, 8)"
        )
    return inputs


def leaves(value: Any, name: str = "", outputs: bool = False) -> Iterable[tuple[str, torch.Tensor]]:
    """Yields the tensors inside containers, with names such as `states_0`; ExportError: an object holds
    tensors, and is no container that torch knows."""
    if isinstance(value, torch.Tensor):
        yield name, value
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return
    found = _entries(value)
    inner = walk([("", value)], lambda each: not isinstance(each, torch.nn.Module)) if found is None else ()
    if any(isinstance(each, (torch.Tensor, np.ndarray)) for _, each in inner):
        kind = type(value)
        where = f"output {name}".strip() if outputs else name
        if isinstance(value, np.ndarray):
            raise ExportError(f"{where} is a numpy array; expected a tensor, as torch.from_numpy makes")
        cure = f"Register it with torch.export.register_dataclass({kind.__name__}), if it is a dataclass, or "
        cure += "with torch.utils._pytree.register_pytree_node"
        if kind.__module__.startswith("transformers."):
            cure += "; transformers.integrations.executorch.register_dynamic_cache_export_support() does it"
        raise ExportError(
            f"{where} is {kind.__name__}, which torch's registry of containers (pytree) does not have: its "
            f"tensors would {'be lost' if outputs else 'become constants'}. {cure}; or "
            f"{'return' if outputs else 'pass'} the tensors themselves"
        )
    for key, entry in found[0] if found else ():
        yield from leaves(entry, _join(name, key), outputs)


def replace_leaves(value: Any, tensors: Mapping[str, torch.Tensor], name: str = "") -> Any:
    """Returns the same structure with other tensors, by the names that `leaves` gives."""
    if isinstance(value, torch.Tensor):
        return tensors[name]
    if (found := _entries(value)) is None:
        return value
    entries, build = found
    others = [replace_leaves(entry, tensors, _join(name, key)) for key, entry in entries]
    return value if all(a is b for a, (_, b) in zip(others, entries, strict=True)) else build(others)


_Entries = tuple[list[tuple[Any, Any]], Callable[[list[Any]], Any]]


def _entries(value: Any) -> _Entries | None:
    """Returns what a container holds, by name, and how it is made of other entries; None of other objects.
    Containers are those of torch's pytree registry, lists, tuples and mappings."""

    def is_inside(each: Any) -> bool:
        return each is not value

    inside, spec = pytree.tree_flatten(value, is_leaf=is_inside)
    if not (len(inside) == 1 and inside[0] is value):
        try:
            paths = [path[-1] for path, _ in pytree.tree_flatten_with_path(value, is_leaf=is_inside)[0]]
            names = ("idx", "key", "name")  # of a sequence, a mapping, an attribute
            keys = [next(getattr(key, name) for name in names if hasattr(key, name)) for key in paths]
        except (ValueError, StopIteration):  # registered without names
            keys = list(range(len(inside)))
        return list(zip(keys, inside, strict=True)), lambda entries: pytree.tree_unflatten(entries, spec)
    if isinstance(value, Mapping):
        return list(value.items()), lambda entries: dict(zip(value, entries, strict=True))
    if isinstance(value, (list, tuple)):
        is_named = hasattr(value, "_fields")
        return list(enumerate(value)), lambda each: type(value)(*each) if is_named else type(value)(each)
    return None


def _join(name: str, key: Any) -> str:
    return f"{name}_{key}" if name else str(key)


def check_dynamic(dynamic: Dynamic | None, tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[int, str]]:
    """Returns the dynamic axes by input, each with a name; axes of one name have one size. ExportError: an
    unknown input, an axis that it does not have, or an example size of 0 or 1."""
    result: dict[str, dict[int, str]] = {}
    for name, axes in (dynamic or {}).items():
        if name not in tensors:
            raise ExportError(
                f"{option('dynamic', name)}: the model has no input {name}; its inputs are: "
                f"{', '.join(tensors)}"
            )
        shape = tensors[name].shape
        given = [axes] if isinstance(axes, int) else axes
        if not (isinstance(given, Iterable) and all(isinstance(axis, int) for axis in given)):
            raise ExportError(
                f"{option('dynamic', name)}: {axes!r} is not an axis; expected an axis, a list of axes, or "
                'names by axis, such as 0, [0, 2] or {0: "batch"}'
            )
        named = given if isinstance(given, Mapping) else dict.fromkeys(given)
        result[name] = {}
        for axis, label in named.items():
            if not -len(shape) <= axis < len(shape):
                raise ExportError(
                    f"{option('dynamic', name)}: input {name} has no axis {axis}; its example has shape "
                    f"{tuple(shape)}"
                )
            axis %= len(shape)
            if shape[axis] < 2:
                raise ExportError(
                    f"{option('dynamic', name)}: axis {axis} of {name} has size {shape[axis]} in the example "
                    "input, which the exporter takes for a constant; give an example with at least 2 there"
                )
            result[name][axis] = label or f"{name}_dim{axis}"
    return result


def parse_dynamic(specs: Iterable[str]) -> dict[str, dict[int, str]]:
    """Parses `["x:0,1", "mask:0=batch"]` into `{"x": {0: "", 1: ""}, "mask": {0: "batch"}}`; ExportError: a
    text does not have that form."""
    result: dict[str, dict[int, str]] = {}
    for spec in specs:
        name, separator, axes = spec.partition(":")
        try:
            for part in axes.split(","):
                axis, _, label = part.partition("=")
                result.setdefault(name.strip(), {})[int(axis)] = label.strip()
        except ValueError:
            separator = ""
        if not separator or not name.strip():
            raise ExportError(
                f"{option('dynamic', spec)}: expected INPUT:AXIS,AXIS... such as x:0 or x:0,2, or with "
                "names x:0=batch,2=time"
            )
    return result


def check_opset(opset: int) -> None:
    """Raises ExportError if a model of this opset cannot have function bodies."""
    if opset not in OPSETS:
        raise ExportError(
            f"opset {opset} is not supported; expected {OPSETS[0]} to {OPSETS[-1]}. Bodies compare strings, "
            f"which needs {OPSETS[0]}; torch's exporters end at {OPSETS[-1]}"
        )


def floating_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype of a name such as float16; raises ExportError if no op computes in it."""
    if name not in FLOATING:
        known = isinstance(getattr(torch, name, None), torch.dtype)
        kind = "is not a floating type" if known else "is not known"
        raise ExportError(f"dtype {name} {kind}; expected one of: {', '.join(FLOATING)}")
    return getattr(torch, name)


def resized(
    tensors: Mapping[str, torch.Tensor], dynamic: Mapping[str, Mapping[int, str]], *, fresh: bool
) -> dict[str, torch.Tensor]:
    """Returns the inputs with one more entry on every dynamic axis. `fresh` draws new values between the
    example's smallest and largest number, or from its indices, and masks half of the last row of a 0/1 mask;
    else the first entry is repeated."""
    generator = torch.Generator().manual_seed(0)
    result = dict(tensors)
    for name, axes in dynamic.items():
        for axis in axes:
            tensor = result[name]
            result[name] = torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis)
        if fresh:
            result[name] = _fresh(tensors[name], result[name], generator)
    return result


_DRAWN = {
    *(getattr(torch, name) for name in FLOATING),
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip


def _fresh(example: torch.Tensor, larger: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if example.numel() == 0 or example.dtype not in _DRAWN:
        return larger
    values = example.detach().cpu().unique()
    if set(values[:3].tolist()) in ({1}, {0, 1}) or example.dtype is torch.bool:
        if larger.dim() < 2:
            return larger
        masked = larger.clone()
        row = masked[-1]
        row[..., row.shape[-1] // 2 :] = 1 - row[..., :1].to(torch.int8)
        return masked
    if len(values) < 3:  # a mask of other values, a constant
        return larger
    if not values.is_floating_point():
        return values[torch.randint(len(values), larger.shape, generator=generator)].to(larger.device)
    low, high = values.min().double(), values.max().double()
    if not (low.isfinite() and high.isfinite()):
        return larger
    drawn = torch.rand(larger.shape, generator=generator, dtype=torch.float64) * (high - low) + low
    return drawn.to(larger)
