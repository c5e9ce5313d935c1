"""`twinop optimize --invariant`: which products get the attribute, and what is named or refused."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from decoder_graphs import Sizes, write
from models import exported_by, make_model, model, node, value
from optimizing import optimized, parsed, rewritten, weights
from samples import RECORDS
from slow_cases import often
from typer.testing import CliRunner

from twinop.cli import app
from twinop.deploy import ModelError, check_model
from twinop.deploy.pack.command import Options
from twinop.deploy.pack.packing import pack_genai
from twinop.errors import ExportError
from twinop.optimize import invariance, optimize, optimize_folder
from twinop.optimize.rewrite import fused, skipped

DECODER = Sizes(width=128, inner=256, heads=2, kv_heads=1, vocab=512)
PRODUCTS = {"CustomLinear", "CustomLinearSwiglu", "CustomLinearQ", "CustomLinearQSwiglu"}
MAY_DEPEND = "not invariant: its sums may depend on the batch"


def marks(path: Path, name: str = "invariant") -> Counter[tuple[str, int]]:
    graph = onnx.load(path, load_external_data=False).graph
    found = ((each, {a.name: a.i for a in each.attribute}) for each in graph.node)
    marked = ((each.op_type, given.get(name, 0)) for each, given in found)
    return Counter(each for each in marked if each[0] in PRODUCTS)


@pytest.mark.parametrize("precision", often(["float16", "bfloat16", "int4"], "float16"))
def test_every_product_of_a_decoder_gets_it(precision: str, tmp_path: Path) -> None:
    """The file is compared as any other, and loads."""
    infix = "Q" if precision == "int4" else ""
    report = optimize_folder(write(tmp_path / "old", DECODER, precision), tmp_path / "new", invariant=True)
    names = {f"CustomLinear{infix}": 7, f"CustomLinear{infix}Swiglu": 2}
    assert marks(report.path) == {(name, 1): count for name, count in names.items()}
    few = 0 if precision == "int4" else 32  # integers have no such attribute
    assert marks(report.path, "few_rows") == {(name, few): count for name, count in names.items()}
    assert not report.skipped and report.fused["attention over a cache"] == 2
    assert report.fused["invariant matmuls"] == 9
    check_model(report.path, tmp_path / "new/libcustom_ops.so")


def test_a_packed_folder_of_genai_gets_it(tmp_path: Path) -> None:
    source = write(tmp_path / "old", DECODER, "float16")
    pack_genai(Options(source, tmp_path / "new", genai=True, invariant=True))
    assert marks(tmp_path / "new/model.onnx") == {("CustomLinear", 1): 7, ("CustomLinearSwiglu", 1): 2}
    with pytest.raises(ExportError, match="invariant=True.*: needs cuda"):
        pack_genai(Options(source, tmp_path / "cpu", genai=True, invariant=True, device="cpu"))


def test_attention_that_stays_is_named(tmp_path: Path) -> None:
    """Without the promise of shared caches, attention is ONNX Runtime's."""
    source = write(tmp_path / "old", DECODER, "float16") / "model.onnx"
    report, _ = optimized(source, tmp_path, invariant=True)
    assert report.fused["invariant matmuls"] == 9
    assert report.skipped[f"GroupQueryAttention: {MAY_DEPEND}"] == 2
    assert f"not fused: 2 GroupQueryAttention: {MAY_DEPEND}" in str(report)


