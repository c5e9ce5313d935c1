"""Folders of onnxruntime-genai: read, optimised, and opened by genai itself."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from genai_models import FAMILIES, GENAI, Decoder, build
from optimizing import nodes, parsed, weights
from wheels import unpacked

from twinop.deploy.errors import PackError
from twinop.deploy.pack.options import Options
from twinop.deploy.pack.packing import pack_genai
from twinop.errors import ExportError
from twinop.library import find_library
from twinop.optimize import OptimizeReport, command, optimize_folder
from twinop.optimize.rewrite_check import RewriteCheck

STEPS, PROMPT = 64, [5, 9, 11, 33, 7]
GENERATE = """
import json, sys
import numpy as np, onnxruntime_genai as og

def tokens(folder):
    model = og.Model(folder)
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=40, do_sample=False)
    generator = og.Generator(model, parameters)
    generator.append_tokens(np.array([[5, 9, 11, 33, 7]], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)]

print(json.dumps([tokens(folder) for folder in sys.argv[1:]]))
"""
slow = pytest.mark.slow
UNTIMED = patch.object(RewriteCheck, "_milliseconds", lambda self, *paths, stop: [1.0] * len(paths))


def optimized(source: Path, target: Path, device: str = "cpu", **options: Any) -> OptimizeReport:
    with UNTIMED:
        report = optimize_folder(source, target, device=device, **options)
    assert not report.reverted, report.reverted
    return report


def assert_same_logits(source: Path, target: Path, noise: float, provider: str = "CPU") -> None:
    """Feeds both with the source's tokens; the best one is the same where it leads by more than the noise."""
    library = find_library("custom_ops")
    old, new = Decoder(source, 80, provider=provider), Decoder(target, 80, library, provider)
    tokens = PROMPT
    for _ in range(STEPS):
        expected, found = old(tokens), new(tokens)
        error = np.abs(found - expected).max()
        assert error <= noise * np.abs(expected).max()
        second, first = np.sort(expected)[-2:]
        assert found.argmax() == expected.argmax() or first - second <= 2 * error
        tokens = [int(expected.argmax())]


@pytest.mark.parametrize(
    "family", [each if index < 4 else pytest.param(each, marks=slow) for index, each in enumerate(FAMILIES)]
)
def test_64_steps_of_each_family(family: str, tmp_path: Path) -> None:
    source = build(family, tmp_path)
    report = optimized(source, tmp_path / "fast")
    norm = "layer_norm" if family == "Phi" else "rms_norm"
    assert report.made[f"add_{norm}"] == (2 if family == "Phi" else 4)
    assert_same_logits(source, tmp_path / "fast", 1e-5)


def test_genai_generates_the_same_tokens(tmp_path: Path) -> None:
    source = build("Llama", tmp_path)
    with UNTIMED:
        pack_genai(Options(source, tmp_path / "fast", genai=True, device="cpu"))
    assert {path.name for path in (tmp_path / "fast").iterdir()} == {
        "genai_config.json", "libcustom_ops.so", "model.onnx", "tokenizer.json", "tokenizer_config.json",
        "twinop-pack.json",
    }  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(unpacked(GENAI))}
    command = [sys.executable, "-c", GENERATE, str(source), str(tmp_path / "fast")]
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    old, new = json.loads(ran.stdout.splitlines()[-1])
    assert old == new and len(old) == 40
    (tmp_path / "fast/libcustom_ops.so").unlink()  # it is the one that ran
    assert subprocess.run([*command[:3], str(tmp_path / "fast")], env=env, capture_output=True).returncode


def test_norms_of_q_and_k_that_only_cuda_computes(tmp_path: Path) -> None:
    source = build("Qwen3", tmp_path, "fp16", "cuda", enable_cuda_graph=1)
    report = optimized(source, tmp_path / "fast", "cuda", without=["cached_attention"])
    assert report.own_error is not None and report.error < 2 * report.own_error
    model = ir.load(tmp_path / "fast/model.onnx")
    norms = {str(node.inputs[15].name) for node in nodes(model, "GroupQueryAttention")}  # type: ignore[union-attr]
    assert len(norms) == 2 and not nodes(model, "Reshape")
    assert len(nodes(model, "CustomLinear")) == 7  # q, k and v stay one product
    optimized(source, tmp_path / "cpu")
    assert all(
        len(node.inputs) < 15 for node in nodes(ir.load(tmp_path / "cpu/model.onnx"), "GroupQueryAttention")
    )
    Decoder(tmp_path / "cpu", 80, find_library("custom_ops"))(PROMPT)


