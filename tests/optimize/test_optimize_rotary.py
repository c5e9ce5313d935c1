"""Tests of the optimizer's rotary embeddings: both layouts, what goes together, models of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optimizing import nodes, optimized, parsed, types
from other_sizes import assert_same

HALVES = """f%(n)s, g%(n)s = Split <axis=-1, num_outputs=2> (%(x)s) n%(n)s = Neg (g%(n)s)
    r%(n)s = Concat <axis=-1> (n%(n)s, f%(n)s)"""
NEIGHBOURS = """f%(n)s = Slice (%(x)s, zero, far, last, two) g%(n)s = Slice (%(x)s, one, far, last, two)
    h%(n)s = Neg (g%(n)s) i%(n)s = Unsqueeze (h%(n)s, last) j%(n)s = Unsqueeze (f%(n)s, last)
    n%(n)s = Concat <axis=-1> (i%(n)s, j%(n)s) r%(n)s = Reshape (n%(n)s, flat)"""
BACK = HALVES.replace("(g%(n)s)", "(f%(n)s)").replace("(n%(n)s, f%(n)s)", "(g%(n)s, n%(n)s)")  # NanoChat
SUM = "p%(n)s = Mul (%(x)s, cos) q%(n)s = Mul (r%(n)s, sin) %(y)s = Add (p%(n)s, q%(n)s)"
INDICES = {
    "zero": np.array([0]), "one": np.array([1]), "two": np.array([2]), "last": np.array([-1]),
    "far": np.array([100]), "flat": np.array([0, 0, 0, -1]), "four": np.array([4]), "six": np.array([6]),
    "eight": np.array([8]), "parts": np.array([8, 4]), "twice": np.array([1, 2]),
}  # fmt: skip


def turned(rotated: str, x: str, y: str, n: int = 1) -> str:
    """y of x, which turns."""
    return f"{rotated} {SUM}" % {"n": n, "x": x, "y": y}


def angles_of(rotated: str, *shape: int) -> np.ndarray:
    """Angles that are the same for both numbers of a pair."""
    angles = np.random.default_rng(0).random(shape).astype(np.float32)
    return np.tile(angles, 2) if rotated in (HALVES, BACK) else np.repeat(angles, 2, -1)


def tables(angles: np.ndarray) -> dict[str, np.ndarray]:
    return {"cos": np.cos(angles), "sin": np.sin(angles)} | INDICES


def rotary(rotated: str, z: str, source: str) -> str:
    """Two rotations, y of x and u of w; z is the shape of the input that w is made of."""
    heads = f"(float[B, 2, 6, 8] x, float[{z}, 2, 6, 8] z) => (float[B, 2, 6, 8] y, float[{z}, 2, 6, 8] u)"
    return f"{heads} {{ {turned(rotated, 'x', 'y')} w = {source} {turned(rotated, 'w', 'u', 2)} }}"


@pytest.mark.parametrize(
    ("rotated", "z", "source", "device", "wanted"),
    [
        (HALVES, "B", "Identity (z)", "cuda", {"CustomRope": 1}),
        (NEIGHBOURS, "B", "Identity (z)", "cuda", {"CustomRope": 1}),
        (BACK, "B", "Identity (z)", "cuda", {"CustomRope": 1}),
        (HALVES, "B", "Add (y, z)", "cuda", {"RotaryEmbedding": 2}),  # the second one needs the first one
        (NEIGHBOURS, "C", "Identity (z)", "cuda", {"RotaryEmbedding": 2}),  # another batch
        (HALVES, "1", "Identity (z)", "cuda", {"RotaryEmbedding": 2}),
        (NEIGHBOURS, "B", "Identity (z)", "cpu", {"RotaryEmbedding": 2}),
    ],
    ids=range(7),
)
def test_two_rotations(rotated: str, z: str, source: str, device: str, wanted: Any, tmp_path: Path) -> None:
    proto = parsed(rotary(rotated, z, source), **tables(angles_of(rotated, 1, 6, 4)))
    _, model = optimized(proto, tmp_path, device=device)
    assert types(model) | wanted == types(model) and not {"Concat", "Split", "Mul"} & set(types(model))
    [layout] = {
        (node.attributes.get_string("layout", "half") == "interleaved")
        or node.attributes.get_int("interleaved", 0) == 1
        for node in nodes(model, *wanted)
    }
    assert layout == (rotated is NEIGHBOURS)


def test_rotations_of_other_pairs_stay(tmp_path: Path) -> None:
    """Even numbers and odd ones behind each other, not beside each other, are not a layout of the op."""
    apart = NEIGHBOURS.replace("i%(n)s = Unsqueeze (h%(n)s, last) j%(n)s = Unsqueeze (f%(n)s, last)", "")
    apart = apart.replace("(i%(n)s, j%(n)s)", "(h%(n)s, f%(n)s)")
    _, model = optimized(parsed(rotary(apart, "B", "Neg (z)"), **tables(angles_of(apart, 1, 6, 4))), tmp_path)
    assert not nodes(model, "CustomRope", "RotaryEmbedding")


@pytest.mark.parametrize(
    ("rotated", "cut", "wanted"),
    [
        (HALVES, "w, rest = Split <axis=-1> (x, parts)", 8),
        (NEIGHBOURS, "w = Slice (x, zero, eight, last) rest = Slice (x, eight, far, last)", 8),
        (HALVES, "w = Slice (x, four, far, last) rest = Slice (x, zero, four, last)", 0),  # these turn
    ],
    ids=["split", "slices", "the other part"],
)
def test_a_part_of_a_head(rotated: str, cut: str, wanted: int, tmp_path: Path) -> None:
    """8 of 12 numbers turn. One rotation alone becomes ONNX Runtime's node."""
    body = f"{cut} {turned(rotated, 'w', 't')} y = Concat <axis=-1> (t, rest)"
    text = f"(float[B, 2, 6, 12] x) => (float[B, 2, 6, 12] y) {{ {body} }}"
    _, model = optimized(parsed(text, **tables(angles_of(rotated, 1, 6, 4))), tmp_path)
    [node] = nodes(model, "RotaryEmbedding")
    assert node.attributes.get_int("rotary_embedding_dim", 0) == wanted
    assert bool(nodes(model, "Concat")) == (wanted == 0)


