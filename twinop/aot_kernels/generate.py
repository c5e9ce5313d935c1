"""Writes the C++ source of ops whose kernels are written in Python.

For each op the source has a function that describes a call: the plan for its dtypes, ranks, sizes and
attributes, with the kernels that it launches. Each launch has its variants as conditions. The compiled
kernels and the function bodies are files beside the source, which embeds them. `kernels/aot_kernels/` has
what it calls.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..building.cache import write
from ..errors import BuildError
from ..record.op_spec import DOMAIN_VERSION, OpSpec
from .expression import FUNCTIONS, Expression
from .plan import ZERO, Contents, DeviceOp, Fill, Kernel, Launch, Plan, Pointer, Scalar, Variant

_MOST_ARGUMENTS = 128  # of a launch (kernels/aot_kernels/run.cpp)
TEXTS = (
    "dtypes", "sizes", "shapes", "input_shapes", "limits", "in_place", "choices", "gradient", "autocast",
    "rows", "memory",
)  # fmt: skip
"""The texts of a record, which C++ sets by functions of these names."""

_OPERATORS = ("||", "&&", "==", "!=", "<", "<=", ">", ">=", "+", "*")
"""Those of C++ with two operands."""


def generate(contents: Contents, file: Path) -> None:
    """Writes the source and, in the folder <file>.files, what it embeds.

    BuildError: a launch has too many arguments, or a file cannot be written.
    """
    source = _Source(contents)
    _, *others = files_of(file)
    for old in others:
        if old.name not in source.files:
            old.unlink()
    for name, data in source.files.items():
        write(_folder(file) / name, data)
    write(file, source.text().encode())


def files_of(file: Path) -> list[Path]:
    """Returns the source, and what it embeds."""
    return [file, *_folder(file).glob("*")]


def _folder(file: Path) -> Path:
    return file.with_name(f"{file.name}.files")


class _Source:
    """The lines of one source, and the files that it embeds."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._embedded: dict[bytes, tuple[str, str]] = {}  # the variable and the file, by content
        self._names = [f"{_word(kernel.name)}_{i}" for i, kernel in enumerate(contents.kernels)]
        self._tables = [line for i in range(len(contents.kernels)) for line in self._images(i)]
        self._launchers: dict[Any, tuple[str, list[str]]] = {}  # functions that launch, by what they do
        self._ops = [line for op in contents.ops for line in self._op(op)]

    @property
    def files(self) -> dict[str, bytes]:
        """The content of each file to embed, by name."""
        return {name: data for data, (_, name) in self._embedded.items()}

    def text(self) -> str:
        contents = self._contents
        kernels = [
            f"    {_kernel(each, name)}," for each, name in zip(contents.kernels, self._names, strict=True)
        ]
        embedded = [
            f"TWINOP_EMBED({variable}, {_literal(name)});  // {sha256(data).hexdigest()[:16]}"
            for data, (variable, name) in self._embedded.items()
        ]
        launchers = [line for _, lines in self._launchers.values() for line in lines]
        lines = [
            "// Written by `twinop build`. What it embeds lies beside it, in the folder <this file>.files.",
            "#undef TWINOP_CUDA_ARCHS",
            f"#define TWINOP_CUDA_ARCHS {_literal(contents.cuda_archs)}",
            f"#define TWINOP_SOURCE {_literal(json.dumps(contents.source)[1:-1])}",
            '#include "twinop/aot_kernels/op.h"',
            "",
            *embedded,
            "",
            "namespace twinop {",
            "using namespace aot_kernels;",
            "namespace {",
            "",
            *self._tables,
            f"enum Index {{ {', '.join(self._names)} }};",
            "constexpr Kernel kKernels[] = {",
            *kernels,
            "};",
            f"KernelTable kTable(kKernels, {_literal(contents.cuda_archs)});",
            "",
            *launchers,
            "}  // namespace",
            *self._ops,
            "}  // namespace twinop",
            "",
            f"TWINOP_LIBRARY({_literal(contents.domain)}, {DOMAIN_VERSION})",
        ]
        return "\n".join(lines) + "\n"

    def _embed(self, name: str, data: bytes) -> str:
        """Returns the variable of a file's content; equal contents are embedded once."""
        return self._embedded.setdefault(data, (f"twinop_file_{len(self._embedded)}", name))[0]

    def _images(self, index: int) -> Iterable[str]:
        name = self._names[index]
        yield f"constexpr Image {name}_images[] = {{"
        for image in self._contents.kernels[index].images:
            target = f"{'compute' if image.is_ptx else 'sm'}_{image.arch}"
            # PTX is a text in C.
            code = image.code.rstrip(b"\0") + b"\0" if image.is_ptx else image.code
            variable = self._embed(f"{name}.{target}.{'ptx' if image.is_ptx else 'cubin'}", code)
            yield f'    {{"{target}", {variable}, {image.threads}, {image.shared}}},'
        yield "};"

    # ------------------------------------------------------------------------------------------ an op

    def _op(self, op: DeviceOp) -> Iterable[str]:
        record = op.record
        yield from ["", f"namespace {record.name}_op {{", ""]
        yield "void Plan(PlanRunner& run) {"
        for combination, plans in _grouped(op.plans, lambda plan: plan.combination):
            yield f"  if (run.HasDTypes({_dtypes(record, combination)})) {{"
            known = []
            for ranks, of_ranks in _grouped(plans, lambda plan: plan.ranks):
                known.append(f" ({', '.join('absent' if rank is None else str(rank) for rank in ranks)})")
                code = _Code(record)
                lines = [line for plan in of_ranks for line in self._plan(code, plan)]
                yield f"    if (run.HasRanks({_ranks(ranks)})) {{"
                yield from (f"      {line}" for line in [*code.declarations, *lines])
                if all(plan.guards for plan in of_ranks):
                    yield "      run.RefuseSizes();"
                yield "    }"
            yield from [f"    run.RefuseRanks({_literal(''.join(known))});", "  }"]
        yield from ["}", "", "const Device& Load(const twinop_call& call) {", "  return kTable.Load(call, {"]
        for combination, plans in _grouped(op.plans, lambda plan: plan.combination):
            used = dict.fromkeys(
                self._names[variant.kernel]
                for plan in plans
                for launch in _launches(plan)
                for variant in launch.variants
            )
            of_dtype = f"{_dtypes(record, combination, 1)[1:-1]}, {{{', '.join(used)}}}"
            yield f"      {{{of_dtype}}},"
        yield from ["  });", "}", ""]
        if op.bodies:
            yield from [
                "std::string_view Body(const Call& of_kernel) {",
                "  const CallOfPlan call(of_kernel);",
            ]
            for combination, bodies in _grouped(op.bodies, lambda body: body.combination):
                yield f"  if (call.HasDTypes({_dtypes(record, combination)})) {{"
                for body in bodies:
                    condition = "" if body.ranks is None else f"if (call.HasRanks({_ranks(body.ranks)})) "
                    variable = self._embed(f"{record.name}.{len(self._embedded)}.onnx", body.model)
                    yield f"    {condition}return TWINOP_EMBEDDED({variable});"
                yield "  }"
            yield from ["  CallOfPlan::RefuseBody();", "}", ""]
        yield f"}}  // namespace {record.name}_op"
        scratch = any(plan.temporaries or any(map(self._scratch, _launches(plan))) for plan in op.plans)
        texts = [f".{name}({_literal(text)})" for name in TEXTS if (text := record.texts.get(name))]
        texts += [".elementwise()"] * record.is_elementwise
        texts += [f".scratch<ScratchBytes<{record.name}_op::Plan>>()"] * scratch
        texts += [f".body<{record.name}_op::Body>()"] * bool(op.bodies)
        yield f"TWINOP_AOT_OP({record.name}, Record({_literal(record.schema)})"
        yield from (f"    {text}" for text in texts)
        yield ")"

    def _plan(self, code: "_Code", plan: Plan) -> Iterable[str]:
        lines = []
        for base, index, elements in plan.limits:
            labels = [
                self._contents.kernels[launch.variants[-1].kernel].label
                for launch in _launches(plan)
                for each in launch.arguments
                if isinstance(each, Pointer) and (each.base, each.index) == (base, index)
            ]
            limited = f"{index}, {elements}, {_literal((labels or [''])[0])}"
            lines.append(f"run.Limit{base.title()}({limited});")
        for i, size in enumerate(plan.temporaries):
            memory = f"run.Temporary({code.number(size)})"
            lines.append(f"[[maybe_unused]] const Pointer temporary{i} = {memory};")
        for step in plan.steps:
            if isinstance(step, Launch):
                grid = "{" + ", ".join(map(code.number, step.grid)) + "}"
                more = f", {self._scratch(step)}" if self._scratch(step) else ""
                name, used = self._launcher(code.record, step)
                arguments = ", ".join(["run", *(code.argument(step.arguments[index]) for index in used)])
                lines += [f"if (run.Begins({grid}{more}))", f"  {name}({arguments});"]
            elif isinstance(step, Fill):
                filled = f"{code.argument(step.pointer)}, {code.number(step.bytes)}, {step.value}"
                lines.append(f"run.Fill({filled});")
            else:
                lines.append(f"run.Refuse({_literal(step.message)});")
        guards = " && ".join(code.number(guard, len(plan.guards) > 1) for guard in plan.guards)
        lines.append("return;")
        yield from [f"if ({guards}) {{", *(f"  {line}" for line in lines), "}"] if guards else lines

    def _scratch(self, launch: Launch) -> int:
        """The bytes for each program, the most of all variants and images."""
        kernels = [self._contents.kernels[variant.kernel] for variant in launch.variants]
        return max(image.global_scratch * kernel.cluster for kernel in kernels for image in kernel.images)

    def _launcher(self, record: OpSpec, launch: Launch) -> tuple[str, list[int]]:
        """Returns the function that chooses a variant and launches it, and the arguments that it takes."""
        if len(launch.arguments) > _MOST_ARGUMENTS:
            raise BuildError(
                f"{record.name}: {len(launch.arguments)} arguments in a launch of a kernel, at most "
                f"{_MOST_ARGUMENTS} are supported"
            )
        assert launch.variants and not launch.variants[-1].requirements, "the last variant is not general"
        named = (each for variant in launch.variants for each in (*variant.parameters, *variant.requirements))
        used = sorted({index for index, _ in named})
        names = {index: f"{_word(launch.arguments[index].name or 'p')}_{index}" for index in used}
        taken = [f"{_kind(launch.arguments[index])} {name}" for index, name in names.items()]
        key = (launch.variants, *taken)
        if key not in self._launchers:
            kernel = self._contents.kernels[launch.variants[-1].kernel]
            name = f"launch_{_word(kernel.name)}_{len(self._launchers)}"
            taken.insert(0, "const PlanRunner& run")
            lines = [f"// {_literal(kernel.label)[1:-1]}", f"void {name}({', '.join(taken)}) {{"]
            for variant in launch.variants:
                lines += (f"  {line}" for line in self._variant(launch, variant, names))
            self._launchers[key] = name, [*lines, "}", ""]
        return self._launchers[key][0], used

    def _variant(self, launch: Launch, variant: Variant[int], names: dict[int, str]) -> Iterable[str]:
        conditions = [f"{assumed}({names[index]})" for index, assumed in variant.requirements]
        if conditions:
            yield f"if ({' && '.join(conditions)})"
        parameters = []
        for index, kind in variant.parameters:
            argument = launch.arguments[index]
            if isinstance(argument, Pointer):
                parameters.append(names[index])
            else:
                type_ = f"Type::k{kind.title()}"
                parameters.append(f"{{{type_}, {_literal(argument.name)}, {names[index]}}}")
        launched = f"run.Launch(Index::{self._names[variant.kernel]}, {{{', '.join(parameters)}}});"
        yield f"  return {launched}" if conditions else launched


