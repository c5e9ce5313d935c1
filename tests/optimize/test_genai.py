"""Folders of onnxruntime-genai: read, optimised, and opened by genai itself."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from genai_models import FAMILIES, PROMPT, STEPS, Decoder, Genai, build
from optimizing import nodes, parsed, rewritten, types, weights
from typer.testing import CliRunner

from twinop.cli import app
from twinop.deploy.errors import PackError
from twinop.deploy.pack.command import Options
from twinop.deploy.pack.packing import pack_genai
from twinop.errors import ExportError, TwinopError
from twinop.libraries.library import find_library
from twinop.optimize import OptimizeReport, command, equivalence, optimize_folder, quantised
from twinop.optimize.rewrite import skipped

Builds = Callable[..., Path]
slow = pytest.mark.slow


def optimized(source: Path, target: Path, device: str = "cpu", **options: Any) -> OptimizeReport:
    report = optimize_folder(source, target, device=device, **options)
    assert not report.reverted, report.reverted
    return report


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """Builds each model once."""
    return cache(lambda *form, **extra: build(*form, folder=tmp_path_factory.mktemp("built"), **extra))


@pytest.fixture(scope="module")
def genai() -> Iterator[Genai]:
    opened = Genai()
    yield opened
    opened.process.kill()


def nudged(source: Path, target: Path) -> Path:
    """Copies a folder whose model has other last bits; where products are of int8, they are of floats."""
    shutil.copytree(source, target)
    model = ir.load(target / "model.onnx")
    ir.external_data.load_to_model(model)
    for node in model.graph:
        node.attributes.pop("accuracy_level", None)
    ir.save(equivalence.nudge_weights(model), target / "model.onnx")
    return target


# The CPU has no attention in fp16 with norms of q and k.
FP16 = [family for family in FAMILIES if family not in ("Qwen3", "Gemma3", "Lfm2")]
# One of each kind of layer; --all has all. Llama is a journey, and Gemma 2 below.
DEFAULT = {"Phi3": "fp32"} | dict.fromkeys(("Phi", "Gemma3", "Lfm2"), "int4")


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        pytest.param(family, precision, marks=() if precision == DEFAULT.get(family) else slow)
        for precision in ("fp32", "int4", "fp16")
        for family in (FP16 if precision == "fp16" else FAMILIES)
    ],
)
def test_same_in_genai(family: str, precision: str, built: Builds, genai: Genai, tmp_path: Path) -> None:
    """Fed with the original's tokens, logits differ by no more than the original's own noise makes two."""
    source = built(family, precision, "cuda" if precision == "fp16" else "cpu")
    report = optimized(source, tmp_path / "fast")
    norm = "layer_norm" if family == "Phi" else "rms_norm"
    assert report.fused[f"add_{norm}"] == (2 if family == "Phi" else 4) and report.libraries
    products = nodes(ir.load(tmp_path / "fast/model.onnx"), "MatMulNBits")
    levels = [node.attributes["accuracy_level"].value for node in products]
    assert levels == [4] * len(levels)  # they were compared in floats
    assert report.error < (3e-3 if precision == "fp16" else 1e-5)
    tokens, expected = genai(source)
    generated, found = genai(tmp_path / "fast", tokens)
    _, near = genai(built(family) if precision == "fp16" else nudged(source, tmp_path / "near"), tokens)
    noise = np.abs(near - expected).max()
    assert np.abs(found - expected).max() <= 2 * noise  # both have it
    for logits in (expected, found):
        logits[:, 2] = -np.inf  # the end; genai was asked for more
    second, first = np.sort(expected)[:, -2:].T
    is_sure = first - second > 2 * noise
    assert is_sure.sum() >= STEPS / 4
    assert (found.argmax(-1) == expected.argmax(-1))[is_sure].all()
    other = [a != b for a, b in zip(tokens[len(PROMPT) :], generated[len(PROMPT) :], strict=True)]
    assert True not in other or not is_sure[other.index(True)]


@pytest.mark.parametrize(
    ("family", "precision", "device"),
    [
        ("Gemma2", "fp16", "cuda"),
        pytest.param("Qwen2", "fp16", "cpu", marks=slow),
        ("Qwen2", "int4", "cuda"),
    ],
)
def test_several_sequences(
    family: str, precision: str, device: str, built: Builds, genai: Genai, tmp_path: Path
) -> None:
    """The CPU runs what is for CUDA, too: our attention over caches, with padding and CUDA graphs' masks."""
    source = built(family, precision, "cuda", enable_cuda_graph=1)
    report = optimized(source, tmp_path / "fast", device)
    assert ("attention over a cache" in report.fused) == (device == "cuda")
    other = built(family) if precision == "fp16" else built(family, "int4", accuracy_level=1)  # in fp32
    prompts = [PROMPT, [8, 100, 33], [77, 3, 4, 5, 6, 7, 8]]
    folders = (source, other, tmp_path / "fast")
    tokens, logits = zip(*(genai.several(each, prompts) for each in folders), strict=True)
    expected, near, found = (np.delete(each, 2, -1) for each in logits)  # the end; genai was asked for more
    compared = 0
    for i in range(len(prompts)):
        alike, steps = (_steps_until_other(tokens[0][i], each[i]) for each in tokens[1:])
        noise = np.abs(near[i, :alike] - expected[i, :alike]).max()
        assert np.abs(found[i, :steps] - expected[i, :steps]).max() <= 2 * noise  # both have it
        second, first = np.sort(expected[i, steps - 1])[-2:]
        assert steps == STEPS or first - second <= 4 * noise
        compared += steps
    assert compared >= STEPS