FIRST = "rest = Slice (x, zero, two, two) w = Slice (x, two, far, two)"
LAST = "w = Slice (x, zero, six, two) rest = Slice (x, six, far, two)"


@pytest.mark.parametrize(
    ("rotated", "cut", "joined", "tokens"),
    [(NEIGHBOURS, FIRST, "rest, t", 8), (HALVES, LAST, "t, rest", 6), (HALVES, FIRST, "t, rest", 6)],
    ids=["first", "last", "another order"],
)
def test_tokens_that_do_not_turn(rotated: str, cut: str, joined: str, tokens: int, tmp_path: Path) -> None:
    """The first ones get angles of zero. cos and sin are columns of one constant, as in timm's EVA-02."""
    angles = angles_of(rotated, 6, 4)
    columns = "sin, cos = Split <axis=-1, num_outputs=2> (both)"
    body = f"{cut} {columns} {turned(rotated, 'w', 't')} y = Concat <axis=2> ({joined})"
    text = f"(float[B, 2, 8, 8] x) => (float[B, 2, 8, 8] y) {{ {body} }}"
    _, model = optimized(parsed(text, both=np.hstack([np.sin(angles), np.cos(angles)]), **INDICES), tmp_path)
    [node] = nodes(model, "RotaryEmbedding")
    assert node.inputs[0] is not None and node.inputs[0].shape is not None
    assert node.inputs[0].shape[1] == tokens


APART = {
    "halves": """a = Slice (x, zero, four, last) b = Slice (x, four, far, last) %s
        y = Concat <axis=-1> (first, second)""",
    "neighbours": """a = Slice (x, zero, far, last, two) b = Slice (x, one, far, last, two) %s
        i = Unsqueeze (first, last) j = Unsqueeze (second, last) z = Concat <axis=-1> (i, j)
        y = Reshape (z, flat)""",
}
TURNED = """ac = Mul (a, c) bs = Mul (s, b) first = Sub (ac, bs)
    bc = Mul (b, c) sa = Mul (a, s) second = Add (sa, bc)"""