class _Code:
    """Expressions of an op as C++."""

    def __init__(self, record: OpSpec) -> None:
        self.record = record
        self._variables: dict[str, str] = {}

    @property
    def declarations(self) -> list[str]:
        """The declarations of the sizes and attributes that were used."""
        return list(self._variables.values())

    def number(self, expression: Expression, inside: bool = False) -> str:
        """Returns an expression; if it has an operator and is inside of another one, in parentheses."""
        name, operands = expression.operation, expression.operands
        if name == "constant":
            return _constant(operands[0])
        if name in _OPERATORS:
            left, right = (self.number(each, inside=True) for each in operands)
            left = f"Int({left})" if re.fullmatch(r"-?\d+", left) else left  # not C++'s operation on ints
            return f"({left} {name} {right})" if inside else f"{left} {name} {right}"
        if name == "!":
            return f"!{self.number(operands[0], inside=True)}"
        if name in FUNCTIONS:
            return f"{name}({', '.join(map(self.number, operands))})"
        if name == "text_is":
            return f"run.TextIs({operands[0]}, {_literal(operands[1])})"
        return self._variable(name, *operands)

    def _variable(self, kind: str, index: int = 0, dimension: int = 0) -> str:
        if kind == "size":
            name = f"{self.record.inputs[index].name}_{dimension}"
            declared = f"Int {name} = run.Size({index}, {dimension})"
        elif kind == "arch":
            name, declared = kind, "Int arch = run.Arch()"
        else:
            attribute = self.record.attributes[index]
            name = f"{attribute.name}_"  # no word of C++
            type_ = "double" if attribute.kind == "float" else "Int"
            declared = f"{type_} {name} = run.{'Float' if type_ == 'double' else 'Int'}Attribute({index})"
        self._variables[name] = f"const {declared};"
        return name

    def argument(self, argument: Pointer | Scalar) -> str:
        """Returns the value of a launch's argument."""
        if isinstance(argument, Scalar):
            text = self.number(argument.value)
            return f"ToFloat({text})" if _kind(argument) == "double" else text
        base = f"run.{argument.base.title()}({argument.index})"
        if argument.base == "temporary":
            base = f"temporary{argument.index}"
        return base if argument.offset == ZERO else f"{base} + {self.number(argument.offset, inside=True)}"


