"""Tests of decoders' attention over shared caches, which twinop's own op computes."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from optimizing import nodes, optimized, parsed, rewritten, types

from twinop import deploy
from twinop.deploy.errors import FeedError, RunError
from twinop.optimize.cached_attention import SHARED_CACHES, CachedAttention
from twinop.optimize.rewrite import skipped

HEADS, KV_HEADS, WIDTH, ROWS = 4, 2, 96, 24


def half(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.3).astype(np.float16)


def decoder(
    size: int = 64, packed: bool = True, norms: bool = False, sinks: bool = False, lacks: str = "",
    **attributes: Any,
) -> onnx.ModelProto:  # fmt: skip
    """Two layers of attention as onnxruntime-genai's builder writes it.

    Args:
        lacks: what only the first layer has.
    """
    angles = np.random.default_rng(1).random((ROWS, size // 2)) * 6
    constants = {"cos": np.cos(angles), "sin": np.sin(angles), "w_o": half(HEADS * size, WIDTH)}
    constants |= {"sinks": half(HEADS)} if sinks else {}
    widths = {"q": HEADS * size, "k": KV_HEADS * size, "v": KV_HEADS * size}

    text, x = "", "x"
    for i in range(2):
        without = lacks if i else ""
        for name, width in ({"qkv": sum(widths.values())} if packed else widths).items():
            constants[f"w_{name}{i}"] = half(WIDTH, width, seed=i)
            text += f"{name}{i} = MatMul ({x}, w_{name}{i}) "
        heads = [f"qkv{i}", "", ""] if packed else [f"{name}{i}" for name in "qkv"]
        for name in heads[:2] if norms and without != "norms" else ():
            constants[f"n_{name}"] = half(size, seed=name[0] == "k") + np.float16(1)
            text += f"""{name}_apart = Reshape ({name}, apart) {name}_n = SimplifiedLayerNormalization
                <axis = -1, epsilon = 1e-6, stash_type = 1> ({name}_apart, n_{name})
                {name}_normed = Reshape ({name}_n, joined) """
            heads[heads.index(name)] = f"{name}_normed"
        given = [*heads, f"past_k{i}", f"past_v{i}", "seqlens", "total"]
        given += ["", ""] if without == "do_rotary" else ["cos", "sin"]
        given += ["", "", "sinks"] if sinks and without != "sinks" else []
        numbers = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "do_rotary": 1} | attributes
        numbers |= {without: 0} if without in ("do_rotary", "smooth_softmax") else {}
        form, x = ", ".join(f"{name} = {number}" for name, number in numbers.items()), "h" if i == 0 else "y"
        text += f"""a{i}, present_k{i}, present_v{i} = com.microsoft.GroupQueryAttention <{form}>
            ({", ".join(given).rstrip(", ")}) {x} = MatMul (a{i}, w_o) """
    caches, results = (
        ", ".join(f"float16[b, {KV_HEADS}, {rows}, {size}] {name}_{c}{i}" for i in range(2) for c in "kv")
        for name, rows in (("past", "past"), ("present", "total_length"))
    )
    halves = {name: each.astype(np.float16) for name, each in constants.items()}
    return parsed(
        f"(float16[b, s, {WIDTH}] x, {caches}, int32[b, 1] seqlens, int32 total) => "
        f"(float16[b, s, {WIDTH}] y, {results}) {{ {text} }}",
        apart=np.array([0, 0, -1, size]), joined=np.array([0, 0, -1]), **halves,
    )  # fmt: skip


def attended(proto: onnx.ModelProto, shared: bool = True) -> ir.Model:
    return rewritten(proto, CachedAttention, meta={SHARED_CACHES: shared})


@pytest.mark.parametrize(
    "form",
    [
        {"scale": 0.2, "local_window_size": 7, "rotary_interleaved": 1},
        {"packed": False, "softcap": 2.0, "size": 96, "smooth_softmax": 1},
        {"packed": False, "norms": True, "sinks": True},
    ],
    ids=str,
)
def test_each_form(form: dict[str, Any], tmp_path: Path) -> None:
    report, model = optimized(decoder(**form), tmp_path, shared_caches=True)
    assert report.fused["attention over a cache"] == 2
    found = nodes(model, "CustomAttentionCached")
    assert len(found) == 2
    assert not {"GroupQueryAttention", "CustomRmsNorm", "Concat", "Split"} & types(model).keys()
    assert types(model)["Reshape"] == 1  # of the positions, for all layers
    assert len({node.inputs[5] for node in found}) == 1  # one table
    # The sizes in the file let past and present be one memory.
    shapes = {str(value.name): value.shape for value in (*model.graph.inputs, *model.graph.outputs)}
    assert shapes["present_k0"] == shapes["past_k0"]
    past = half(2, KV_HEADS, ROWS, form.get("size", 64))
    lengths = {"seqlens": np.full((2, 1), ROWS - 1, np.int32), "total": np.array(ROWS, np.int32)}
    given = lengths | {"x": half(2, 1, WIDTH)} | {f"past_{c}{i}": past for i in range(2) for c in "kv"}
    session, shorter = deploy.session(report.path), given["past_v0"][:, :, 1:]
    for wrong, error, message in (
        ({"total": np.array(25, np.int32)}, RunError, "has 25 tokens; the caches have 24 rows.* share"),
        ({"past_v0": shorter}, FeedError, r"past is 24 in input past_\w+ and 23 in input past_v0"),
        ({"past_v0": given["past_v0"].astype(np.float32)}, FeedError, "float32.*: convert it to float16"),
    ):
        with pytest.raises(error, match=message):
            session.run(given | wrong)
    beyond = session.run(given | {"seqlens": np.array([[24], [9]], np.int32)})["y"]
    assert np.isnan(beyond[0]).all() and np.isfinite(beyond[1]).all()  # the caches have 24 rows


@pytest.mark.parametrize("opset", [14, 26])
def test_promises_outlive_the_conversion_of_opsets(opset: int, tmp_path: Path) -> None:
    proto = decoder()
    proto.opset_import[0].version = opset
    proto.ir_version = 8 if opset < 20 else 10
    report, _ = optimized(proto, tmp_path, shared_caches=True, invariant=True)
    assert report.fused["attention over a cache"] == report.fused["invariant matmuls"] == 2
    assert all(each.startswith("CustomLinear: not invariant") for each in report.skipped)


@pytest.mark.parametrize(
    ("form", "index"),
    [
        ({"lacks": "do_rotary", "size": 96, "rotary_interleaved": 1}, 5),
        ({"lacks": "norms", "norms": True, "packed": False}, 6),
    ],
    ids=str,
)
def test_layers_may_differ(form: dict[str, Any], index: int, tmp_path: Path) -> None:
    """SmolLM3 has layers without rotary embedding: they call another overload of the function."""
    report, model = optimized(decoder(**form), tmp_path, shared_caches=True)
    assert report.fused["attention over a cache"] == 2 and not report.skipped
    first, second = nodes(model, "CustomAttentionCached")
    assert first.inputs[index] is not None and not any(second.inputs[index : index + 1])
    assert first.overload != second.overload == "" and "CustomRmsNorm" not in types(model)
    assert {key[2] for key in model.functions if key[1] == "CustomAttentionCached"} == {"", first.overload}


def test_tables_and_norms_of_one_layer_alone() -> None:
    """A table's rows may depend on the call; norms may be inputs of the node."""
    proto = decoder(lacks="do_rotary")
    for name in ("cos", "sin"):
        (constant,) = (each for each in proto.graph.initializer if each.name == name)
        proto.graph.initializer.remove(constant)
        shape = ["rows", constant.dims[1]]
        proto.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape))
    normed = decoder()
    normed.graph.initializer.append(numpy_helper.from_array(half(64), "norm"))
    first = next(node for node in normed.graph.node if node.output[0] == "a0")
    first.input.extend([*[""] * 5, "norm", "norm"])
    for each in (proto, normed):
        model = attended(each)
        assert not skipped(model) and types(model)["CustomAttentionCached"] == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "caches that grow (past and present are not known to share memory)"),
        ({"size": 32}, "heads of 32 with 3 outputs"),
    ],
    ids=str,
)
def test_what_is_left_alone_is_named(change: dict[str, Any], reason: str) -> None:
    model = attended(decoder(**change), bool(change))
    assert types(model)["GroupQueryAttention"] == 2
    assert skipped(model) == {f"GroupQueryAttention: {reason}": 2}


