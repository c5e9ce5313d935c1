"""Reads from Triton's intermediate code (TTIR) what a kernel does with its pointers.

MLIR prints a line for each operation. Names of values begin with "%" and hold within their region. The
parameters of a function that is not inlined (`@triton.jit(noinline=True)`) have the values of all its calls.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_NAME = r"%[\w$.-]+(?:#\d+)?"
_OPERATION = re.compile(rf'(?:({_NAME})(?::(\d+))? = )?"?([a-z_]+\.[\w.]+)"?(.*)')
_FUNCTION = re.compile(r'@("[^"]+"|[\w$.]+)')
_LOCATION = re.compile(r"\s*loc\([^()]*(?:\([^()]*\)[^()]*)*\)")
_WRITE = re.compile(r"tt\.(store|atomic_\w+|\w*descriptor_(store|reduce|scatter))")
_READ = re.compile(r"tt\.(load|\w*descriptor_(load|gather))")


@dataclass(frozen=True)
class KernelUses:
    """What a kernel does.

    Attributes:
        written: the parameters to which it stores, by position among those that are not constants.
        narrow: the pointers whose elements it finds by products of 32 bits alone.
        operations: the names of all operations.
    """

    written: frozenset[int]
    narrow: frozenset[int]
    operations: frozenset[str]


def kernel_uses(ttir: str) -> KernelUses:
    """Reads what a kernel does from its TTIR."""
    values = list(_read(ttir))
    written: set[int] = set()
    narrow: set[int] = set()
    for value in values:
        if value.operands and (_WRITE.match(value.operation) or _READ.match(value.operation)):
            sources = list(_sources([value.operands[0]], pointers_only=True))
            parameters = {source.parameter for source in sources if source.parameter is not None}
            if _WRITE.match(value.operation):
                written |= parameters
            offsets = [
                offset
                for source in sources
                if source.operation == "tt.addptr"
                for offset in source.operands[1:]
            ]
            if {source.bits for source in _sources(offsets) if source.operation == "arith.muli"} == {32}:
                narrow |= parameters
    return KernelUses(frozenset(written), frozenset(narrow), frozenset(value.operation for value in values))


@dataclass(eq=False)
class _Value:
    """The results of an operation, or an argument of a region. `bits`: of ints."""

    operation: str
    operands: list["_Value"] = field(default_factory=list)
    bits: int = 0
    parameter: int | None = None


def _sources(values: Iterable[_Value], pointers_only: bool = False) -> Iterator[_Value]:
    """Yields all values from which these were computed, but not those from which they were loaded.

    With `pointers_only`, the offsets that were added to pointers are left out.
    """
    left, seen = list(values), set()
    while left:
        value = left.pop()
        if id(value) not in seen and not _READ.match(value.operation):
            seen.add(id(value))
            yield value
            only_first = pointers_only and value.operation == "tt.addptr"
            left.extend(value.operands[:1] if only_first else value.operands)


@dataclass
class _Region:
    """A region: its operation, the names in it, and the values that its end hands on."""

    operation: str
    names: dict[str, _Value]
    arguments: list[_Value] = field(default_factory=list)
    results: list[_Value] = field(default_factory=list)


def _read(ttir: str) -> Iterator[_Value]:
    """Yields the values that operations make, with their operands."""
    regions = [_Region("module", {})]
    functions: dict[str, _Region] = {}
    calls: list[tuple[str, list[_Value], list[_Value]]] = []
    body = ttir[ttir.index("module ") :]
    for line in (_LOCATION.sub("", line).strip() for line in body.splitlines()[1:]):
        region = regions[-1]
        if line.startswith("}"):
            regions.pop()
            if not regions:
                break
            if line.endswith("{"):  # "else", or "do" of a while loop
                regions.append(
                    _Region(region.operation, dict(regions[-1].names), region.arguments, region.results)
                )
        elif line.startswith("^bb0") and region.operation == "scf.while":
            region.names.update(zip(re.findall(_NAME, line), region.results, strict=False))
        elif found := _OPERATION.match(line):
            name, count, operation, text = found.groups()
            text = text.partition(" : ")[0] if operation != "tt.func" else text
            operands = [region.names[used] for used in re.findall(_NAME, text) if used in region.names]
            if operation in ("scf.for", "scf.while", "scf.if"):
                inner = _open(region, operation, text, int(count or 1) if name else 0)
                regions.append(inner)
                _name(region, name, inner.results)
            elif operation == "tt.func":
                is_kernel = text.startswith(" public")
                names = {
                    used: _Value("argument", parameter=index if is_kernel else None)
                    for index, used in enumerate(re.findall(r"(%[\w$.-]+): ", text))
                }
                regions.append(_Region(operation, names, list(names.values())))
                functions[_FUNCTION.findall(text)[0]] = regions[-1]
            elif operation == "tt.call":
                results = [_Value("result") for _ in range(int(count or 1))]
                calls.append((_FUNCTION.findall(text)[0], operands, results))
                _name(region, name, results)
            elif operation == "tt.return":
                region.results = region.results or [_Value("result") for _ in operands]
                _flow(operands, region.results)
            elif operation == "scf.yield":
                _flow(operands, region.arguments)
                _flow(operands, region.results if region.operation != "scf.while" else [])
            elif operation == "scf.condition":
                _flow(operands[1:], region.results)
            else:
                bits = re.search(r"i(\d+)>?(?:\s*\{)?$", line)
                value = _Value(operation, operands, int(bits[1]) if bits else 0)
                yield value
                _name(region, name, [value] * int(count or 1))
                if line.endswith("{"):
                    regions.append(_Region(operation, dict(region.names)))
    for function, operands, results in calls:
        _flow(operands, functions[function].arguments)
        _flow(functions[function].results, results)


def _open(region: _Region, operation: str, text: str, count: int) -> _Region:
    """Opens the region of a loop or a branch, whose arguments have the form "%argument = %value"."""
    names = dict(region.names)
    arguments = []
    for name, initial in re.findall(rf"({_NAME}) = ({_NAME})", text):
        names[name] = _Value("argument", [names[initial]])
        arguments.append(names[name])
    if operation == "scf.for":
        arguments = arguments[1:]  # the first is the counter
    results = [_Value("result", arguments[index : index + 1]) for index in range(count)]
    return _Region(operation, names, arguments, results)


def _name(region: _Region, name: str | None, values: list[_Value]) -> None:
    if name is not None:
        region.names[name] = values[0]
        region.names.update({f"{name}#{index}": value for index, value in enumerate(values)})


def _flow(values: Iterable[_Value], targets: Iterable[_Value]) -> None:
    for value, target in zip(values, targets, strict=False):
        target.operands.append(value)