def _grouped(entries: Iterable[Any], key: Any) -> list[tuple[Any, list[Any]]]:
    """Returns the entries by a key, in the order of the first of each."""
    groups: dict[Any, list[Any]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return list(groups.items())


def _launches(plan: Plan) -> list[Launch]:
    return [step for step in plan.steps if isinstance(step, Launch)]


def _kernel(kernel: Kernel, name: str) -> str:
    more = f".ScratchPointers({kernel.scratch_pointers})" * bool(kernel.scratch_pointers)
    more += f".Cluster({kernel.cluster})" * (kernel.cluster > 1)
    more += ".Cooperative()" * kernel.cooperative + ".Dependent()" * kernel.pdl
    return f"Kernel({_literal(kernel.name)}, {_literal(kernel.label)}, {name}_images){more}"


def _kind(argument: Pointer | Scalar) -> str:
    """The C++ type of a launch's argument."""
    if isinstance(argument, Pointer):
        return "Pointer"
    return "double" if argument.type.startswith(("fp", "bf")) else "Int"


def _dtypes(record: OpSpec, combination: int, count: int | None = None) -> str:
    dtypes = record.combinations[combination]
    return f"{{{', '.join(f'TWINOP_{dtypes[entry.name].upper()}' for entry in record.inputs[:count])}}}"


def _ranks(ranks: Sequence[int | None]) -> str:
    return f"{{{', '.join('-1' if rank is None else str(rank) for rank in ranks)}}}"


def _word(text: str) -> str:
    return re.sub(r"\W", "_", text, flags=re.ASCII)[:60]  # it becomes part of a file's name


def _constant(value: int | float) -> str:
    if isinstance(value, int):
        return str(value) if -(2**63) < value < 2**63 else "Int(-9223372036854775807 - 1)"
    if math.isnan(value):
        return "static_cast<double>(NAN)"
    return repr(value) if math.isfinite(value) else f"{'-' * (value < 0)}HUGE_VAL"


def _literal(text: str) -> str:
    special = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    return '"' + "".join(special.get(c, c if ord(c) >= 32 else f"\\{ord(c):03o}") for c in text) + '"'
