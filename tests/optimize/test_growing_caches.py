"""Decoders whose caches grow: exports of transformers and optimum, steps of them, and wrong caches."""

import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from decoder_files import export_with_cache, write
from optimizing import joined, nodes, optimized, parsed, weights
from ort_versions import environment
from other_sizes import assert_same

from twinop import deploy
from twinop.deploy.errors import FeedError
from twinop.optimize import branches, decoders, equivalence
from twinop.optimize.graph import subgraphs
from twinop.optimize.growing_caches import FUSED
from twinop.optimize.load import load, separate_names


class Decoder:
    """Runs a model: the caches that it returns are those of the next step."""

    def __init__(self, path: Path, batch: int) -> None:
        self.session, self.batch, self.done = deploy.session(path, ["CPUExecutionProvider"]), batch, 0
        self.caches = {
            name: np.zeros([batch, *(n if isinstance(n, int) else 0 for n in spec.shape[1:])], np.float32)
            for name, spec in self.session.inputs.items()
            if name.startswith("past") and spec.shape
        }

    def feeds(self, tokens: np.ndarray) -> dict[str, Any]:
        ids = tokens.reshape(self.batch, -1)
        end = self.done + ids.shape[1]
        given = {
            "input_ids": ids,
            "attention_mask": np.ones((self.batch, end), np.int64),
            "position_ids": np.tile(np.arange(self.done, end), (self.batch, 1)),
            "use_cache_branch": np.array([self.done > 0]),
        }
        return self.caches | {name: each for name, each in given.items() if name in self.session.inputs}

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the logits after the last of some new tokens [batch, n]."""
        found = self.session.run(self.feeds(tokens))
        self.done += tokens.size // self.batch
        self.caches = {name: found[name.replace("past_key_values", "present")] for name in self.caches}
        return np.asarray(found["logits"][:, -1])


def assert_same_steps(source: Path, target: Path, batch: int, steps: int = 64) -> None:
    """Feeds both with the source's tokens."""
    old, new = Decoder(source, batch), Decoder(target, batch)
    tokens = np.random.default_rng(0).integers(3, 97, (batch, 5))
    seen = set[int]()
    for _ in range(steps):
        expected, found = old(tokens), new(tokens)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
        tokens = expected.argmax(-1)
        seen |= {*tokens.tolist()}
    assert len(seen) > 3


def _stored(path: Path) -> int:
    """Returns the bytes of a model's weights."""
    model = ir.load(path)
    graphs = [model.graph, *(each for node in model.graph.all_nodes() for each in subgraphs(node))]
    weights = [value.const_value for graph in graphs for value in graph.initializers.values()]
    return sum(each.nbytes for each in weights if each is not None and each.size > 64)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param(name, device, marks=() if fast == device else pytest.mark.slow)
        for name, fast in (
            ("dynamo_qwen2", "cpu"),
            ("dynamo_llama", ""),
            ("optimum_gpt2", ""),
            ("optimum_llama_merged", "cuda"),
        )
        for device in ("cpu", "cuda")
    ],
)
def test_64_steps_of_exports(name: str, device: str, tmp_path: Path) -> None:
    report, model = optimized(write(name, tmp_path), tmp_path, device=device)
    is_merged = name == "optimum_llama_merged"  # with two branches
    assert report.fused["add_layer_norm" if "gpt2" in name else "add_rms_norm"] == 2 + 2 * is_merged
    left = report.skipped.get("attention: keys or values of a cache", 0)
    assert (report.fused.get(FUSED, 0), left) == ((1, 0) if device == "cpu" else (0, 1))
    assert report.fused.get("attention", 0) == is_merged  # of prompts
    assert ("1.23 for Attention" in report.needs) == (device == "cpu")
    assert _stored(report.path) < 1.01 * _stored(report.source)
    assert_same_steps(report.source, report.path, batch=1)
    assert_same_steps(report.source, report.path, batch=8, steps=8)
    if is_merged:  # each branch has its attention alone
        [choice] = nodes(model, "If")
        kinds = [Counter(node.op_type for node in branch) for branch in subgraphs(choice)]
        with_past, without = sorted(kinds, key=lambda each: each["MultiHeadAttention"])
        assert with_past["Attention" if device == "cpu" else "Softmax"] == without["MultiHeadAttention"] == 1
        assert with_past["MultiHeadAttention"] == without["Attention"] == without["Softmax"] == 0
        assert not nodes(model, "Attention", "MultiHeadAttention", "Softmax")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Phi3", "SmolLM3"])
