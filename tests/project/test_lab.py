"""The measurements in lab/ and of examples: they start, and the pages say what was recorded."""

import os
import re
from pathlib import Path

import pytest
import warm_python
from slow_cases import often

from twinop.bench.measurements import read

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *options: str) -> str:
    env = os.environ | {"COLUMNS": "200", "TWINOP_COMMIT": "abc"}
    done = warm_python.run([f"{script}.py", *options], cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


OURS, OTHER = {"twinop in ORT", "twinop in torch"}, "twinop in ORT, other memory"
SIZES = ("--dtypes=float16,int4,float8", "--batches=1,2", "--contexts=16", "--work={folder}")
ROWS = ("--rows=llama-1.2b-bf16-to-fp16,check-8b-int4-for-cpu,export", "--work={folder}")
SCRIPTS = {  # its options, its lines, what each line has times of
    "lab/linear": (("--device=cpu",), 3, OURS | {"torch", "torch again", "ORT", "ORT again"}),
    "examples/nms/measure_nms": (("--device=cpu",), 0, OURS),
    "examples/kv_cache/measure_kv_cache": (("--device=cpu",), 1, OURS | {OTHER, "torch"}),
    "lab/decoder_tokens": (("--device=cpu", *SIZES), 9, {"twinop in ORT"}),
    "lab/real_sizes": (ROWS, 3, set()),
}


@pytest.mark.parametrize("script", often(SCRIPTS, "lab/linear"))
def test_it_measures(script: str, tmp_path: Path) -> None:
    options, count, providers = SCRIPTS[script]
    run(script, *(each.format(folder=tmp_path) for each in options), "--quick", f"--output={tmp_path}")
    name = script.rpartition("/")[2].removeprefix("measure_").replace("_", "-")
    (path,) = tmp_path.glob(f"{name}-quick-*.jsonl")
    lines = read(path, name)
    assert len(lines) == count or not count
    for line in lines:
        assert line["commit"] == "abc"
        assert line.get("times", {}).keys() >= providers and line.get("missing", {}).keys() <= {"torchvision"}
        if script == "lab/real_sizes":
            assert 0 < line["now"]["memory_gb"] < 2 and line["command"].startswith("python -")
        elif script == "lab/decoder_tokens":
            assert line["errors"]["twinop in ORT"] < (0.3 if line["dtype"] == "float8" else 1e-2)


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