def test_packed_in_float8(built: Builds, genai: Genai, tmp_path: Path) -> None:
    """genai's own steps are as close as the report says."""
    source = built("Qwen2", "fp16", "cuda")
    float8 = pack_genai(Options(source, tmp_path / "fast", genai=True, dtype="float8")).float8
    assert len(float8.layers) + len(float8.returned) == 7 and float8.layers
    tokens, expected = genai(source)
    _, found = genai(tmp_path / "fast", tokens)
    assert 1e-3 < equivalence.relative_error(expected, found) < 2 * float8.error


def _steps_until_other(tokens: np.ndarray, others: np.ndarray) -> int:
    """Returns the number of steps that have the same tokens before them."""
    return int(np.append(np.flatnonzero(tokens != others), STEPS - 1)[0]) + 1


def test_norms_of_q_and_k_that_only_cuda_computes(built: Builds, genai: Genai, tmp_path: Path) -> None:
    source = built("Qwen3", "fp16", "cuda", enable_cuda_graph=1)
    report = optimized(source, tmp_path / "fast", "cuda", without=["cached_attention"])
    assert report.own_error is not None and report.error < 2 * report.own_error
    model = ir.load(tmp_path / "fast/model.onnx")
    norms = {str(node.inputs[15].name) for node in nodes(model, "GroupQueryAttention")}  # type: ignore[union-attr]
    assert len(norms) == 2 and not nodes(model, "Reshape")
    assert len(nodes(model, "CustomLinear")) == 7  # q, k and v stay one product
    optimized(source, tmp_path / "cpu")
    on_cpu = nodes(ir.load(tmp_path / "cpu/model.onnx"), "GroupQueryAttention")
    assert all(len(node.inputs) < 15 for node in on_cpu)
    genai(tmp_path / "cpu")


def test_decoders_of_embeddings(built: Builds, tmp_path: Path) -> None:
    source = built("Llama", "fp16", "cuda", exclude_embeds="true")
    report = optimized(source, tmp_path / "fast", "cuda")
    assert report.own_error is not None and report.error < 2 * report.own_error
    assert report.fused["attention over a cache"] == 2 and not report.skipped


def test_folders_that_stay_as_they_are_for_beams(built: Builds, tmp_path: Path) -> None:
    source = shutil.copytree(built("Llama", "fp16", "cuda", enable_cuda_graph=1), tmp_path / "old")
    change("search.num_beams", 4, source)
    report = optimized(source, tmp_path / "beams", "cuda", dry_run=True)
    assert report.fused and "attention over a cache" not in report.fused