def test_what_may_depend_on_the_batch_is_named() -> None:
    text = """(float16[M, 64] x, float16[64, 64] w, int64[M, 9] mask, float[M, 64] wide) =>
        (float16[M, 64] a, float16[M, 24] b, float16[M, 12] c, int64[M] d, float[M] e, float16[M, 64] f,
        float[M, 64] g, float16[M, 8] h, float16[M, 128] i, float16[M, 64] j, int32[M, 8] k, float16[M, 1] l,
        float16[M, 64] m, float16[M, 64] n, float16[M, 64] o, int64 p, int64[9] q, float16[M, 64] r) {
        a = MatMul (x, w)
        b = custom_domain.CustomLinear (x, w24) c = custom_domain.CustomLinear (x, w12)
        axis = Constant <value_ints = [1]> () d = ReduceSum <keepdims = 0> (mask, axis)
        e = ReduceSum <keepdims = 0> (wide, axis) f = Softmax (x) g = custom_domain.CustomLinear (wide, w32)
        narrow = Slice (x, zero, last, axis) h = custom_domain.CustomLinear (narrow, w96)
        i = custom_domain.CustomLinear <layout = "kn"> (x, wkn)
        j = custom_domain.CustomLinearSwiglu (x, w24) bytes, scale, middle = DynamicQuantizeLinear (wide)
        k = MatMulInteger (bytes, integers, middle) images = Unsqueeze (x, axis)
        pooled = GlobalAveragePool (images) l = ReduceMax <keepdims = 0> (pooled, axis)
        m = ScatterElements <axis = 1, reduction = "add"> (x, indices, x)
        n = ScatterElements <axis = 1> (x, indices, x) is_long = Cast <to = 9> (zero) o = If (is_long) <
        then_branch = long () => (then_o) { then_o = Identity (x) },
        else_branch = short () => (else_o) { else_o = Relu (x) } > p = ReduceMax <keepdims = 0> (mask)
        q = ReduceMin <keepdims = 0> (mask, zero) r = mine.Sum (x) }"""
    arrays = {f"w{n}": weights(n, 64).astype(np.float16) for n in (24, 12, 64)} | {"w32": weights(64, 64)}
    arrays |= {"w96": weights(8, 96).astype(np.float16), "wkn": weights(64, 128).astype(np.float16)}
    arrays |= {"zero": np.array([0]), "last": np.array([96]), "indices": np.zeros((1, 64), np.int64)}
    proto = parsed(text, **arrays, integers=np.ones((64, 8), np.uint8))
    proto.opset_import.append(onnx.helper.make_opsetid("mine", 1))
    found = rewritten(proto, invariance.Invariance, meta={invariance.INVARIANT: True})
    takes = "it takes 16 bits, N a multiple of 8 and K of 64 as nk"
    gated = takes.replace("8", "16")
    assert skipped(found) == {
        f"MatMul: {MAY_DEPEND}": 1,
        "Sum: not invariant: an op of mine": 1,
        f"ReduceSum: {MAY_DEPEND}": 1,
        f"GlobalAveragePool: {MAY_DEPEND}": 1,
        f"ScatterElements: {MAY_DEPEND}": 1,
        "If: not invariant: its choice may depend on the batch": 1,
        "ReduceMax: not invariant: its value is that of the whole batch": 1,
        "ReduceMin: not invariant: its value is that of the whole batch": 1,
        "DynamicQuantizeLinear: not invariant: it has one scale for the batch": 1,
        f"CustomLinear: not invariant: N = 64 and K = 64 as nk in FLOAT; {takes}": 1,
        f"CustomLinear: not invariant: N = 128 and K = 64 as kn in FLOAT16; {takes}": 1,
        f"CustomLinear: not invariant: N = 12 and K = 64 as nk in FLOAT16; {takes}": 1,
        f"CustomLinear: not invariant: N = 8 and K = 96 as nk in FLOAT16; {takes}": 1,
        f"CustomLinearSwiglu: not invariant: N = 24 and K = 64 as nk in FLOAT16; {gated}": 1,
    }
    assert fused(found) == {"invariant matmuls": 1}


def test_a_model_without_rewrites_is_named_too(tmp_path: Path) -> None:
    text = "(float16[M, 64] x, float16[64, 8] w) => (float16[M, 8] y) { y = MatMul (x, w) }"
    report, _ = optimized(parsed(text), tmp_path, invariant=True)
    assert not report.fused and report.skipped == {f"MatMul: {MAY_DEPEND}": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs cuda and float16 or bfloat16, not cuda and float32"),
        ({"device": "cpu", "dtype": "float16"}, "needs cuda and float16 or bfloat16, not cpu and float16"),
    ],
)
def test_where_nothing_can_be_invariant(options: dict[str, str], message: str, tmp_path: Path) -> None:
    text = "(float[N, 64] x) => (float[N, 8] y) { y = MatMul (x, w) }"
    old, new = tmp_path / "old.onnx", tmp_path / "new.onnx"
    onnx.save(parsed(text, w=weights(64, 8)), old)
    with pytest.raises(ExportError) as error:
        optimize(old, new, invariant=True, **options)  # type: ignore[arg-type]
    assert f"invariant=True: {message}" == str(error.value)
    given = [part for name, each in options.items() for part in (f"--{name}", each)]
    found = CliRunner().invoke(app, ["optimize", str(old), "-o", str(new), "--invariant", *given])
    assert found.exit_code == 1 and not new.exists()
    said = " ".join(found.output.split())
    assert f"--invariant: {message}" in said
    report, _ = optimized(old, tmp_path, invariant=True, dtype="float16")
    assert report.fused["invariant matmuls"] == 1


def test_another_value_is_refused() -> None:
    linear = node("CustomLinear", ["x", "x"], ["y"], invariant=2)
    with pytest.raises(ModelError, match=r"attribute invariant is 2, expected 0 or 1 \(bool\)"):
        check_model(model([linear], [value("x")], [value("y")]))


def test_models_of_before_the_attribute_load() -> None:
    """A node without the last attributes of its op has their defaults. Other signatures are refused."""
    former = {
        "linear": "4bf9bf4e3c42501c",
        "linear_swiglu": "34e0ff09e31cb304",
        "linear_q": "ba04a0cb9fbc6efd",
        "linear_q_swiglu": "dbf0a5bd3483b8fe",
    }
    for op, known in former.items():
        assert known in RECORDS[op].former_hashes and known != RECORDS[op].schema_hash
    metadata = exported_by(RECORDS["linear"])
    [key] = [each for each in metadata if each.startswith("twinop.schema")]
    graph = make_model("CustomLinear", metadata=metadata | {key: former["linear"]})
    graph.graph.node[0].input.append("x")
    check_model(graph)
