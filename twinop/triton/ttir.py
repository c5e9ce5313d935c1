"""Reads from Triton's intermediate code (TTIR) what a kernel does with its pointers.

A parameter of a function that is not inlined (`@triton.jit(noinline=True)`) has the values of all its calls.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from tempfile import NamedTemporaryFile
from typing import Any

_WRITE = re.compile(r"tt\.(store|atomic_\w+|\w*descriptor_(store|reduce|scatter))")
_READ = re.compile(r"tt\.(load|\w*descriptor_(load|gather))")
_ENDS = ("scf.yield", "scf.condition", "tt.return")


@dataclass(frozen=True)
class KernelUses:
    """What a kernel does."""

    # The parameters to which it stores, by position among those that are not constants.
    written: frozenset[int]
    narrow: frozenset[int]  # the pointers whose elements it finds by products of 32 bits alone
    operations: frozenset[str]  # the names of all


@cache
def kernel_uses(ttir: str) -> KernelUses:
    """Reads what a kernel does from its TTIR."""
    from triton._C.libtriton import ir

    values = _Values()
    with NamedTemporaryFile("w", suffix=".ttir") as file:
        file.write(ttir)
        file.flush()
        ir.parse_mlir_module(file.name, _context()).walk(values.add)
    values.connect_calls()
    written: set[int] = set()
    narrow: set[int] = set()
    for operation in values.operations:
        if operation.operands and (_WRITE.match(operation.name) or _READ.match(operation.name)):
            pointers = list(values.sources(operation.operands[:1], pointers_only=True))
            parameters = {values.parameters[value] for value in pointers if value in values.parameters}
            if _WRITE.match(operation.name):
                written |= parameters
            added = [values.made[value] for value in pointers if value in values.made]
            offsets = [offset for each in added if each.name == "tt.addptr" for offset in each.operands[1:]]
            factors = [values.made[value] for value in values.sources(offsets) if value in values.made]
            if {each.type[-3:] for each in factors if each.name == "arith.muli"} == {"i32"}:
                narrow |= parameters
    return KernelUses(
        frozenset(written), frozenset(narrow), frozenset(each.name for each in values.operations)
    )


@cache
def _context() -> Any:
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    context = ir.context()
    ir.load_dialects(context)
    make_backend(GPUTarget("cuda", 90, 32)).load_dialects(context)
    return context


@dataclass(frozen=True)
class _Operation:
    """An operation. `type`: of its result, or of the elements of a tensor."""

    name: str
    operands: list[int]
    type: str


class _Values:
    """The values of a module, by MLIR's ids, and what they are computed from."""

    def __init__(self) -> None:
        self.operations: list[_Operation] = []  # without regions of code, in no order
        self.made: dict[int, _Operation] = {}  # by what they make
        self.parameters: dict[int, int] = {}  # the positions of the kernel's
        self._flows: defaultdict[int, set[int]] = defaultdict(set)  # into results and arguments of regions
        self._arguments: dict[int, list[int]] = {}  # by region
        self._ends: defaultdict[int, list[list[int]]] = defaultdict(list)  # what regions hand on
        self._functions: dict[str, int] = {}
        self._calls: list[tuple[str, list[int], list[int]]] = []

    def add(self, operation: Any) -> None:
        """Adds an operation; those in its regions were added before."""
        name = operation.get_name()
        operands = [operation.get_operand(i).id() for i in range(operation.get_num_operands())]
        results = [operation.get_result(i).id() for i in range(operation.get_num_results())]
        regions = [operation.get_region(i).id() for i in range(operation.get_num_regions())]
        if block := operation.get_block():
            region = block.get_parent().id()
            arguments = [block.get_argument(i).id() for i in range(block.get_num_arguments())]
            self._arguments.setdefault(region, arguments)
        if name in _ENDS:
            self._ends[region].append(operands[1:] if name == "scf.condition" else operands)
        elif name == "tt.func":
            self._functions[operation.get_str_attr("sym_name")] = regions[0]
            if operation.get_str_attr("sym_visibility") == "public":
                self.parameters = {value: i for i, value in enumerate(self._arguments[regions[0]])}
        elif name == "tt.call":
            self._calls.append((operation.get_flat_symbol_ref_attr("callee"), operands, results))
        elif name == "scf.for":
            arguments = self._arguments[regions[0]][1:]  # the first is the counter
            self._flow(arguments, operands[3:], *self._ends[regions[0]])
            self._flow(results, arguments)
        elif name == "scf.while":
            before, after = regions
            self._flow(self._arguments[before], operands, *self._ends[after])
            self._flow(self._arguments[after], *self._ends[before])
            self._flow(results, *self._ends[before])
        elif name == "scf.if":
            self._flow(results, *(end for region in regions for end in self._ends[region]))
        else:
            kind = str(operation.get_result(0).get_type()).rstrip(">") if results else ""
            self.operations.append(_Operation(name, operands, kind))
            self.made.update(dict.fromkeys(results, self.operations[-1]))

    def connect_calls(self) -> None:
        """Connects functions with their calls, when all operations are added."""
        for function, operands, results in self._calls:
            region = self._functions[function]
            self._flow(self._arguments[region], operands)
            self._flow(results, *self._ends[region])

    def _flow(self, targets: Iterable[int], *sources: list[int]) -> None:
        for each in sources:
            for target, source in zip(targets, each, strict=False):
                self._flows[target].add(source)

    def sources(self, values: Iterable[int], pointers_only: bool = False) -> Iterator[int]:
        """Yields what these were computed, not loaded from; `pointers_only`: without added offsets."""
        left, seen = list(values), set[int]()
        while left:
            value = left.pop()
            operation = self.made.get(value)
            if value in seen or (operation is not None and _READ.match(operation.name)):
                continue
            seen.add(value)
            yield value
            left.extend(self._flows[value])
            if operation is not None:
                only_first = pointers_only and operation.name == "tt.addptr"
                left.extend(operation.operands[:1] if only_first else operation.operands)