def test_64_steps_of_transformers(family: str, tmp_path: Path) -> None:
    sizes = {"head_dim": 8} if family in ("Qwen3", "Gemma") else {}
    export_with_cache(family, tmp_path / "old.onnx", **sizes)
    for device in ("cpu", "cuda"):
        report, _ = optimized(tmp_path / "old.onnx", tmp_path, device=device)
        assert report.fused["add_rms_norm"] == 2 and (report.fused.get(FUSED) == 1) == (device == "cpu")
        assert any("rotary" in kind for kind in report.fused)
        assert_same_steps(report.source, report.path, 2)


_HEADS = "{0}_r = Reshape ({0}_p, heads) {0} = Transpose <perm = [0, 2, 1, 3]> ({0}_r)"
_ATTENDS = """{0}_kt = Transpose <perm = [0, 1, 3, 2]> ({k}) {0}_s = MatMul ({q}, {0}_kt)
    {0}_b = Add ({0}_s, {bias}) {0}_w = Softmax ({0}_b) {0}_a = MatMul ({0}_w, {v})
    {0}_t = Transpose <perm = [0, 2, 1, 3]> ({0}_a) {0}_m = Reshape ({0}_t, joined) {0} = Add ({0}_m, {x})"""


def _branch(name: str, has_cache: bool) -> str:
    """Returns a layer of a decoder with cross-attention, whose keys and values a cache may hold."""

    def heads(x: str, *letters: str) -> str:
        return " ".join(f"{n}{c}_p = MatMul ({x}, w{c}) {_HEADS.format(n + c)}" for c in letters)

    n, cache = name, has_cache
    own = [f"Concat <axis = 2> (d{c}, {n}{c})" if cache else f"Identity ({n}{c})" for c in "kv"]
    cross = [f"Identity (e{c})" if cache else f"Identity ({n}{c.upper()})" for c in "kv"]
    kept = ["Constant <value = float[0, 2, 1, 8] {}> ()" if cache else f"Identity ({n}c{c})" for c in "kv"]
    return f"""{n}x = Gather (table, input_ids) {heads(n + "x", "q", "k", "v")}
        {n}dk = {own[0]} {n}dv = {own[1]}
        {_ATTENDS.format(n + "o", q=n + "q", k=n + "dk", v=n + "dv", bias="zero", x=n + "x")}
        {heads(n + "o", "Q")} {"" if cache else heads("encoder_hidden_states", "K", "V")}
        {n}ck = {cross[0]} {n}cv = {cross[1]}
        {n}bm = Cast <to = 1> (encoder_attention_mask) {n}bn = Sub ({n}bm, one) {n}bs = Mul ({n}bn, big)
        {n}bias = Unsqueeze ({n}bs, middle)
        {_ATTENDS.format(n + "z", q=n + "Q", k=n + "ck", v=n + "cv", bias=n + "bias", x=n + "o")}
        {n}y = MatMul ({n}z, head) {n}ek = {kept[0]} {n}ev = {kept[1]}"""


def merged_encoder_decoder() -> onnx.ModelProto:
    """Makes a decoder as optimum merges T5's: caches of the encoder's come back empty where they are read."""
    grown = "float[B, 2, past_decoder_sequence_length, 8]"
    encoded = "float[B, 2, encoder_sequence_length_out, 8]"
    results = ", ".join(f"float[U, 2, P, 8] {{0}}{each}" for each in ("dk", "dv", "ek", "ev"))
    heads = {name: f"float[X, Y, 32] {name}y, {results.format(name)}" for name in "ab"}
    branches = [f"{name} () => ({heads[name]}) {{ {_branch(name, name == 'a')} }}" for name in "ab"]
    text = f"""(int64[B, encoder_sequence_length] encoder_attention_mask,
        int64[B, decoder_sequence_length] input_ids,
        float[B, encoder_sequence_length, 16] encoder_hidden_states,
        {grown} dk, {grown} dv, {encoded} ek, {encoded} ev, bool[1] use_cache_branch)
        => (float[B, decoder_sequence_length, 32] y, float[B, 2, T, 8] present_dk,
            float[B, 2, T, 8] present_dv, {encoded} present_ek, {encoded} present_ev) {{
        y, present_dk, present_dv, present_ek, present_ev = If (use_cache_branch) <
            then_branch = {branches[0]}, else_branch = {branches[1]}> }}"""
    arrays = {f"w{c}": weights(16, 16, seed=ord(c)) for c in "qkvQKV"}
    arrays |= {"table": weights(32, 16), "head": weights(16, 32, seed=2), "heads": np.array([0, 0, 2, 8])}
    arrays |= {"joined": np.array([0, 0, 16]), "middle": np.array([1, 2])}
    arrays |= {name: np.array(number, np.float32) for name, number in (("zero", 0), ("one", 1), ("big", 1e4))}
    return parsed(text, **arrays)