def test_what_only_16_bits_have_is_named(built: Builds, tmp_path: Path) -> None:
    report = optimized(built("Llama", "int4"), tmp_path / "wide", "cuda", dry_run=True)
    reason = "float32; twinop's kernel is for 16 bits (dtype='float16')"
    assert report.skipped == {f"MatMulNBits: {reason}": 11, f"GroupQueryAttention: {reason}": 2}


def test_folders_of_twinop(built: Builds, tmp_path: Path) -> None:
    """Those for the CPU can be optimised again; no checksums stay."""
    pack_genai(Options(built("Llama"), tmp_path / "cpu", genai=True, device="cpu"))
    assert (tmp_path / "cpu/twinop-pack.json").exists()
    optimized(tmp_path / "cpu", tmp_path / "again")
    assert not (tmp_path / "again/twinop-pack.json").exists()


@pytest.mark.parametrize(
    ("family", "extra", "merged"),
    [
        ("Qwen2", {"fuse_qkv": "false", "is_symmetric": "false", "shared_embeddings": "false"}, 2),
        ("Llama", {"fuse_qkv": "false", "block_size": 64}, 2),
        pytest.param("Llama", {"fuse_qkv": "false", "algo_config": "k_quant_mixed"}, 1, marks=slow),  # 8 bits
    ],
    ids=str,
)
def test_int4_on_cuda(family: str, extra: dict[str, Any], merged: int, built: Builds, tmp_path: Path) -> None:
    source = built(family, "int4", "cuda", **extra)
    report = optimized(source, tmp_path / "fast", "cuda")
    assert report.own_error is not None and report.error < 2 * report.own_error
    assert report.fused["attention over a cache"] == 2
    assert report.fused.get("matmuls of one input merged", 0) == merged
    before, after = (ir.load(folder / "model.onnx") for folder in (source, tmp_path / "fast"))
    found = types(after)
    assert found.get("Concat", 0) == ("algo_config" in extra)
    assert found["CustomLastPosition"] == 1 and not {"ReduceSum", "Sub"} & found.keys()
    # No weight is there twice: that of the logits is the table of embeddings, too.
    sizes = [
        sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
        for model in (before, after)
    ]
    assert sizes[1] < 1.01 * sizes[0]
    reasons = {"MatMulNBits: blocks of 64; linear_q has those of 32 and 128": found.get("MatMulNBits", 0)}
    assert report.skipped == (reasons if "block_size" in extra else {})
    assert ("MatMulNBits" in found) == ("block_size" in extra)
    for reason, count in report.skipped.items():
        assert f"not fused: {count} {reason}" in str(report)
    if "block_size" not in extra:
        assert found["CustomLinearQSwiglu"] == 2 and not {"swiglu", "silu"} & report.fused.keys()