@pytest.mark.parametrize(("block", "left"), [(32, 0), (64, 11)])
def test_what_cuda_gets_for_int4(block: int, left: int, tmp_path: Path) -> None:
    source = build("Llama", tmp_path, "int4", "cuda", block_size=block)
    report = optimized(source, tmp_path / "fast", "cuda")
    assert report.own_error is not None and report.error < 2 * report.own_error
    assert report.made["attention over a cache"] == 2
    types = [node.op_type for node in ir.load(tmp_path / "fast/model.onnx").graph]
    assert types.count("MatMulNBits") == left
    if left:
        reason = "MatMulNBits: blocks of 64; linear_q has those of 32 and 128"
        assert report.left == {reason: left} and f"left alone: {left} {reason}" in str(report)
    else:  # q, k and v, what follows attention, what follows a gate, and the logits
        assert (types.count("CustomLinearQ"), types.count("CustomLinearQSwiglu")) == (7, 2)
        assert report.made["linear_q"] == 7 and not {"swiglu", "silu"} & report.made.keys()


def test_products_of_int8_are_compared_in_floats(tmp_path: Path) -> None:
    source = build("Phi3", tmp_path, "int4")
    report = optimized(source, tmp_path / "fast")
    assert report.error < 1e-5 and report.made["add_rms_norm"] == 4
    products = nodes(ir.load(tmp_path / "fast/model.onnx"), "MatMulNBits")
    assert {node.attributes["accuracy_level"].value for node in products} == {4}
    assert_same_logits(source, tmp_path / "fast", 3e-2)


def test_norms_of_gemma_stay_in_fp32(tmp_path: Path) -> None:
    """What it adds up may exceed fp16."""
    source = build("Gemma2", tmp_path, "fp16", "cuda")
    optimized(source, tmp_path / "fast", "cuda")
    model = ir.load(tmp_path / "fast/model.onnx")
    sums = [node.inputs[0] for node in nodes(model, "CustomAddRmsNorm")]
    products = [node.inputs[0] for node in nodes(model, "CustomLinear")]
    assert {value.dtype for value in sums if value is not None} == {ir.DataType.FLOAT}
    assert {value.dtype for value in products if value is not None} == {ir.DataType.FLOAT16}


@slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("precision", "provider"), [("fp16", "cuda"), ("bf16", "cuda"), ("int4", "cuda"), ("int4", "cpu")]
)
def test_each_precision_is_optimised(family: str, precision: str, provider: str, tmp_path: Path) -> None:
    source = build(family, tmp_path, precision, provider)
    report = optimized(source, tmp_path / "fast", provider)
    assert report.nodes_after < report.nodes_before
    if precision == "int4" and provider == "cpu":  # activations are int8: the noise of a rounding
        assert_same_logits(source, tmp_path / "fast", 3e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "Phi"])
@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_64_steps_on_cuda(family: str, precision: str, tmp_path: Path) -> None:
    source = build(family, tmp_path, precision, "cuda")
    optimized(source, tmp_path / "fast", "cuda")
    assert_same_logits(source, tmp_path / "fast", 1e-2, "CUDA")


# ---------------------------------------------------------------------- folders without genai


def folder_of(proto: onnx.ModelProto, folder: Path, **session_options: Any) -> Path:
    folder.mkdir()
    onnx.save(proto, folder / "model.onnx")
    decoder = {"filename": "model.onnx", "session_options": session_options}
    (folder / "genai_config.json").write_text(json.dumps({"model": {"decoder": decoder}}))
    return folder


def normed(own: str = "y = Relu (n)") -> onnx.ModelProto:
    text = f"(float[B, 8] x) => (float[B, 8] y) {{ n = SimplifiedLayerNormalization (x, scale) {own} }}"
    proto = parsed(text, scale=weights(8))
    proto.opset_import.append(onnx.helper.make_opsetid("test_cube", 1))
    return proto