def test_merged_encoder_decoders(tmp_path: Path) -> None:
    """Inputs are generated for both branches: the encoder's lengths are alike, and not the decoder's."""
    report, _ = optimized(merged_encoder_decoder(), tmp_path)
    assert not report.notes
    model = load(report.source)
    separate_names(model)
    branches.move_out(model)
    decoders.set_sizes(model)
    reference, _ = equivalence.generated(report.source, model, None, None)
    seen = set()
    for case in reference.cases[: reference.typical]:
        lengths = {case[name].shape[axis] for name, axis in (
            ("encoder_attention_mask", 1), ("encoder_hidden_states", 1), ("ek", 2), ("ev", 2),
        )}  # fmt: skip
        assert len(lengths) == 1
        seen.add((case["input_ids"].shape[1], case["dk"].shape[2], bool(case["use_cache_branch"])))
    assert seen == {(1, 9, True), (1, 18, True), (7, 0, False), (7, 9, True)}
    assert any((case["encoder_attention_mask"] == 0).any() for case in reference.cases)


@pytest.mark.parametrize(("opset", "dtype"), [(13, None), (17, "float16"), (20, None), (26, "float16")])
def test_only_one_branch_runs_in_any_opset(opset: int, dtype: str | None, tmp_path: Path) -> None:
    """onnx's conversion keeps which nodes are of a branch; the first one fails for other inputs."""
    text = """(float[N, 8] x) => (y) { rows = Shape (x) n = Gather (rows, zero) c = Equal (n, four)
        y = If (c) < then_branch = a () => (o) { m = MatMul (x, w) r = Relu (m) s = Reshape (r, two)
        o = Squeeze (s, axis) },
        else_branch = b () => (e) { m = MatMul (x, v) r = Relu (m) e = Tanh (r) }> }"""
    integers = {"zero": 0, "four": 4, "two": [1, 2, 16], "axis": [0]}
    arrays = {name: np.array(number) for name, number in integers.items()} | {"w": weights(8, 8)}
    proto = parsed(text, opset, 8 if opset < 20 else 10, v=weights(8, 8, seed=1), **arrays)
    report, model = optimized(proto, tmp_path, dtype=dtype)
    assert report.fused["linear+relu"] == 2
    [choice] = nodes(model, "If")
    assert [sum(node.op_type == "CustomLinear" for node in each) for each in subgraphs(choice)] == [1, 1]
    for rows in (4, 7) if dtype is None else ():
        assert_same(tmp_path, 1e-5, 1e-6, x=(rows, 8))


_STEP = """hq = MatMul (x, wq) hk = MatMul (x, wk) hv = MatMul (x, wv)
    rq = Reshape (hq, apart) rk = Reshape (hk, apart_kv) rv = Reshape (hv, apart_kv)
    q = Transpose <perm=[0, 2, 1, 3]> (rq) nk = Transpose <perm=[0, 2, 1, 3]> (rk)
    nv = Transpose <perm=[0, 2, 1, 3]> (rv) k = Concat <axis=2> (pk, nk) v = Concat <axis=2> (pv, nv)
    kt = Transpose <perm=[0, 1, 3, 2]> (k) a = MatMul (q, kt) b = Mul (a, half)"""
_MASKED = {
    "lowest": "m = Where (shown, zero, lowest) c = Add (b, m) g = Softmax (c)",
    "infinite": """m = Where (shown, zero, inf) c = Add (b, m) p = Softmax (c) n = IsNaN (p)
        g = Where (n, zero, p)""",
    "chosen": "c = Where (shown, b, lowest) g = Softmax (c)",
    # as in GPT-Neo: what only one mask hides is more than what both hide
    "twice": """m = Where (shown, zero, lowest) c = Add (b, m) other = Gather (shown, second)
        n = Where (other, zero, lowest) d = Add (c, n) g = Softmax (d)""",
    "none": "g = Softmax (b)",
    # of a mask that counts the rows of a cache, as in MPT and T5
    "places": """whole = Shape (k) n = Gather (whole, two) places = Range (first, n, step)
        f = Cast <to = 1> (places) h = Shape <start = -2, end = 3> (k) all = Reshape (f, h)
        c = Add (b, all) g = Softmax (c)""",
    "one head": "g = Softmax (b)",  # of keys and values, as in Falcon
}
_RUN_BOTH = """
import sys
import numpy, onnxruntime
old, new, cases, *libraries = sys.argv[1:]
options = onnxruntime.SessionOptions()
for library in libraries:
    options.register_custom_ops_library(library)
old, new = (onnxruntime.InferenceSession(each, options, ["CPUExecutionProvider"]) for each in (old, new))
file, names = numpy.load(cases), [each.name for each in old.get_outputs()]
for index in range(3):
    feeds = {each.name: file[f"{each.name}{index}"] for each in new.get_inputs()}
    for name, expected, found in zip(names, old.run(None, feeds), new.run(None, feeds)):
        numpy.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=name)
print(onnxruntime.__version__)
"""