@pytest.mark.parametrize(
    ("attributes", "zero_points", "reason"),
    [
        ("bits = 3", "B", "weights of 3 bits; linear_q has those of 4 and 8"),
        ("block_size = 16", "B", "blocks of 16; linear_q has those of 32 and 128"),
        ("block_size = 64", "B", "blocks of 64; linear_q has those of 32 and 128"),
        ("", "scales", "zero points of float16; linear_q has those of uint8"),
        ("", "x", "zero points or a bias that are not constant"),
        ("", ", order", "columns in another order (g_idx)"),
        ("weight_prepacked = 1", "B", "weights packed for one kind of GPU (weight_prepacked)"),
        ("N = 12", "B", "N = 12 and K = 32; linear_q needs multiples of 8 and 32"),
        ("K = 72", "B", "N = 8 and K = 72; linear_q needs multiples of 8 and 32"),
    ],
)
def test_products_that_stay_are_named(attributes: str, zero_points: str, reason: str) -> None:
    sizes = {"K": "32", "N": "8", "bits": "4", "block_size": "32"}
    sizes |= dict(each.split(" = ") for each in attributes.split(", ") if each)
    form = ", ".join(f"{name} = {number}" for name, number in sizes.items())
    product = f"com.microsoft.MatMulNBits <{form}> (x, B, scales, {zero_points})"
    n, k = int(sizes["N"]), int(sizes["K"])
    b, scales = np.zeros((n, -(-k // 32), 16), np.uint8), weights(n * -(-k // 32)).astype(np.float16)
    text = f"(float16[M, {k}] x) => (float16[M, {n}] y) {{ y = {product} }}"
    made = rewritten(parsed(text, B=b, scales=scales, order=b), quantised.Quantised)
    assert skipped(made) == {f"MatMulNBits: {reason}": 1} and types(made) == {"MatMulNBits": 1}


def test_products_of_dequantised_weights_are_those_of_quantised_ones(built: Builds, tmp_path: Path) -> None:
    report = optimized(built("Qwen3", "int4", "cuda", use_qdq="true"), tmp_path / "fast", "cuda")
    assert not report.skipped
    assert report.fused["attention over a cache"] == 2
    found = types(ir.load(tmp_path / "fast/model.onnx"))
    assert found["CustomLinearQSwiglu"] == 2 and not {"DequantizeLinear", "MatMul"} & found.keys()


@pytest.mark.parametrize(("k", "said"), [(64, "B has 128 elements, expected"), (32, "zero_points has 128")])
def test_products_of_other_sizes_are_refused(k: int, said: str) -> None:
    product = f"com.microsoft.MatMulNBits <K = {k}, N = 8, bits = 4, block_size = 32> (x, B, scales, B)"
    text = f"(float16[M, {k}] x) => (float16[M, 8] y) {{ y = {product} }}"
    b, scales = np.zeros((8, 1, 16), np.uint8), weights(8).astype(np.float16)
    with pytest.raises(TwinopError, match=f"MatMulNBits: {said}"):
        rewritten(parsed(text, B=b, scales=scales), quantised.Quantised)


def test_norms_of_gemma_stay_in_fp32(built: Builds, tmp_path: Path) -> None:
    """What it adds up may exceed fp16. Its table of embeddings and norms of heads are in fp16."""
    source = built("Gemma3", "fp16", "cuda")
    report = optimized(source, tmp_path / "fast", "cuda")
    assert report.skipped == {"GroupQueryAttention: its attribute sliding_window_cache": 1}
    model = ir.load(tmp_path / "fast/model.onnx")
    sums = [node.inputs[0] for node in nodes(model, "CustomAddRmsNorm")]
    products = [node.inputs[0] for node in nodes(model, "CustomLinear")]
    assert {value.dtype for value in sums if value is not None} == {ir.DataType.FLOAT}
    assert {value.dtype for value in products if value is not None} == {ir.DataType.FLOAT16}
    wide = [each for each in model.graph.initializers.values() if each.dtype is ir.DataType.FLOAT]
    assert {len(each.shape or ()) for each in wide} <= {0, 1}
    [window] = nodes(model, "GroupQueryAttention")
    assert len(window.inputs) == 16


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "Phi", "Gemma3"])
@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_64_steps_on_cuda(family: str, precision: str, built: Builds, tmp_path: Path) -> None:
    """Feeds both with the source's tokens; the best one is the same where it leads by more than the noise."""
    source, library = built(family, precision, "cuda"), find_library("custom_ops")
    optimized(source, tmp_path / "fast", "cuda")
    old, new = Decoder(source, 80), Decoder(tmp_path / "fast", 80, library)
    tokens = PROMPT
    for _ in range(STEPS):
        expected, found = old(tokens), new(tokens)
        error = np.abs(found - expected).max()
        assert error <= 1e-2 * np.abs(expected).max()
        second, first = np.sort(expected)[-2:]
        assert found.argmax() == expected.argmax() or first - second <= 2 * error
        tokens = [int(expected.argmax())]


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
        ("cuda", [{"CUDA": {"device_id": "1"}}], [{"CUDA": {"device_id": "1"}}]),
        (None, [{"CUDA": {"device_id": "1"}}], [{"CUDA": {"device_id": "1"}}]),
        (None, [], []),
    ],
)
def test_edited_config(
    device: str | None, given: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device, a folder that names CUDA stays one for CUDA, also where there is no GPU."""
    monkeypatch.setattr("twinop.optimize.optimizer.has_gpu", lambda: False)
    source = folder_of(normed(), tmp_path / "old", provider_options=given, log_id="mine")
    (source / "adapter").mkdir()
    (source / "adapter/encoder.onnx").write_text("kept")
    command.main(source=source, output=tmp_path / "fast", device=device)
    assert options_of(tmp_path / "fast") == {
        "provider_options": expected, "log_id": "mine", "custom_ops_library": "libcustom_ops.so",
    }  # fmt: skip
    assert (tmp_path / "fast/adapter/encoder.onnx").read_text() == "kept"


def test_data_that_another_model_reads_stays(tmp_path: Path) -> None:
    source, target = folder_of(normed(), tmp_path / "old"), tmp_path / "fast"
    for name in ("model.onnx", "embedding.onnx"):
        proto = normed()
        onnx.save(
            proto, source / name, save_as_external_data=True, location="model.onnx.data", size_threshold=0
        )
    (source / "text.onnx").write_text("no model")
    report = optimized(source, target)
    assert report.path == target / "model.twinop.onnx" and not (target / "model.onnx").exists()
    config = json.loads((target / "genai_config.json").read_text())
    assert config["model"]["decoder"]["filename"] == "model.twinop.onnx"
    x = np.ones((2, 8), np.float32)
    [y] = ort.InferenceSession(target / "embedding.onnx").run(None, {"x": x})
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(target / "libcustom_ops.so"))
    [found] = ort.InferenceSession(report.path, options).run(None, {"x": x})
    np.testing.assert_allclose(found, y, rtol=1e-6)


CUBE = "y = test_cube.CustomCube (n)"


@pytest.mark.parametrize("is_named", [True, False])
def test_user_ops_and_twinops_in_one_library(is_named: bool, tmp_path: Path) -> None:
    own = find_library("test_cube")
    named = {"custom_ops_library": own.name} if is_named else {}
    source = folder_of(normed(CUBE), tmp_path / "old", **named)
    if is_named:
        (source / own.name).write_bytes(own.read_bytes())
        with pytest.raises(ExportError, match=f"{own.name} lies in the model's own folder.*allow_model_libr"):
            optimize_folder(source, tmp_path / "fast", device="cpu")
    library = None if is_named else own
    optimized(source, tmp_path / "fast", library=library, allow_model_libraries=is_named)
    assert options_of(tmp_path / "fast")["custom_ops_library"] == "libtwinop_genai.so"
    moved = (tmp_path / "fast").rename(tmp_path / "moved")
    options, x = ort.SessionOptions(), np.ones((2, 8), np.float32)
    options.register_custom_ops_library(str(moved / "libtwinop_genai.so"))
    [y] = ort.InferenceSession(moved / "model.onnx", options).run(None, {"x": x})
    assert np.allclose(y, np.broadcast_to(weights(8) ** 3, (2, 8)), rtol=1e-3)
    alone = shutil.copy(moved / "libtwinop_genai.so", tmp_path)
    with pytest.raises(Exception, match=f"{tmp_path}/lib.*: cannot open shared object file"):
        ort.SessionOptions().register_custom_ops_library(alone)


@pytest.mark.parametrize("name", ["layers.0.q_proj.lora_A.weight", "lora_B_0", "base.model.v.lora_b/MatMul"])
def test_adapters_are_refused(name: str, tmp_path: Path) -> None:
    """genai adds them to the weights while it runs, which fused products cannot have."""
    text = "(float[N, 4] x, float[4, 4] a) => (float[N, 4] y) { y = MatMul (x, a) }"
    source = folder_of(parsed(text), tmp_path / "old")
    optimized(source, tmp_path / "plain")
    (source / "math.onnx_adapter").write_bytes(b"TORT")
    said = r"has LoRA adapters \(math.onnx_adapter\), which genai adds .*: merge the adapter into them"
    with pytest.raises(ExportError, match=said):
        optimize_folder(source, tmp_path / "fast", device="cpu")
    (source / "math.onnx_adapter").unlink()
    proto = onnx.load(source / "model.onnx")
    proto.graph.input[1].name = proto.graph.node[0].input[1] = name
    onnx.save(proto, source / "model.onnx")
    with pytest.raises(ExportError, match=rf"has LoRA adapters \(input {name} of the decoder\)"):
        optimize_folder(source, tmp_path / "fast", device="cpu")


def test_the_folder_has_a_report_for_programs(tmp_path: Path) -> None:
    source = folder_of(normed(), tmp_path / "old")
    report = optimized(source, tmp_path / "fast")
    found = json.loads((tmp_path / "fast/twinop-report.json").read_text())
    assert found["fused"] == report.fused != {} and found["error"] == report.error
    assert found["path"] == "model.onnx" and str(tmp_path) not in json.dumps(found)
    optimized(tmp_path / "fast", tmp_path / "again")
    again = json.loads((tmp_path / "again/twinop-report.json").read_text())
    assert again["nodes_before"] == found["nodes_after"]


def test_folders_that_cannot_be_optimised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = folder_of(normed(), tmp_path / "old"), tmp_path / "fast"

    def refusal(given: Path = source, to: Path | str = target, **options: Any) -> str:
        with pytest.raises(ExportError) as error:
            optimize_folder(given, to, **{"device": "cpu"} | options)
        assert not [*tmp_path.glob(".twinop*")]
        return str(error.value)

    assert "device='gpu': expected one of: cuda, cpu" in refusal(device="gpu")
    assert ". Name another folder" in (said := refusal(to="/proc/no/fast")) and "cannot be written: " in said
    assert "inside: lies inside the source folder. Choose one outside" in refusal(to=source / "inside")
    with pytest.raises(PackError, match="inside: lies inside the source folder. Choose one"):
        pack_genai(Options(source, source / "inside", genai=True, device="cpu"))
    said = "model.onnx/genai_config.json: no such file. Expected the folder"
    assert said in refusal(source / "model.onnx")
    file = source / "model.onnx"
    onnx.save(normed(), file, save_as_external_data=True, location="model.data", size_threshold=0)
    (source / "model.data").unlink()
    assert "its data file" in (said := refusal()) and "model.data is missing" in said
    onnx.save(normed(CUBE), file)
    monkeypatch.setenv("CC", "/no/compiler")
    assert "/no/compiler cannot be run" in refusal(library=find_library("test_cube"))
    assert not target.exists()
    target.mkdir()
    (target / "file").touch()
    assert "exists already. Name a new folder, or an empty one" in refusal()
    with pytest.raises(PackError, match="already exists, and is not from twinop pack"):
        pack_genai(Options(source, target, genai=True, device="cpu"))


def change(entry: str, value: Any, folder: Path) -> None:
    """Changes an entry of a folder's genai_config.json."""
    config = json.loads((folder / "genai_config.json").read_text())
    *parents, name = entry.split(".")
    place = config
    for each in parents:
        place = place.setdefault(each, {})
    place[name] = value
    (folder / "genai_config.json").write_text(json.dumps(config))


def link_to(place: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "vocab.txt").symlink_to(place)


def config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "genai_config.json").write_text(text)


