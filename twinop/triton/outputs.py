"""Says in the language of records which shapes and dtypes the outputs of traced launchers have."""

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from ..aot_kernels.expression import Expression
from ..errors import BuildError, RecordError
from ..record.dtypes import ELEMENT_TYPES
from ..record.op_spec import OpSpec
from ..record.schema_text import entries, parse_shape, redeclared
from ..record.shapes import evaluate, largest_sizes
from .recorder import Output
from .symbols import Call

_SIGNS = {"+": "+", "-": "-", "*": "*", "FloorDivide": "//"}
_UNSUPPORTED = ("str", "complex64", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz")

Traced = Mapping[tuple[tuple[int | None, ...], tuple[Any, ...]], Sequence[tuple[Output, ...]]]
"""The outputs of every path by the ranks of the inputs, and the attributes: None for ints and floats."""


def with_dtypes(record: OpSpec, combination: int, traced: Sequence[tuple[Output, ...]], place: str) -> OpSpec:
    """Adds the dtypes of the outputs to a combination of dtypes.

    BuildError: they differ between calls, are not those that the record names, or no library has them.
    """
    texts = [text.strip() for text in record.dtypes.split(";")]
    named = dict(part.split("=") for part in texts[combination].split()[1:])
    for index, name in enumerate(record.outputs):
        found = sorted({outputs[index].dtype for outputs in traced})
        expected = record.combinations[combination][name]
        if len(found) > 1:
            raise BuildError(
                f"{place}: output {name} of {record.name} has {' or '.join(found)}, as the call goes"
            )
        if found[0] not in ELEMENT_TYPES or found[0] in _UNSUPPORTED:
            raise BuildError(
                f"{place}: output {name} of {record.name} has the dtype {found[0]}, which no op has"
            )
        if found[0] != expected:
            if name in named:
                raise BuildError(
                    f"{place}: output {name} of {record.name} has the dtype {found[0]}; "
                    f"dtypes={texts[combination]!r} says {expected}"
                )
            texts[combination] += f" {name}={found[0]}"
    return redeclared(record, dtypes="; ".join(texts))


def with_shapes(record: OpSpec, traced: Traced, place: str) -> OpSpec:
    """Adds the shapes of the outputs; BuildError: the record names others, or the language has none."""
    given = entries(record.texts.get("shapes", ""))
    found = {}
    for index, name in enumerate(record.outputs):
        if name in record.written:
            continue
        tried = [given[name]] if name in given else _candidates(record, traced, index)
        fitting = (text for text in tried if _fits(record, text, traced, index))
        if (text := next(fitting, None)) is None:
            raise BuildError(
                f"{place}: output {name} of {record.name} has another shape than {given[name]!r}"
                if name in given
                else f"{place}: no expression was found for the shape of output {name} of {record.name}. "
                f'Give it: shapes="{name} = [{record.inputs[0].name}[0]]"'
            )
        found[name] = text
    first = record.inputs[0].name
    return redeclared(
        record, shapes="; ".join(f"{name} = {text}" for name, text in found.items() if text != first)
    )


def _candidates(record: OpSpec, traced: Traced, output: int) -> Iterator[str]:
    names = [entry.name for entry in record.inputs if not entry.optional]
    yield from names
    for name in names:
        for count in range(1, 4):
            yield f"{name}[:-{count}]"
            yield f"{name}[{count}:]"
            yield f"{name}[-{count}:]"
            yield f"{name}[:{count}]"
    # With the sizes of one trace, the first ones counted from the start or from the end.
    for (ranks, _), paths in traced.items():
        shape = paths[0][output].shape
        for from_end in (False, True):
            sizes = [_text(record, size, ranks, from_end) for size in shape]
            if None in sizes:
                continue
            yield f"[{', '.join(map(str, sizes))}]"
            for kept in range(1, len(sizes)):
                head, tail = (f"[{', '.join(map(str, part))}]" for part in (sizes[:kept], sizes[kept:]))
                for name, rank in zip([entry.name for entry in record.inputs], ranks, strict=True):
                    if rank is not None and rank >= kept:
                        yield f"{name}[:{kept - rank}] + {tail}" if rank > kept else f"{name} + {tail}"
                        yield f"{head} + {name}[{kept}:]"


def _text(record: OpSpec, size: Expression, ranks: tuple[int | None, ...], from_end: bool) -> str | None:
    """Writes a size in the language of records; None where it has no word for it."""

    def text(part: Expression) -> str:
        match part:
            case Expression("constant", (int(value),)):
                return str(value)
            case Expression("size", (tensor, dimension)):
                index = dimension - (ranks[tensor] or 0) if from_end else dimension
                return f"{record.inputs[tensor].name}[{index}]"
            case Expression("attribute", (index,)) if record.attributes[index].kind in ("int", "bool"):
                return record.attributes[index].name
        return f"({text(part.operands[0])} {_SIGNS[part.operation]} {text(part.operands[1])})"

    try:
        found = text(size)
    except LookupError:  # another operation, or the compute capability
        return None
    return found[1:-1] if found.startswith("(") else found


def _fits(record: OpSpec, text: str, traced: Traced, output: int) -> bool:
    """Whether a text gives the shapes of all traces, for several sizes."""
    random = Random(0)
    expression = parse_shape(text, {*record.parameters, *record.sizes})
    for (ranks, given), paths in traced.items():
        # Products of all sizes stay below the number of elements that a tensor may have.
        dimensions = max(sum(rank or 0 for rank in ranks), *(len(path[output].shape) for path in paths), 1)
        largest = min(9000, max(40, int(2 ** (58 / dimensions))))
        for _ in range(3):
            sizes = tuple(
                None if r is None else tuple(random.sample(range(largest // 9, largest), r)) for r in ranks
            )
            attributes = tuple(random.randrange(2, 9) if each is None else each for each in given)
            shapes: dict[str, Any] = dict(zip((entry.name for entry in record.inputs), sizes, strict=True))
            named = dict(zip((entry.name for entry in record.attributes), attributes, strict=True))
            for name, required in record.input_shapes.items():
                if shapes[name] is not None:
                    shapes[name] = evaluate(record, required, shapes, named)
            call = Call(tuple(shapes.values()), attributes)
            try:
                shape = evaluate(record, expression, shapes, named | largest_sizes(record, shapes, named))
                if any(shape != tuple(map(call.value, path[output].shape)) for path in paths):
                    return False
            except (RecordError, ArithmeticError, IndexError):
                return False
    return True