def step(masked: str) -> onnx.ModelProto:
    heads = 1 if masked == "one head" else 2
    past, all_rows = f"float[B, {heads}, P, 4]", f"float[B, {heads}, T, 4]"
    signature = f"""(float[B, S, 8] x, {past} pk, {past} pv, bool[B, 1, S, T] shown)
        => (float[B, S, 8] y, {all_rows} k, {all_rows} v)"""
    end = "o = MatMul (g, v) t = Transpose <perm=[0, 2, 1, 3]> (o) y = Reshape (t, joined)"
    widths = {"q": 8, "k": 4 * heads, "v": 4 * heads}
    constants = {
        f"w{name}": weights(8, width, seed=seed) for seed, (name, width) in enumerate(widths.items())
    }
    constants |= {"apart": np.array([0, 0, 2, 4]), "apart_kv": np.array([0, 0, heads, 4])}
    constants |= {"joined": np.array([0, 0, 8]), "zero": np.float32(0)}
    numbers = {"first": 0, "step": 1, "two": 2, "second": [1]}
    constants |= {name: np.array(number) for name, number in numbers.items()}
    lowest = {"lowest": np.finfo(np.float32).min, "inf": np.float32(-np.inf), "half": np.float32(0.5)}
    return parsed(f"{signature} {{ {_STEP} {_MASKED[masked]} {end} }}", **constants, **lowest)


def test_standard_attention_of_each_release(tmp_path: Path) -> None:
    """It changed between 1.27 and 1.31: which keys rows that a mask hides see, and causal masks."""
    cases = dict[str, np.ndarray]()
    for index, (before, new) in enumerate([(5, 1), (5, 3), (0, 4)]):
        shown = np.random.default_rng(index).random((2, 1, new, before + new)) < 0.6
        shown[0, 0, 0], shown[1, 0, -1] = False, True  # a row that sees nothing, and one that sees all
        for masked in _MASKED:
            caches = [weights(2, 1 if masked == "one head" else 2, before, 4, seed=seed) for seed in (1, 2)]
            case = {"x": weights(2, new, 8), "pk": caches[0], "pv": caches[1], "shown": shown}
            cases |= {f"{masked}/{name}{index}": array for name, array in case.items()}
    given: Any = {name[:-1]: array for name, array in cases.items() if name.endswith("1")}
    np.savez(tmp_path / "inputs.npz", **given)
    np.savez(tmp_path / "cases.npz", **cases)  # type: ignore[arg-type]
    proto = joined({masked: step(masked) for masked in _MASKED})
    report, model = optimized(proto, tmp_path, device="cpu", inputs_file=tmp_path / "inputs.npz")
    assert len(nodes(model, "Attention")) == len(_MASKED) and report.needs == ["1.23 for Attention"]
    files: list[Any] = [report.source, report.path, tmp_path / "cases.npz", *report.libraries]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for version in ("1.27.0", "1.32.0"):
        line = [environment(version), "-c", _RUN_BOTH, *files]
        done = subprocess.run(line, capture_output=True, text=True, env=environ)
        assert done.stdout.strip() == version, done.stderr[-2000:]


def test_wrong_caches(tmp_path: Path) -> None:
    decoder = Decoder(write("optimum_gpt2", tmp_path), 2)
    decoder(np.full((2, 4), 5))
    feeds = decoder.feeds(np.full((2, 1), 5))
    key, value = decoder.caches

    def said(**change: Any) -> str:
        given = {name: each for name, each in (feeds | change).items() if each is not None}
        with pytest.raises(FeedError) as error:
            decoder.session.run(given)
        return str(error.value)

    short = {name: each[:, :, :3] for name, each in decoder.caches.items()}
    found = f"is 3 in input {key} and 4 in input {value}: it must be the same"
    assert found in said(**{key: short[key]})
    total = "dimension past_sequence_length + sequence_length is"
    assert f"{total} 4 in input {key} and input_ids and 5 in input attention_mask" in said(**short)
    assert f"{total} 5 in input {key} and input_ids and 4" in said(attention_mask=np.ones((2, 4), np.int64))
    assert "is float16[2, 4, 4, 8], the model takes float32" in said(**{key: feeds[key].astype(np.float16)})
    assert "input missing: position_ids (int64" in said(position_ids=None)
    assert f"input missing: {key} (float32" in said(**dict.fromkeys(decoder.caches))