ORDERS = {
    "heads first": ("float[B, 2, S, 8]", "float[1, S, 4]", (3, 2, 9, 8), (1, 9, 4)),
    "tokens first": ("float[B, S, 2, 8]", "float[1, S, 1, 4]", (3, 9, 2, 8), (1, 9, 1, 4)),
    "tokens of each sequence": ("float[B, S, 2, 8]", "float[B, S, 1, 4]", (3, 9, 2, 8), (3, 9, 1, 4)),
    "no batch": ("float[S, 2, 8]", "float[S, 1, 4]", (9, 2, 8), (9, 1, 4)),
}


@pytest.mark.parametrize(
    ("name", "order"), [("neighbours" if each == "tokens first" else "halves", each) for each in ORDERS]
)
def test_the_elements_of_a_pair_apart(name: str, order: str, tmp_path: Path) -> None:
    x, angles, *sizes = ORDERS[order]
    text = f"({x} x, {angles} c, {angles} s) => ({x} y) {{ {APART[name] % TURNED} }}"
    _, model = optimized(parsed(text, **INDICES), tmp_path)
    [node] = nodes(model, "RotaryEmbedding")
    assert node.attributes.get_int("interleaved", 0) == (name == "neighbours")
    assert not nodes(model, "Mul", "Sub", "Add", "Concat")
    assert_same(tmp_path, x=sizes[0], c=sizes[1], s=sizes[1])


def test_images_as_one_sequence(tmp_path: Path) -> None:
    """The attention of Qwen2-VL's vision tower, of one image: nothing is transposed."""
    text = f"""(float[6, 16] rows, float[6, 1, 4] c, float[6, 1, 4] s) => (float[6, 16] o) {{
        x = Reshape (rows, heads) {APART["halves"] % TURNED} t = Transpose <perm=[1, 0, 2]> (y)
        u = Unsqueeze (t, zero) q = Split <axis=2, num_outputs=1> (u) k = Transpose <perm=[0, 1, 3, 2]> (q)
        w = MatMul (q, k) p = Softmax (w) v = MatMul (p, q) r = Transpose <perm=[0, 2, 1, 3]> (v)
        whole = Concat <axis=1> (r) o = Reshape (whole, size) }}"""
    sizes = INDICES | {"heads": np.array([6, 2, 8]), "size": np.array([6, -1])}
    _, model = optimized(parsed(text, **sizes), tmp_path)
    assert set(types(model)) == {"RotaryEmbedding", "MultiHeadAttention", "Reshape"}


def test_other_products_of_pairs_stay(tmp_path: Path) -> None:
    """The signs are those of a rotation the other way round."""
    body = APART["halves"] % TURNED.replace("Sub", "Add").replace("second = Add", "second = Sub")
    text = f"(float[B, 2, S, 8] x, float[1, S, 4] c, float[1, S, 4] s) => (float[B, 2, S, 8] y) {{ {body} }}"
    _, model = optimized(parsed(text, **INDICES), tmp_path)
    assert not nodes(model, "RotaryEmbedding")
    assert_same(tmp_path, x=(3, 2, 9, 8), c=(1, 9, 4), s=(1, 9, 4))


@pytest.mark.parametrize(
    ("rotated", "source"),
    [(HALVES, "constants"), (NEIGHBOURS, "inputs"), (HALVES, "Mul"), (NEIGHBOURS, "Tile"), (HALVES, "Tile")],
    ids=range(5),
)
def test_pairs_with_two_angles_stay(rotated: str, source: str, tmp_path: Path) -> None:
    """The op takes one angle for each pair, so both must be known to be the same: halves of a Tile are."""
    given, made, angles = "", "", np.random.default_rng(0).random((6, 8)).astype(np.float32)
    constants = tables(angles) if source == "constants" else INDICES | {"columns": angles[:1]}
    if source == "inputs":
        given = ", float[6, 8] cos, float[6, 8] sin"
    elif source != "constants":
        given = f", float[6, {4 if source == 'Tile' else 1}] t"
        made = f"a = {source} (t, {'twice' if source == 'Tile' else 'columns'}) cos = Cos (a) sin = Sin (a)"
    text = f"(float[B, 2, 6, 8] x{given}) => (float[B, 2, 6, 8] y) {{ {made} {turned(rotated, 'x', 'y')} }}"
    report, model = optimized(parsed(text, **constants), tmp_path)
    fuses = (rotated, source) == (HALVES, "Tile")
    assert report.skipped == ({} if fuses else {"rotary embedding: the angles of a pair may differ": 1})
    assert len(nodes(model, "RotaryEmbedding")) == fuses