@pytest.mark.parametrize("of_q", [{}, {"eps": 1e-4}, {"offset": 1.0}, {"axis": -2}], ids=str)
def test_norms_that_attention_cannot_compute_stay(of_q: dict[str, Any]) -> None:
    proto = decoder(packed=False, norms=True)
    for node in proto.graph.node:
        if node.op_type == "SimplifiedLayerNormalization":
            given = {"eps": 1e-6} | (of_q if node.output[0].startswith("q") else {})
            new = helper.make_node("CustomRmsNorm", node.input, node.output, domain="custom_domain", **given)
            node.CopyFrom(new)
    model = attended(proto)
    assert types(model)["CustomAttentionCached"] == 2
    assert types(model).get("CustomRmsNorm", 0) == (4 if of_q else 0)


_COUNTED = "count = ReduceSum <keepdims = 0> (mask, axis) last = Sub(count, one) p = Cast <to = 6> (last)"
_KEPT = _COUNTED.replace("keepdims = 0", "keepdims = 1")


@pytest.mark.parametrize(
    ("positions", "change", "left"),
    [
        (_COUNTED, {}, 0),
        (_COUNTED, {"dtype": "int32"}, 0),
        (_COUNTED, {"axis": [-1]}, 0),
        (_KEPT, {}, 0),
        (_KEPT.replace("p =", "wide =") + "p = Reshape(wide, all)", {}, 0),
        (_COUNTED + "other = Neg(count)", {}, 1),
        (_COUNTED, {"of_first": ", sliding_window_cache = 1"}, 0),  # which stays, and reads them as well
        (_COUNTED, {"one": [2]}, None),
        (_COUNTED, {"mask": "2, 1, 9"}, None),
        (_COUNTED, {"mask": "2, 2", "axis": [0]}, None),
        (_COUNTED, {"dtype": "float16"}, None),
    ],
    ids=str,
)
def test_positions_counted_in_a_mask(positions: str, change: dict[str, Any], left: int | None) -> None:
    """`left`: sums that stay because others read them; None: the positions stay as they are."""
    given = {"dtype": "int64", "mask": "2, 9", "one": [1], "axis": [1], "of_first": ""} | change
    kind = np.dtype(given["dtype"])
    caches = "".join(f", float16[2, {KV_HEADS}, {ROWS}, 64] past_{c}" for c in "kv")
    more = ", int64[2] other" if "other" in positions else ""
    heads = f"num_heads = {HEADS}, kv_num_heads = {KV_HEADS}"
    attentions = " ".join(
        f"{y}, k{y}, v{y} = com.microsoft.GroupQueryAttention <{heads}{of}> (x, , , past_k, past_v, p, total)"
        for y, of in (("y", given["of_first"]), ("z", ""))
    )
    text = f"""(float16[2, 1, {(HEADS + 2 * KV_HEADS) * 64}] x{caches}, {kind}[{given["mask"]}] mask,
        int32 total) => (float16[2, 1, W] y, float16[2, 1, W] z{more}) {{ {positions} {attentions} }}"""
    numbers = {"one": np.array(given["one"], kind), "axis": np.array(given["axis"]), "all": np.array([-1])}
    proto = parsed(text, **numbers)
    model = attended(onnx.shape_inference.infer_shapes(proto))
    found = types(model)
    assert found["CustomAttentionCached"] == (1 if given["of_first"] else 2)
    assert ("CustomLastPosition" in found) == (left is not None)  # equal nodes become one at the end
    counts = [found.get(name, 0) for name in ("ReduceSum", "Sub", "Cast")]
    assert counts == ([1, 1, 1] if left is None else [left, 0, 0])
    if left is not None:
        last = {node.outputs[0] for node in nodes(model, "CustomLastPosition")}
        assert "Reshape" not in found and {each.dtype for each in last} == {ir.DataType.INT32}
        assert {each.inputs[3] for each in nodes(model, "CustomAttentionCached")} == last
        onnx.checker.check_model(ir.to_proto(model))  # which finds nodes out of order


@pytest.mark.parametrize("more", [0, 64])
def test_parts_of_a_wider_tensor_are_joined(more: int) -> None:
    sizes = [HEADS * 64, KV_HEADS * 64, KV_HEADS * 64, more][: 4 if more else 3]
    caches = "".join(f", float16[2, {KV_HEADS}, {ROWS}, 64] past_{c}" for c in "kv")
    heads = f"num_heads = {HEADS}, kv_num_heads = {KV_HEADS}"
    proto = parsed(
        f"(float16[2, 1, {sum(sizes)}] x{caches}, int32[2] last, int32 total) => (float16[2, 1, W] y) {{"
        f"{', '.join('qkvr'[: len(sizes)])} = Split <axis = -1> (x, sizes)"
        f"y, k2, v2 = com.microsoft.GroupQueryAttention <{heads}> (q, k, v, past_k, past_v, last, total) }}",
        sizes=np.array(sizes),
    )
    model = attended(onnx.shape_inference.infer_shapes(proto))
    (node,) = nodes(model, "CustomAttentionCached")
    assert (node.inputs[0] is model.graph.inputs[0]) == (more == 0)
    assert types(model).get("Concat", 0) == (1 if more else 0)
