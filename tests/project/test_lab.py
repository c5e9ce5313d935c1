"""The measurements in lab/ and of examples: they start, and the pages say what was recorded."""

import os
import re
from itertools import product
from pathlib import Path

import pytest
import warm_python

from twinop.bench.measurements import read

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *options: str) -> str:
    env = os.environ | {"COLUMNS": "200", "TWINOP_COMMIT": "abc"}
    done = warm_python.run([f"{script}.py", *options], cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_products_are_measured_side_by_side(tmp_path: Path) -> None:
    run("lab/linear", "--device=cpu", "--quick", f"--output={tmp_path}")
    (path,) = tmp_path.glob("linear-quick-*.jsonl")
    lines = read(path, "linear")
    providers = {"twinop in ORT", "twinop in torch", "torch", "torch again", "ORT", "ORT again"}
    assert len(lines) == 3 and all(line["times"].keys() >= providers for line in lines)
    assert {line["commit"] for line in lines} == {"abc"} and not any(line["missing"] for line in lines)


@pytest.mark.slow
def test_nms_is_measured_beside_torchvision(tmp_path: Path) -> None:
    run("examples/nms/measure_nms", "--device=cpu", "--quick", f"--output={tmp_path}")
    (path,) = tmp_path.glob("nms-quick-*.jsonl")
    for line in read(path, "nms"):
        assert line["times"].keys() >= {"twinop in ORT", "twinop in torch"} and 0 < line["kept"] < 500
        assert line["missing"].keys() <= {"torchvision"}


@pytest.mark.slow
def test_appends_to_a_cache_are_measured(tmp_path: Path) -> None:
    run("examples/kv_cache/measure_kv_cache", "--device=cpu", "--quick", f"--output={tmp_path}")
    (path,) = tmp_path.glob("kv-cache-quick-*.jsonl")
    (line,) = read(path, "kv-cache")
    ours = {"twinop in ORT", "twinop in ORT, other memory", "twinop in torch", "torch"}
    assert line["times"].keys() >= ours and not line["missing"]


@pytest.mark.slow
def test_tokens_of_a_decoder_are_measured(tmp_path: Path) -> None:
    sizes = ("--dtypes=float16,int4,float8", "--batches=1,2", "--contexts=16")
    run("lab/decoder_tokens", "--device=cpu", "--quick", *sizes, f"--work={tmp_path}", f"--output={tmp_path}")
    (path,) = tmp_path.glob("decoder-tokens-quick-*.jsonl")
    lines = read(path, "decoder-tokens")
    found = {(line["dtype"], line["shape"]) for line in lines}
    assert found == {*product(("float16", "int4", "float8"), ("1x16", "2x16", "a prompt of 256"))}
    assert not any(line["missing"] for line in lines) and "torch" in lines[0]["times"]
    assert all(
        line["errors"]["twinop in ORT"] < (0.3 if line["dtype"] == "float8" else 1e-2) for line in lines
    )


@pytest.mark.slow
def test_models_of_real_sizes_are_measured(tmp_path: Path) -> None:
    rows = "llama-1.2b-bf16-to-fp16,check-8b-int4-for-cpu,export"
    options = ("--quick", f"--rows={rows}", f"--work={tmp_path}", f"--output={tmp_path}")
    run("lab/real_sizes", *options)
    (path,) = tmp_path.glob("real-sizes-quick-*.jsonl")
    for line in read(path, "real-sizes"):
        assert line["now"].keys() == {"wall_s", "cpu_s", "memory_gb", "disk_beyond_gb", "says"}, line
        assert 0 < line["now"]["memory_gb"] < 2 and line["command"].startswith("python -")


@pytest.mark.slow
def test_a_model_in_8_bits_is_measured_beside_torchao(tmp_path: Path) -> None:
    """The one of the test is not trained, and has two layers that share weights."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    from lab.trained_float8 import ATOMS, TEXTS

    found = re.findall(ATOMS, (TEXTS / "reactions.txt").read_text())
    known = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", *sorted({*found} - {"\n"})]
    sizes = {"embedding_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = AlbertConfig(vocab_size=len(known), num_hidden_layers=2, **sizes)
    AlbertForMaskedLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "model/vocab.txt").write_text("\n".join(known))
    run("lab/trained_float8", f"{tmp_path}/model", "--texts=reactions", f"--output={tmp_path}")
    (path,) = tmp_path.glob("trained-float8-*.jsonl")
    (line,) = read(path, "trained-float8")
    assert len(line["float8"]["layers"]) == 13, "six in each layer, and one before the logits"
    errors = {column: each["error"] for column, each in line["errors"].items()}
    ours, its = errors["twinop float8"], errors["torchao float8, emulated"]
    assert errors["twinop float16"] < 5e-3 and errors["torch bfloat16"] < 0.02 < its < 0.1
    assert ours == pytest.approx(its, rel=0.2)
