"""Puts the matmuls of a file in 16 bits in 8 bits, with a scale for each row: `--dtype float8`.

Matches: CustomLinear and CustomLinearSwiglu with a constant weight, in a file in 16 bits that has been
compared with its original.
Writes: CustomLinearFp8, whose weight in e4m3 has a scale for each output channel. Norms, GELU and gates
before it return their result in 8 bits, with a scale for each row; what others return goes through
CustomQuantizeRows. In decoders, CustomLinearW8 and CustomLinearW8Swiglu, which read x in 16 bits, as a step
has few rows: all that count there are the bytes of the weights.
Leaves alone: the first and the last matmuls, and those that 8 bits make slower.
Such a file is close to the original, and never equal. What 8 bits do to the result of each matmul and to the
outputs is measured on the CPU. Where that is too much, matmuls go back, those first whose errors are large
for the time that they save.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass

from twinop.deploy.ort_runs import NotRunnable
from twinop.errors import ExportError, TwinopError, option
from twinop.model import weights
from twinop.model.files import EXTERNAL_DATA_BYTES, save
from twinop.model.weights import clip
from twinop.record.op_spec import DOMAIN

from . import decoders, equivalence
from . import graph as g
from .comparison import DEFECT
from .inputs import hides_end
from .linear_fp8 import LINEAR_8, STEP, write
from .load import reopen
from .precision import DTYPES
from .prepare import clean
from .report import Float8
from .segments import cut, extract, reads
from .sliced import Chain, Runnable, run_any, runnable
from .source import FLOAT8
from .stream import rounded
from .verifier import Verifier
from .weight_check import check_quantized

_FASTER = ((2048, 768), (512, 2048))
"""From so many rows on, 8 bits are faster if K and N have at least so much (a layer's matmuls on an H200,
issue 58). Layers of 768 and 1,024 lose at 512 rows; fewer rows and smaller layers were not measured."""
_MATMULS = {"Conv", "ConvTranspose", "FusedMatMul", "Gemm", "MatMul", "MatMulNBits"}
_PRODUCERS = (
    "CustomAddLayerNorm", "CustomAddRmsNorm", "CustomGelu", "CustomLayerNorm", "CustomRmsNorm",
    "CustomSwigluPacked",
)  # fmt: skip
_GELUS = {"gelu": "none", "gelu_tanh": "tanh"}
_LINEAR, _GATED = "CustomLinear", "CustomLinearSwiglu"
_W8 = {_LINEAR: "CustomLinearW8", _GATED: "CustomLinearW8Swiglu"}


# ------------------------------------------------------------------------------------ which matmuls


def matmuls(model: ir.Model, rows: int) -> tuple[list[str], dict[str, int]]:
    """Returns the matmuls that can be in 8 bits, by their outputs' names, and how many cannot, by reason;
    `rows`: that they get, 0 takes those, too, that 8 bits make slower, as decoders do."""
    is_decoder = decoders.is_decoder(model)
    inner, names, kept = _between(model.graph), list[str](), Counter[str]()
    found = {node: _why_not(node, is_decoder) for node in filter(_is_matmul, model.graph)}
    found |= {node: "the first or the last one" for node in found if node not in inner}
    able = [node for node, reason in found.items() if not reason]
    for node, reason in found.items():
        reason = reason or _why_slow(node, 0 if is_decoder else rows, able)
        names += [] if reason else [str(node.outputs[0].name)]
        kept.update([f"{node.op_type}: {reason}"] if reason else [])
    return names, dict(kept)


def _is_matmul(node: ir.Node) -> bool:
    is_known = node.op_type in _MATMULS and g.is_constant(node.inputs[1])
    return node.op_type.startswith(_LINEAR) if node.domain == DOMAIN else is_known


def _between(graph: ir.Graph) -> set[ir.Node]:
    """Returns the nodes that have a matmul before them, and one behind them."""
    found, before, after = set[ir.Node](), set[ir.Value](), set[ir.Value]()
    for node in graph:
        if not before.isdisjoint(reads(node)):
            found.add(node)
        if node in found or _is_matmul(node):
            before.update(node.outputs)
    for node in reversed(graph):
        is_before = not after.isdisjoint(node.outputs)
        found -= set() if is_before else {node}
        if is_before or _is_matmul(node):
            after.update(reads(node))
    return found


def _why_not(node: ir.Node, is_decoder: bool) -> str:
    """Returns why a matmul cannot be in 8 bits, or ""."""
    if node.domain != DOMAIN or node.op_type not in (_LINEAR, _GATED):
        return "no op has it in 8 bits"
    x, tensor = node.inputs[0], g.tensor(node.inputs[1])
    kinds = {value.dtype for value in node.inputs if value is not None}
    if x is None or tensor is None or len(kinds) > 1 or not kinds.issubset(DTYPES.values()):
        return "its weight is not constant, or not all of it is in 16 bits"
    if node.op_type == _GATED and not is_decoder and g.attribute(node, "activation", "silu") != "silu":
        return "a gate of GELU"
    if any(size % STEP for size in weights.sizes(tensor)):
        return f"K or N is no multiple of {STEP}"
    return ""


def _why_slow(node: ir.Node, rows: int, others: Collection[ir.Node]) -> str:
    """Returns why 8 bits are no faster for a matmul, beside others that can be in 8 bits, or ""."""
    alike = [each for each in others if each.inputs[0] is node.inputs[0]]  # narrow k and v read what q reads
    found = [g.tensor(each.inputs[1]) for each in (node, *alike)]
    shape, *shapes = [weights.sizes(each) for each in found if each is not None]
    smallest = max(map(min, (shape, *shapes)))
    if rows and not any(rows >= least and smallest >= size for least, size in _FASTER):
        return f"8 bits are no faster for {rows} rows and a weight of {' x '.join(map(str, shape))}"
    return ""


# ------------------------------------------------------------------------------------ rewriting


def rewrite(model: ir.Model, names: Collection[str]) -> dict[str, tuple[str, bool]]:
    """Puts the matmuls whose outputs have these names in 8 bits, in place. Returns of each output of a matmul
    in 8 bits the weight in 16, and whether e4m3 has its transpose."""
    g.reserve_names(model)
    linears = {node: None for node in model.graph if node.outputs[0].name in names}
    sources = dict[str, tuple[str, bool]]()
    if decoders.is_decoder(model):
        for node in linears:
            sources |= _write(node, _W8[node.op_type], node.inputs[:1])
    else:
        _norm_before(linears)
        for node in [*linears]:
            _split(node, linears)
        readers = dict[ir.Value | None, list[ir.Node]]()
        for node in [node for node in model.graph if node in linears]:
            readers.setdefault(node.inputs[0], []).append(node)
        for nodes in readers.values():
            scaled = _quantize(nodes)
            for node in nodes:
                sources |= _write(node, LINEAR_8, scaled)
    clean(model)
    g.share_constants(model.graph)
    model.ir_version = max(model.ir_version, 9)  # the first with e4m3
    return sources


def _norm_before(linears: Collection[ir.Node]) -> None:
    """Lets a norm normalise what matmuls do themselves in 16 bits, once for all that read it."""
    known = dict[tuple[ir.Value | None, float], ir.Value]()
    for node in linears:
        x, eps = node.inputs[0], g.attribute(node, "rms_eps", 0.0)
        if eps > 0 and (x, eps) not in known:
            attributes, shape = {"eps": eps, "axis": -1, "offset": 0}, g.dims(x)
            known[x, eps] = g.add(node, "CustomRmsNorm", [x], attributes, domain=DOMAIN, shape=shape)
        node.replace_input_with(0, known.get((x, eps), x))


def _split(node: ir.Node, linears: dict[ir.Node, None]) -> None:
    """Parts a matmul from its gate; from its GELU, if that is read in 8 bits only."""
    [y], activation = node.outputs, g.attribute(node, "activation", "none")
    is_gated, layout = node.op_type == _GATED, g.attribute(node, "layout", "nk")
    has_others = y.is_graph_output() or any(use.node not in linears or use.idx for use in y.uses())
    if not is_gated and (activation not in _GELUS or has_others):
        return
    shape = [*(g.dims(y) or [])[:-1], (g.dims(node.inputs[1]) or [0, 0])[1 if layout == "kn" else 0]]
    like = ir.Value(type=y.type, shape=None if y.shape is None else ir.Shape(shape))
    plain = {"activation": "none", "layout": layout}
    [wide] = g.add_like(node, _LINEAR, node.inputs, plain, [like], domain=DOMAIN)
    op_type = "CustomSwigluPacked" if is_gated else "CustomGelu"
    attributes = {} if is_gated else {"approximate": _GELUS[activation]}
    [new] = g.add_like(node, op_type, [wide], attributes, [y], domain=DOMAIN)
    del linears[node]
    linears[g.maker(wide)] = None
    g.replace(y, new)


def _producer(x: ir.Value) -> ir.Node | None:
    """Returns the node that computes a value, if it can return it in 8 bits."""
    node = g.producer(x, *_PRODUCERS, domain=DOMAIN)
    if node is None or node.outputs[0] is not x or g.attribute(node, "axis", -1) not in (-1, g.rank(x) - 1):
        return None
    return node if {each.dtype for each in node.inputs if each is not None} == {x.dtype} else None


def _quantize(nodes: list[ir.Node]) -> Sequence[ir.Value]:
    """Returns what matmuls read in 8 bits in the place of their x, and its scales."""
    x = nodes[0].inputs[0]
    assert x is not None
    rows, maker = None if x.shape is None else ir.Shape([*x.shape][:-1]), _producer(x)
    q = ir.Value(type=ir.TensorType(ir.DataType.FLOAT8E4M3FN), shape=x.shape)
    likes = [q, ir.Value(type=ir.TensorType(ir.DataType.FLOAT), shape=rows)]
    if maker is None:
        return g.add_like(nodes[0], "CustomQuantizeRows", [x], {}, likes, domain=DOMAIN)
    attributes = {name: each.value for name, each in maker.attributes.items() if name != "axis"}
    likes, op_type = [*likes, *maker.outputs], f"{maker.op_type}Fp8"
    made = g.add_like(maker, op_type, maker.inputs, attributes, likes, domain=DOMAIN)
    for old, new in zip(likes[2:], made[2:], strict=True):
        g.replace(old, new)
    return made[:2]


def _write(node: ir.Node, op_type: str, rows: Sequence[ir.Value | None]) -> dict[str, tuple[str, bool]]:
    """Puts a matmul in 8 bits in the place of one in 16; `rows`: x, in 8 bits with its scale."""
    weight, is_kn = node.inputs[1], g.attribute(node, "layout", "nk") == "kn"
    tensor = g.tensor(weight)
    assert tensor is not None and weight is not None and node.graph is not None
    matrix = weights.transpose(tensor) if is_kn else tensor
    scales, name = weights.row_scales(matrix), f"{weight.name}_fp8"
    made = [g.initializer(node.graph, each, name) for each in (weights.quantized(matrix, scales), scales)]
    new = write(node, op_type, [*rows, *made])
    g.replace(node.outputs[0], new)
    return {str(new.name): (str(weight.name), is_kn)}


# ------------------------------------------------------------------------------------ measuring


def _worst_first(model: ir.Model, errors: Mapping[str, float]) -> list[str]:
    """Returns the matmuls by their errors for the time that 8 bits save: squares of errors add up to that of
    an output, and the time grows with the weight."""
    nodes = [node for node in model.graph if node.outputs[0].name in errors]
    tensors = {node.outputs[0].name: g.tensor(node.inputs[1]) for node in nodes}
    sizes = {name: prod(weights.sizes(each)) for name, each in tensors.items() if each is not None}
    return sorted(errors, key=lambda name: errors[name] ** 2 / sizes[name], reverse=True)


def _put_rows_in_8_bits(model: ir.Model) -> ir.Model:
    """Gives the matmuls of a decoder their x as they have it in a prompt, whose rows are many, in place."""
    for node in [node for node in model.graph if node.op_type in _W8.values()]:
        _norm_before([node])
        node.attributes.pop("rms_eps", None)
        x, (q, scale) = node.inputs[0], _quantize([node])
        assert x is not None and x.dtype is not None
        wide = g.add(node, "Cast", [q], {"to": int(ir.DataType.FLOAT)})
        rows = g.add(node, "Unsqueeze", [scale, g.int_constant(node, [-1])])
        scaled = g.add(node, "Mul", [wide, rows])
        node.replace_input_with(0, g.add(node, "Cast", [scaled], {"to": int(x.dtype)}, shape=g.dims(x)))
    return model


class _Trial:
    """Runs forms of a file on the CPU, on the inputs on which it was compared with its original. `plain` has
    the outputs of the file in 16 bits, once it has run (`errors`)."""

    def __init__(self, verifier: Verifier, model: ir.Model) -> None:
        self.source = source = verifier.source
        self.model = model
        if verifier.whole is not None:
            found = verifier.whole.reference
        else:
            original = _what(source.finished(source.original.clone()))
            found, _ = verifier.reference(original, source.original)
        count = found.typical
        found = replace(found, cases=found.cases[:count], outputs=found.outputs[:count], edge=[])
        self.reference = found if all(map(hides_end, found.cases)) else found.without(hides_end)
        self.plain: equivalence.Outputs = []

    def finished(self, model: ir.Model) -> ir.Model:
        """Gives a model the function bodies of the nodes that it has now, in place."""
        self.source.finished(model)
        RemoveUnusedFunctionsPass()(model)
        return model

    def error(self, names: Collection[str]) -> float:
        """Returns the largest error of an output, with these matmuls in 8 bits. Those of a decoder are tried
        with few rows and with many, whose x they put in 8 bits, too."""
        rewrite(model := self.model.clone(), names)
        is_decoder = decoders.is_decoder(model)
        many = self._run(_put_rows_in_8_bits(model.clone()))[0] if is_decoder else 0.0
        return max(self._run(model)[0], many)

    def errors(self, names: Sequence[str]) -> tuple[float, dict[str, float]]:
        """Returns the error of the file as it is, and what 8 bits change in the result of each matmul."""
        model, copies = self.model.clone(), list[str]()
        g.reserve_names(model)
        for node in [node for node in model.graph if node.outputs[0].name in names]:
            attributes = {name: each.value for name, each in node.attributes.items()}
            [y] = g.add_like(node, node.op_type, node.inputs, attributes, node.outputs, domain=node.domain)
            _compare(model, node.outputs[0], y)
            copies.append(str(y.name))
        rewrite(model, copies)
        error, found = self._run(_put_rows_in_8_bits(model))
        return error, dict(zip(names, _largest(np.array(found)), strict=True))

    def _run(self, model: ir.Model) -> tuple[float, list[list[np.ndarray]]]:
        """Returns the error of a model's outputs, and the others that it has. It computes in fp32, and each
        result is rounded to 16 bits, as on GPUs. What is not finite in the file in 16 bits, either, is no
        error."""
        decoders.make_runnable(model)
        rounded(model, self.source.dtype)
        what, library = _what(self.finished(model)), self.source.user_ops.libraries or None
        try:
            found = run_any(what, library, self.reference.cases, may_skip=True).outputs
        except (NotRunnable, TwinopError) as error:
            raise ExportError(
                f"{option('dtype', FLOAT8)}: its error cannot be measured on the CPU: {error}. Take float16"
            ) from error
        count = len(self.reference.outputs[0])
        outputs, dtype = [each[:count] for each in found], self.source.dtype
        for case, plain in enumerate(self.plain):
            expected = [clip(each, dtype) for each in self.reference.outputs[case]]
            outputs[case] = [*map(_comparable, outputs[case], plain, expected)]
        self.plain = self.plain or outputs
        errors = self.reference.errors(outputs, dtype)
        return self.reference.largest(errors), [each[count:] for each in found]


def _comparable(found: Any, plain: Any, expected: Any) -> Any:
    """Returns an output with what is expected where it is not finite, and was not in 16 bits."""
    if not isinstance(found, np.ndarray) or found.dtype.kind != "f":
        return found
    return np.where(np.isfinite(found) | np.isfinite(plain), found, expected)


def _what(model: ir.Model) -> Runnable:
    """Returns a model as it runs: one that is large in segments, one after the other."""
    segments = cut(model, model)
    if len(segments) < 2:
        return runnable(model)
    names = [str(value.name) for value in model.graph.outputs]
    return Chain([extract(model, each.result) for each in segments], names)


def _compare(model: ir.Model, a: ir.Value, b: ir.Value) -> None:
    """Adds two outputs to a model: the 2-norms of b - a and of a, where a is finite. See `_largest`."""
    nodes, wide = list[ir.Node](), ir.DataType.FLOAT

    def made(op_type: str, *inputs: ir.Value, dtype: ir.DataType = wide, **attributes: Any) -> ir.Value:
        nodes.append(ir.node(op_type, inputs, attributes))
        [y] = nodes[-1].outputs
        y.name, y.type = f"{b.name} {len(nodes)}", ir.TensorType(dtype)
        return y

    x, y = (made("Cast", value, to=int(wide)) for value in (a, b))
    nothing, zero = made("Sub", x, x), made("Constant", value_float=0.0)  # NaN where x is not finite
    is_finite = made("Equal", nothing, nothing, dtype=ir.DataType.BOOL)
    parts = [made("Where", is_finite, each, zero) for each in (made("Sub", y, x), x)]
    model.graph.outputs.extend([made("ReduceL2", each, keepdims=0) for each in parts])
    model.graph.extend(nodes)


def _largest(norms: np.ndarray) -> list[float]:
    """Returns what 8 bits change in the result of each matmul, at most, from the norms that `_compare` adds.
    Nothing of nothing is 0, and NaN, which only 8 bits have, is infinite."""
    change, size = norms[:, ::2], norms[:, 1::2]
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = np.where(change == 0, 0, np.nan_to_num(change / size, nan=np.inf, posinf=np.inf))
    return [*map(float, parts.max(0))]


# ------------------------------------------------------------------------------------ the file


def quantize(verifier: Verifier, files: list[Path], folder: Path) -> list[Path]:
    """Writes a file in 16 bits again, with matmuls in 8 bits; returns the new files, the model last, or the
    given ones if none can or may. ExportError: the CPU does not run it, or a constant is not what the file in
    16 bits has."""
    report, options, progress = verifier.source.report, verifier.source.options, verifier.progress
    names, kept = matmuls(before := reopen(files[-1]), options.rows)
    report.float8 = result = Float8(kept=kept, max_error=options.max_error)
    if not names:
        return files
    if decoders.is_decoder(before):
        report.add_note(
            "prompts of more rows than few_rows put x in 8 bits, too: the errors are the larger ones"
        )
    progress("measuring the matmuls in 8 bits")
    trial = _Trial(verifier, before)
    result.error_16, errors = trial.errors(names)
    order, found = _worst_first(before, errors), dict[int, float]()

    def is_close(count: int) -> bool:
        """Whether the outputs are close enough if so many matmuls go back."""
        progress("measuring the outputs in 8 bits")
        found[count] = trial.error(order[count:])
        return found[count] <= options.max_error

    count = 0 if is_close(0) else 1 + bisect_left(range(1, len(order)), True, key=is_close)
    result.error = found.get(count, result.error_16)
    result.returned = {name: errors[name] for name in order[:count]}
    result.layers = {name: errors[name] for name in names if name not in result.returned}
    if not result.layers:
        return files
    progress("writing in 8 bits")
    (folder := folder / "float8").mkdir()
    sources = rewrite(model := before.clone(), order[count:])
    trial.finished(model)
    report.nodes_after = len([*model.graph.all_nodes()])
    written = save(model, folder / files[-1].name, EXTERNAL_DATA_BYTES)
    try:
        check_quantized(before, reopen(written[-1]), sources)
    except equivalence.NotEquivalent as reason:
        raise ExportError(f"the written model {reason}: {DEFECT}") from reason
    return written