def make(command: str, source: Path, target: Path) -> None:
    if command == "pack":
        pack_genai(Options(source, target, genai=True, device="cpu"))
    else:
        optimize_folder(source, target, device="cpu")


DEEP = '{"model":' * 50_000 + "1" + "}" * 50_000
DECODER, LIBRARY = "model.decoder.filename", "model.decoder.session_options.custom_ops_library"
PROVIDERS = "model.decoder.session_options.provider_options"
LOST = "has no model.decoder.filename; twinop optimises decoders of one model"
PIPELINE = '{"model": {"decoder": {"pipeline": [{"prompt": {"filename": "model.onnx"}}]}}}'


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (partial(change, DECODER, "../old/model.onnx"), "is not in the folder"),
        (partial(change, DECODER, "sub/../../old/model.onnx"), "is not in the folder"),
        (partial(change, DECODER, "/etc/passwd"), "is not in the folder"),
        (partial(change, DECODER, "a\0.onnx"), "is not in the folder"),
        (partial(change, DECODER, "\ud800.onnx"), "is not in the folder"),
        (partial(change, DECODER, "a" * 5000), "no such file"),
        (partial(change, DECODER, "."), "a folder, not an .onnx file"),
        (partial(change, DECODER, "missing.onnx"), "missing.onnx: no such file"),
        (partial(change, DECODER, 3), "model.decoder.filename is 3; expected a text"),
        (partial(change, LIBRARY, "../libown.so"), "is not in the folder"),
        (partial(change, LIBRARY, "lib.so"), "custom_ops_library already names lib.so, and genai loads one"),
        (partial(change, LIBRARY, "text.so"), "custom_ops_library already names text.so, and genai loads"),
        (partial(change, PROVIDERS, None), f"{PROVIDERS} is null; expected a list"),
        (partial(change, PROVIDERS, [None]), "has null; expected objects with a provider's"),
        (partial(change, PROVIDERS, ["cuda"]), 'has "cuda"; expected objects with a provider\'s'),
        (config("{}"), LOST),
        (config(PIPELINE), LOST),
        (config("[]"), "genai_config.json: it is []; expected an object. Build the folder again"),
        (lambda folder: (folder / "genai_config.json").unlink(), "Expected the folder that onnxruntime-ge"),
        (link_to("/dev/zero"), "leads out of the folder, to /dev/zero"),
        (link_to("../secret"), "leads out of the folder"),
        (link_to(".."), "leads out of the folder"),
        (link_to("sub/../../secret"), "leads out of the folder"),
        (link_to("vocab.txt"), "No such file"),
        (lambda folder: os.mkfifo(folder / "pipe"), "a pipe, a socket or a device"),
        (lambda folder: os.mkfifo(folder / "sub" / "pipe"), "a pipe, a socket or a device"),
        (lambda folder: _special(folder / "genai_config.json"), "cannot be read"),
        (config(" " * 2_000_000), "larger than"),
        (config(DEEP), "cannot be read"),
        (config("9" * 6000), "cannot be read"),
        (config("[" * 300 + "]" * 300), "it is [["),
    ],
)
@pytest.mark.parametrize("command", ["optimize", "pack"])
def test_hostile_folders(command: str, spoil: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    """One message, nothing outside of the folder is read or written, and nothing is left."""
    source, target = folder_of(normed(), tmp_path / "old"), tmp_path / "fast"
    (tmp_path / "secret").write_text("secret")
    (source / "sub").mkdir()
    (source / "text.so").write_text("no library")
    spoil(source)
    before = sorted(each.name for each in tmp_path.iterdir())
    with pytest.raises(TwinopError) as error:
        make(command, source, target)
    assert said in str(error.value)
    assert sorted(each.name for each in tmp_path.iterdir()) == before


def _special(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("command", ["optimize", "pack"])
def test_links_and_permissions_stay(command: str, tmp_path: Path) -> None:
    source, target = folder_of(normed(), tmp_path / "old"), tmp_path / "fast"
    (source / "sub").mkdir()
    (source / "sub/own.txt").write_text("mine")
    (source / "a").symlink_to(".")
    (source / "b").symlink_to("sub/own.txt")
    modes = {"sub/own.txt": 0o600, "model.onnx": 0o640, "genai_config.json": 0o600, "sub": 0o500}
    for name, mode in modes.items():
        (source / name).chmod(mode)
    make(command, source, target)
    assert os.readlink(target / "a") == "." and os.readlink(target / "b") == "sub/own.txt"
    assert (target / "b").read_text() == "mine"
    found = {name: (target / name).stat().st_mode & 0o777 for name in modes}
    assert found == modes | {"sub": 0o700}


def test_a_library_of_the_folder_is_not_loaded(tmp_path: Path) -> None:
    """As in all commands, also beside a file; by name it is taken, and with permission."""
    own = find_library("test_cube")
    source = folder_of(normed(CUBE), tmp_path / "old", custom_ops_library="libmine.so")
    shutil.copy(own, source / "libmine.so")
    for name, words, given in (
        ("folder", ["optimize"], source),
        ("packed", ["pack", "--genai"], source),
        ("file", ["optimize"], source / "model.onnx"),
    ):
        target = tmp_path / name
        line = [*words, str(given), "-o", str(target), "--device", "cpu"]
        done = CliRunner().invoke(app, line)
        assert done.exit_code == 1 and "libmine.so lies in the model's own folder." in done.output
        assert "--allow-model-libraries" in done.output and not target.exists()
        assert CliRunner().invoke(app, [*line, "--allow-model-libraries"]).exit_code == 0
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        assert CliRunner().invoke(app, [*line, "--library", str(own)]).exit_code == 0
