"""An op's rules for torch, derived from its record: fake, vmap, autocast, refusals."""

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from twinop.errors import RecordError
from twinop.libraries.declare import CPU_FUNCTIONS, cpu_function
from twinop.record.call_checks import check_attributes, check_shapes, describe, infer_shapes
from twinop.record.dtypes import torch_name
from twinop.record.op_spec import OpSpec
from twinop.record.shapes import first_part, known, largest_sizes

from .arguments import bind, completion_of, signature_of

Rule = Callable[..., Any]
PRODUCTS = ("linear", "linear_swiglu")  # compute each row alone, though their records name no rows
_ENTRIES = {  # ops that compute each entry of a batch alone: the inputs that have one
    "attention_cached": ("qkv", "k_cache", "v_cache", "position"),
    "attention_packed": ("qkv", "bias"),
    "embed_layer_norm": ("ids", "rows"),
    "rope": ("q", "k", "cos", "sin"),
}
_MOST_KEPT = 512  # of an op


def fake_rule(record: OpSpec, sizes_from_data: Rule | None = None) -> Rule:
    """Returns the rule that gives shapes, dtypes and strides without data (meta tensors, compile, export).

    `sizes_from_data` gives such sizes, by name, from the shapes of the inputs and the attributes. Default:
    unbacked ones.
    """
    signature = signature_of(record)

    def fake(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(signature, args, kwargs)
        tensors = {entry.name: arguments[entry.name] for entry in record.inputs}
        for entry in record.inputs:
            if tensors[entry.name] is None and not entry.optional:
                raise RecordError(f"{record.qualified_name}: {entry.name} is None; it must be a tensor")
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        first = next(iter(given.values()))
        kinds = {name: torch_name(tensor.dtype) for name, tensor in given.items()}
        shapes = {name: None if tensor is None else tensor.shape for name, tensor in tensors.items()}
        try:
            for name, tensor in given.items():
                if name not in record.host_inputs and tensor.device != first.device:
                    raise RecordError(
                        f"all tensors must be on one device; {name} is on {tensor.device}, the first on "
                        f"{first.device}"
                    )
            dtypes = record.combination_of(kinds)
            if dtypes is None:
                raise RecordError(
                    f"no kernel takes these dtypes; the inputs must have one of: {record.dtypes} "
                    "(all inputs the same but where one is named)"
                )
            attributes = {entry.name: arguments[entry.name] for entry in record.attributes}
            check_attributes(record, attributes)
            check_shapes(record, shapes, attributes)
            counted = (sizes_from_data or unbacked_sizes)(record, shapes, attributes) if record.sizes else {}
            inferred = infer_shapes(record, shapes, attributes | counted)
        except RecordError as error:
            raise RecordError(f"{describe(record, kinds, shapes)}: {error}") from error
        outputs = tuple(
            _elementwise_output(record, shape, list(given.values()), getattr(torch, dtypes[name]))
            if record.is_elementwise
            else first.new_empty(shape, dtype=getattr(torch, dtypes[name]))
            for name, shape in inferred.items()
        )
        return outputs if len(outputs) > 1 else outputs[0]

    return fake


def unbacked_sizes(
    record: OpSpec, shapes: Mapping[str, Any], attributes: Mapping[str, Any]
) -> dict[str, torch.SymInt]:
    """Makes a symbol for each size that comes from the data."""
    context = torch.library.get_ctx()
    found = {name: context.new_dynamic_size() for name in record.sizes}
    for name, most in largest_sizes(record, shapes, attributes).items():
        torch._check(found[name] <= most)
    return found


def _elementwise_output(
    record: OpSpec, shape: Any, inputs: list[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Allocates an output as `ElementwiseStrides` in call.cpp does.

    Its strides are those of the first input that has the shape and is dense, else those of `empty_like` of
    the first input that has the shape, else contiguous.
    """
    alike = [tensor for tensor in inputs if not record.broadcasts or _same_shape(tensor, shape)]
    if not alike:
        return inputs[0].new_empty(shape, dtype=dtype)
    outputs = [torch.empty_like(tensor, dtype=dtype) for tensor in alike]
    pairs = zip(outputs, alike, strict=True)
    return next((output for output, tensor in pairs if _same_order(output, tensor)), outputs[0])


def _same_shape(tensor: torch.Tensor, shape: Sequence[Any]) -> bool:
    return tensor.dim() == len(shape) and all(known(a == b) for a, b in zip(tensor.shape, shape, strict=True))


def _same_order(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether strides are equal, without those of dimensions of size 1, some of which empty_like changes."""
    sizes = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(known(size == 1) or known(first == second) for size, first, second in sizes)


def vmap_kernel(record: OpSpec, op: Rule) -> Rule:
    """Returns the kernel for vmap's dispatch key.

    One call for a batch if that gives the same, else one an example. Which one follows from shapes, mapped
    dimensions and attributes, and is kept for them. torch.library.register_vmap's takes twice the time.
    """
    complete = completion_of(signature_of(record))
    batched_key = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)
    plans: Rule = lru_cache(_MOST_KEPT)(lambda form: [])

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if record.sizes:
            raise RecordError(
                f"{record.qualified_name} has data-dependent output shapes, which differ between the "
                "examples of torch.vmap. Call the op for each example, without vmap"
            )
        functorch = torch._C._functorch
        level = functorch.peek_interpreter_stack().level()
        values: list[Any] = []
        key: list[Any] = []
        for each in complete(args, kwargs):
            if isinstance(each, torch.Tensor):
                each, dim = functorch._unwrap_batched(each, level)
                key += each.shape, dim
            else:
                key += _form(each), None
            values.append(each)
        with torch._C._ExcludeDispatchKeyGuard(batched_key):
            if key[1::2].count(None) == len(values):  # tensors of another level
                return op(*values)
            try:
                plan = plans(tuple(key))
            except TypeError:  # sizes that are symbols have no hash
                plan = []
            if not plan:
                plan.append(_plan(record, op, values, key[1::2]))
            outputs = plan[0](values)
        if isinstance(outputs, torch.Tensor):
            return functorch._add_batch_dim(outputs, 0, level)
        results = tuple([functorch._add_batch_dim(output, 0, level) for output in outputs])
        return results if len(results) > 1 else results[0]

    return kernel


def _form(value: Any) -> Any:
    """Returns what checks see of a value: of a tensor all but its data."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return tuple(map(_form, value)) if isinstance(value, list) else value


def _plan(record: OpSpec, op: Rule, values: Sequence[Any], dims: Sequence[int | None]) -> Rule:
    """Returns what computes a mapped call from its values: outputs with the batch in front."""
    arguments = dict(zip(record.parameters, values, strict=True))
    mapped = {name: dim for name, dim in zip(arguments, dims, strict=True) if dim is not None}
    size: Any = next(arguments[name].shape[dim] for name, dim in mapped.items())
    tensors = [entry.name for entry in record.inputs if arguments[entry.name] is not None]
    rank = max(arguments[name].dim() - (name in mapped) for name in tensors) if record.broadcasts else 0
    # What puts the batch in front of a tensor.
    steps: dict[str, Rule] = {name: partial(_to_front, dim, rank) for name, dim in mapped.items()}
    for name in {*tensors} - mapped.keys() if not record.broadcasts else ():
        steps[name] = lambda value: value.expand(size, *value.shape)
    call = op
    if record.is_elementwise:
        pass
    elif (one := _in_one_call(record, op, arguments, mapped, steps)) is not None:
        steps, call = one
    elif record.key in PRODUCTS:
        call = partial(_product_of_batch, record)
    elif _depends_on_data(size):
        raise RecordError(
            f"{record.qualified_name} runs once for each example under torch.vmap, and here their number "
            "depends on data, as with x[mask]. Call the op on the batch, without vmap"
        )
    else:
        call = partial(_call_each, op)
    places = [(i, steps[name]) for i, name in enumerate(arguments) if name in steps]

    def run(values: list[Any]) -> Any:
        for i, step in places:
            values[i] = step(values[i])
        return call(*values)

    return run


def _to_front(dim: int, rank: int, batch: torch.Tensor) -> torch.Tensor:
    """Moves a mapped dimension to the front, and gives each example at least `rank` dimensions."""
    batch = batch.movedim(dim, 0) if dim else batch
    added = (1,) * (rank + 1 - batch.dim())
    return batch.reshape(batch.shape[:1] + added + batch.shape[1:]) if added else batch


def _call_each(op: Rule, *batch: Any) -> list[torch.Tensor]:
    size = next(len(value) for value in batch if isinstance(value, torch.Tensor))
    if size == 0:  # an example of zeros shows what the outputs are like
        batch = tuple(v.new_zeros(1, *v.shape[1:]) if isinstance(v, torch.Tensor) else v for v in batch)
    examples = [[v[i] if isinstance(v, torch.Tensor) else v for v in batch] for i in range(max(size, 1))]
    calls = [as_tuple(op(*example)) for example in examples]
    return [torch.stack(each)[:size] for each in zip(*calls, strict=True)]


def _depends_on_data(size: Any) -> bool:
    if isinstance(size, int):
        return False
    # Not at the top: it imports sympy, a fifth of the time that torch takes.
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))


def _in_one_call(
    record: OpSpec, op: Rule, arguments: dict[str, Any], mapped: dict[str, int], steps: dict[str, Rule]
) -> tuple[dict[str, Rule], Rule] | None:
    """Returns what becomes of the arguments in one call for the batch, and this call; None: it needs several.

    One call does for ops that compute each row alone. Others compute each entry of the first dimension alone:
    those of `_ENTRIES`, and ops of rows all whose inputs and outputs have a value for each entry of x's
    first dimension. For these, the batch and the first dimension become one.
    """
    names = [entry.name for entry in record.inputs if arguments[entry.name] is not None]
    first = record.inputs[0].name
    shapes: dict[str, Any] = {e.name: getattr(arguments[e.name], "shape", None) for e in record.inputs}
    examples = shapes | {n: (*shapes[n][:dim], *shapes[n][dim + 1 :]) for n, dim in mapped.items()}
    example = _inferred(record, examples, arguments)
    trees: dict[str, Any] = {name: each.tree for name, each in record.input_shapes.items()}
    columns = {name for name in names if not _has_rows(trees.get(name, first if name == first else 0))}
    rank = len(examples[first]) if record.rows or record.key in PRODUCTS else 0
    if example is not None and rank and not columns & mapped.keys():
        rows = {name: step for name, step in steps.items() if name not in columns}
        whole = arguments | {name: step(arguments[name]) for name, step in rows.items()}
        axis, _ = record.rows or (-1, False)
        if isinstance(axis, str) and arguments[axis] >= 0:
            whole[axis] -= rank
            rows[axis] = lambda axis: axis - rank
        found = _inferred(record, shapes | {name: whole[name].shape for name in names}, whole) or {}
        of_batch = [known(shape[0] == whole[first].shape[0]) for shape in found.values() if shape]
        ranks = {name: len(shape) - 1 for name, shape in found.items()}
        if all(of_batch) and ranks == {name: len(shape) for name, shape in example.items()}:
            return rows, op
    entries = ["slice", first, None, 1]
    trees[first] = entries
    heads = [name for name in names if first_part(trees.get(name, 0)) == entries]
    heads += [name for name in names if trees.get(name) in heads]
    if record.key in _ENTRIES:
        heads = [name for name in names if name in _ENTRIES[record.key]]
    elif record.rows != (-1, False) or {*heads} != {*names}:
        return None
    if example is None or mapped.keys() - {*heads}:
        return None
    count = examples[heads[0]][0]
    folds: dict[str, Rule] = {  # angles, a bias or rows of which each example has one are for all its entries
        name: partial(_fold, steps[name], count)
        for name in heads
        if name in mapped or known(count == 1) or not known(shapes[name][0] == 1)
    }
    whole = arguments | {name: fold(arguments[name]) for name, fold in folds.items()}
    found = _inferred(record, shapes | {name: whole[name].shape for name in folds}, whole) or {}
    if not found or not all(known(each[0] == whole[heads[0]].shape[0]) for each in found.values()):
        return None

    def call(*given: Any) -> Any:
        return [each.unflatten(0, (-1, count)) for each in as_tuple(op(*given))]

    return folds, call


def _inferred(
    record: OpSpec, shapes: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns the shapes of the outputs; None if the op refuses the call."""
    try:
        check_shapes(record, shapes, arguments)
        return infer_shapes(record, shapes, arguments)
    except RecordError:
        return None


def _has_rows(tree: Any) -> bool:
    """Whether a shape is that of an input, or begins with its rows, as `x[:-1] + [1]`."""
    begin = first_part(tree)
    return isinstance(tree, str) or (isinstance(begin, list) and begin[2:] == [None, -1])


def _fold(step: Rule, count: Any, value: torch.Tensor) -> torch.Tensor:
    """Makes the batch and an example's first dimension one. Where that is 1, it is for all entries."""
    batch = step(value)
    if known(batch.shape[1] == 1):
        batch = batch.expand(-1, count, *batch.shape[2:])
    return batch.flatten(0, 1)


def _product_of_batch(record: OpSpec, *given: Any) -> torch.Tensor:
    """Computes products whose weights differ by example: torch's batched product, and its activation."""
    values = dict(zip(record.parameters, given, strict=True))
    is_vector = values["x"].dim() == 2
    for name in ("x", "residual"):
        if is_vector and values.get(name) is not None:
            values[name] = values[name].unsqueeze(1)
    inputs = [values.pop(entry.name) for entry in record.inputs]
    y: torch.Tensor = CPU_FUNCTIONS[record.key](*inputs, **values)
    return y.squeeze(1) if is_vector else y


def autocast_rule(record: OpSpec, op: Rule, device: str) -> Rule:
    """Returns the rule for torch.autocast. (`keep` needs no code: the op runs in the dtype that it is given.)

    `widest` promotes inputs that no kernel takes together. `lower` converts inputs to autocast's dtype, as
    torch does for products, unless one is in float64.
    """
    signature = signature_of(record)

    def rule(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(signature, args, kwargs)
        inputs = {entry.name: arguments[entry.name] for entry in record.inputs}
        given = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        floating = {n: t for n, t in given.items() if t.is_floating_point() and t.itemsize > 1}
        dtypes, wanted = {tensor.dtype for tensor in floating.values()}, None
        if record.autocast == "lower":
            wanted = None if torch.float64 in dtypes else torch.get_autocast_dtype(device)
        elif dtypes and record.combination_of({n: torch_name(t.dtype) for n, t in given.items()}) is None:
            wanted = functools.reduce(torch.promote_types, dtypes)
        if wanted is not None:
            arguments |= {name: tensor.to(wanted) for name, tensor in floating.items()}
        with torch.autocast(device, enabled=False):
            return op(*arguments.values())

    return rule


def cpu_rule(record: OpSpec) -> Rule:
    """Returns the rule for CPU tensors of an op without a CPU kernel: its function in `CPU_FUNCTIONS`."""
    complete = completion_of(signature_of(record))
    make_outputs = fake_rule(record, lambda *_: dict.fromkeys(record.sizes, 0))
    count, names = len(record.inputs), [entry.name for entry in record.attributes]
    made: Rule = lru_cache(_MOST_KEPT)(lambda form: [])  # the forms of outputs by those of arguments that fit

    def rule(*args: Any, **kwargs: Any) -> Any:
        values = complete(args, kwargs)
        if not (like := made(tuple(map(_form, values)))):
            like.append([_form(y) for y in as_tuple(make_outputs(*values))])
        outputs = [torch.empty_strided(*sizes, dtype=dtype) for *sizes, dtype, _ in like[0]]
        if cpu_function(record) is None:
            raise RecordError(
                f"{record.qualified_name}: the tensors are on the CPU, and the op has no CPU kernel. Move "
                "them to CUDA with .cuda(), or import the Python module that declares the op: its body then "
                "runs"
            )
        attributes = dict(zip(names, values[count:], strict=True))
        results = run_body(record, outputs, values[:count], attributes, record.qualified_name)
        return results if len(results) > 1 else results[0]

    return rule


def run_body(
    record: OpSpec,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor | None],
    attributes: Mapping[str, Any],
    where: str,
) -> tuple[torch.Tensor, ...]:
    """Computes an op on CPU tensors with its function in `CPU_FUNCTIONS`, in at least fp32, into `outputs`.

    Args:
        outputs: of an op whose sizes come from the data, they say the dtypes and ranks only.
        where: what errors begin with, such as that of a function that gives other shapes.
    """
    given = {name: narrow(value) for name, value in attributes.items()}
    results = as_tuple(CPU_FUNCTIONS[record.key](*map(widened, inputs), **given))
    if not len(results) == len(outputs) == len(record.outputs):
        raise RecordError(
            f"{where}: {record.schema} has {len(record.outputs)} outputs; the op returns {len(outputs)}, its "
            f"body {len(results)}"
        )
    for name, output, result in zip(record.outputs, outputs, results, strict=True):
        if output.dim() != result.dim() if record.sizes else output.shape != result.shape:
            raise RecordError(
                f"{where}: the body of {record.name} gives {name} the shape {list(result.shape)}, the op "
                f"{list(output.shape)}. Make them agree"
            )
    if record.sizes:
        return tuple(_stored(result, output.dtype) for output, result in zip(outputs, results, strict=True))
    for output, result in zip(outputs, results, strict=True):
        output.copy_(_stored(result, output.dtype))
    return tuple(outputs)


def widened(value: Any) -> Any:
    """Returns a tensor in at least fp32 where it is floating."""
    return value.float() if value is not None and value.is_floating_point() and value.itemsize < 4 else value


def _stored(result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds as kernels do: numbers beyond the largest of float8_e4m3fn, torch 2.11 makes NaN."""
    return (result.clamp(-448, 448) if dtype is torch.float8_e4m3fn else result).to(dtype)


def narrow(value: Any) -> Any:
    """Rounds a float attribute to fp32, as the kernels and ONNX do."""
    return ctypes.c_float(value).value if isinstance(value, float) else value


def sum_to(grad: torch.Tensor, shape: Sequence[Any]) -> torch.Tensor:
    """Sums a gradient over the dimensions that an input of this shape and of the same rank broadcast."""
    dims = [i for i, size in enumerate(shape) if known(size == 1)]
    return grad.sum(dims, keepdim=True) if dims else grad


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    """Returns the outputs of an op as a tuple, which one output is not."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


_HINTS = {
    "quantized": "convert it with .dequantize()",
    "nested": "pad it with torch.nested.to_padded_tensor()",
}


def refuse(record: OpSpec, kind: str) -> Rule:
    """Returns the rule for tensors that no kernel reads: an error that says what they are."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        hint = _HINTS.get(kind, "convert it with .to_dense()")
        raise RecordError(f"{record.qualified_name}: a {kind} tensor; the op takes dense tensors: {hint}")

    return rule
