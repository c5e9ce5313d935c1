"""examples/cpp: programs in C++ run models with a custom-op library."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from optimizing import optimized, parsed, weights
from record_driver import ROOT, compiler

from twinop.libraries.library import find_library, read_library
from twinop.testing.one_node import one_node_model

EXAMPLE = ROOT / "examples/cpp"


def ort_headers() -> Path:
    """Returns the folder of ONNX Runtime's headers that the libraries were built with."""
    commands = json.loads((ROOT / "build/compile_commands.json").read_text())
    [line] = [each["command"] for each in commands if each["file"].endswith("ort_customop/register.cpp")]
    folders = map(Path, re.findall(r"-(?:isystem|I) ?(\S+)", line))
    return next(folder for folder in folders if (folder / "onnxruntime_cxx_api.h").is_file())


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs, compiled as the README says."""
    folder = tmp_path_factory.mktemp("cpp")
    for path in EXAMPLE.glob("*.[ch]*"):
        shutil.copy(path, folder)
    (runtime,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")
    (folder / "libonnxruntime.so.1").symlink_to(runtime)
    lines = re.findall(r"^g\+\+ .+$", (EXAMPLE / "README.md").read_text(), re.MULTILINE)
    env = os.environ | {"ORT_INCLUDE": str(ort_headers()), "ORT_LIBRARY": str(folder / "libonnxruntime.so.1")}
    lines = [line.replace("g++", compiler(), 1) + " -Wall -Wextra -Werror" for line in lines]
    running = [subprocess.Popen(["bash", "-c", line], cwd=folder, env=env) for line in lines]
    assert [each.wait() for each in running] == [0, 0]
    return folder


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"LD_LIBRARY_PATH": str(program.parent)}
    return subprocess.run([program, *map(str, arguments)], env=env, capture_output=True, text=True)


def test_it_runs_a_model(programs: Path, tmp_path: Path) -> None:
    library = find_library("custom_relu")
    record = read_library(library).records["relu"]
    model = tmp_path / "model.onnx"
    onnx.save(one_node_model(record, {"x": "float32", "y": "float32"}, [True], {}), model)
    done = run(programs / "run_model", model, library)
    assert done.returncode == 0, done.stderr
    values = np.array(done.stdout.split(), np.float32)
    assert values.size and not values.any()  # relu(-1)


def test_mistakes_are_said(programs: Path, tmp_path: Path) -> None:
    done = run(programs / "run_model", tmp_path / "none.onnx", tmp_path / "none.so")
    assert done.returncode == 1 and "none.so" in done.stderr
    assert run(programs / "run_model").stderr.startswith("usage: run_model")


VOCABULARY, WIDTH, SIZE, ROWS, PROMPT = 97, 64, 16, 80, [5, 9, 11, 33, 7]


def decoder() -> onnx.ModelProto:
    """A decoder as onnxruntime-genai's builder writes it: one layer with four heads, two for k and v."""
    angles = np.arange(ROWS)[:, None] * 100.0 ** (-np.arange(0, SIZE, 2) / SIZE)
    return parsed(
        f"""(int64[B, S] input_ids, int64[B, T] attention_mask, float[B, 2, P, {SIZE}] past_k,
             float[B, 2, P, {SIZE}] past_v)
            => (float[B, S, {VOCABULARY}] logits, float[B, 2, T, {SIZE}] present_k,
                float[B, 2, T, {SIZE}] present_v) {{
            lengths = ReduceSum <keepdims = 0> (attention_mask, axis) lasts = Sub (lengths, one)
            last = Cast <to = 6> (lasts) shape = Shape (attention_mask) total_ = Gather (shape, one)
            total = Cast <to = 6> (total_)
            x = Gather (table, input_ids)
            n = SimplifiedLayerNormalization <axis = -1, epsilon = 1e-5> (x, scale)
            qkv = MatMul (n, w_qkv)
            a, present_k, present_v = com.microsoft.GroupQueryAttention
                <num_heads = 4, kv_num_heads = 2, do_rotary = 1>
                (qkv, , , past_k, past_v, last, total, cos, sin)
            y = MatMul (a, w_o)
            m = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-5> (x, y, scale)
            logits = MatMul (m, w)
        }}""",
        axis=np.array([1]), one=np.array(1), table=weights(VOCABULARY, WIDTH), scale=1 + weights(WIDTH),
        w_qkv=weights(WIDTH, 2 * WIDTH), w_o=weights(WIDTH, WIDTH, seed=1), w=weights(WIDTH, VOCABULARY),
        cos=np.cos(angles).astype(np.float32), sin=np.sin(angles).astype(np.float32),
    )  # fmt: skip


def test_a_decoder_continues_a_prompt(programs: Path, tmp_path: Path) -> None:
    report, _ = optimized(decoder(), tmp_path, device="cpu")
    assert report.fused["add_rms_norm"]
    session = onnxruntime.InferenceSession(tmp_path / "old.onnx")
    caches = [np.zeros((1, 2, 0, SIZE), "f")] * 2
    tokens, new = list[int](), PROMPT
    while len(tokens) < 64:  # the original in Python
        mask = np.ones((1, len(PROMPT) + len(tokens)), np.int64)
        feeds = {"input_ids": [new], "attention_mask": mask, "past_k": caches[0], "past_v": caches[1]}
        logits, *caches = session.run(None, feeds)
        new = [int(logits[0, -1].argmax())]
        tokens += new
    assert len({*tokens}) > 10
    for rows in (68, 0):  # as many as are needed, and caches that grow
        done = run(programs / "decode", report.path, *report.libraries, "cpu", rows, *PROMPT)
        assert done.returncode == 0, done.stderr
        assert [*map(int, done.stdout.split())] == tokens


def test_mistakes_about_decoders(programs: Path, tmp_path: Path) -> None:
    library = find_library("custom_relu")
    record = read_library(library).records["relu"]
    onnx.save(one_node_model(record, {"x": "float32", "y": "float32"}, [True], {}), tmp_path / "relu.onnx")

    def refusal(*arguments: object) -> str:
        done = run(programs / "decode", tmp_path / "relu.onnx", library, *arguments)
        assert done.returncode and not done.stdout
        return done.stderr

    assert refusal("cpu", ROWS).startswith("usage: decode")
    assert "the device is cpu or cuda, not gpu" in refusal("gpu", ROWS, 1)
    assert "take 68 rows of the caches, which have 67. Give ROWS >= 68" in refusal("cpu", 67, *PROMPT)
    assert "ROWS and tokens are numbers from 0 on, not -1" in refusal("cpu", ROWS, 1, -1)
    assert "ROWS and tokens are numbers from 0 on, not 2x" in refusal("cpu", "2x", 1)
    assert "input x: expected input_ids, position_ids, attention_mask and caches" in refusal("cpu", ROWS, 1)