def options_of(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "genai_config.json").read_text())
    found: dict[str, Any] = config["model"]["decoder"]["session_options"]
    return found


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cpu", [{"cuda": {"enable_cuda_graph": "1"}}], []),
        ("cuda", [{"cuda": {"enable_cuda_graph": "1"}}], [{"cuda": {"enable_cuda_graph": "1"}}]),
        ("cuda", [], [{"cuda": {"enable_cuda_graph": "0"}}]),
    ],
)
def test_the_edits_of_genai_config(
    device: str, given: list[Any], expected: list[Any], tmp_path: Path
) -> None:
    source = folder_of(normed(), tmp_path / "old", provider_options=given, log_id="mine")
    (source / "adapter").mkdir()
    (source / "adapter/notes.txt").write_text("kept")
    with UNTIMED:
        command.main(source, tmp_path / "fast", device=device)
    assert options_of(tmp_path / "fast") == {
        "provider_options": expected, "log_id": "mine", "custom_ops_library": "libcustom_ops.so",
    }  # fmt: skip
    assert (tmp_path / "fast/adapter/notes.txt").read_text() == "kept"


CUBE = "y = test_cube.CustomCube (n)"


@pytest.mark.parametrize("is_named", [True, False])
def test_own_ops_and_twinops_in_one_library(is_named: bool, tmp_path: Path) -> None:
    own = find_library("test_cube")
    source = folder_of(
        normed(CUBE), tmp_path / "old", **({"custom_ops_library": own.name} if is_named else {})
    )
    if is_named:
        (source / own.name).write_bytes(own.read_bytes())
    optimized(source, tmp_path / "fast", library=None if is_named else own)
    assert options_of(tmp_path / "fast")["custom_ops_library"] == "libtwinop_genai.so"
    moved = (tmp_path / "fast").rename(tmp_path / "moved")
    options, x = ort.SessionOptions(), np.ones((2, 8), np.float32)
    options.register_custom_ops_library(str(moved / "libtwinop_genai.so"))
    [y] = ort.InferenceSession(moved / "model.onnx", options).run(None, {"x": x})
    assert np.allclose(y, np.broadcast_to(weights(8) ** 3, (2, 8)), rtol=1e-3)
    alone = shutil.copy(moved / "libtwinop_genai.so", tmp_path)
    with pytest.raises(Exception, match=f"{tmp_path}/lib.*: cannot open shared object file"):
        ort.SessionOptions().register_custom_ops_library(alone)


def test_folders_that_cannot_be_optimised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = folder_of(normed(), tmp_path / "old"), tmp_path / "fast"

    def refusal(**options: Any) -> str:
        with pytest.raises(ExportError) as error:
            optimize_folder(source, target, **{"device": "cpu"} | options)
        assert not target.exists() and not [*tmp_path.glob(".twinop*")]
        return str(error.value)

    def configure(text: str) -> None:
        (source / "genai_config.json").write_text(text)

    kept = (source / "genai_config.json").read_text()
    assert "device='gpu': expected one of: cuda, cpu" in refusal(device="gpu")
    for library in ("libother.so", "text.so"):
        (source / "text.so").write_text("no library")
        configure(
            kept.replace('"session_options": {}', f'"session_options": {{"custom_ops_library": "{library}"}}')
        )
        assert f"names {library} as custom_ops_library already, and genai takes one" in refusal()
    configure('{"model": {"decoder": {"pipeline": []}}}')
    assert "has no model.decoder.filename; twinop optimises decoders of one model" in refusal()
    configure(kept.replace("model.onnx", "../model.onnx"))
    assert "is not in the folder. Put it there" in refusal()
    configure(kept.replace("model.onnx", "missing.onnx"))
    assert "missing.onnx: no such file" in refusal()
    configure("{")
    assert "genai_config.json: cannot be read" in refusal()
    (source / "genai_config.json").unlink()
    assert "no such file. Expected a folder of onnxruntime-genai's builder, or an .onnx file" in refusal()
    configure(kept)
    onnx.save(normed(CUBE), source / "model.onnx")
    monkeypatch.setenv("CC", "/no/compiler")
    assert "/no/compiler cannot be run" in refusal(library=find_library("test_cube"))
    target.mkdir()
    (target / "file").touch()
    with pytest.raises(ExportError, match="exists already. Name a new folder, or an empty one"):
        optimize_folder(source, target, device="cpu")
    with pytest.raises(PackError, match="already exists, and is not from twinop pack"):
        pack_genai(Options(source, target, genai=True, device="cpu"))
