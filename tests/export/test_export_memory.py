"""An export copies no parameter, and leaves each with its bits."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from torch import nn

from twinop.errors import ExportError
from twinop.export import export, exporter, state
from twinop.model.files import EXTERNAL_DATA_BYTES

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2)


class Weights(nn.Module):
    """Numbers of all kinds, in each dtype, also as buffers and in memory that cannot be written."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.randn(64, 33, generator=torch.Generator().manual_seed(0))
        numbers[0, :6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0])
        for dtype in DTYPES:
            each = numbers.to(dtype)
            self.register_parameter(f"weight_{dtype}".replace(".", "_"), nn.Parameter(each, False))
        self.register_buffer("turned", numbers.clone().T)
        self.register_buffer("expanded", torch.ones(1).expand(5))
        self.register_buffer("number", torch.tensor(2.0))
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("integers", torch.arange(3))


def bits(model: nn.Module) -> dict[str, bytes]:
    held = {name: each.contiguous().view(-1) for name, each in model.state_dict().items()}
    return {name: each.view(torch.uint8).numpy().tobytes() for name, each in held.items()}


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_noise_is_in_last_bits(error: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_STRIP", 64)  # several strips
    model = Weights()
    before, values = bits(model), {name: each.clone() for name, each in model.state_dict().items()}
    try:
        with state.changed_weights(model):
            for name, each in model.state_dict().items():
                old = values[name].double()
                same = (each.double() == old) | old.isnan() & each.double().isnan()
                if name in ("expanded", "none", "integers"):
                    assert same.all()
                    continue
                normal = old.isfinite() & (old.abs() >= torch.finfo(each.dtype).smallest_normal)
                assert torch.equal(~same, normal), name
                change = ((each.double() - old) / old).abs()[normal]
                assert change.max() <= 6 * torch.finfo(each.dtype).eps
            if error is not None:
                raise error
        assert error is None
    except (ValueError, KeyboardInterrupt):
        assert error is not None
    assert bits(model) == before


def test_weights_are_whole_after_an_end_between_two_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    flip, model = state._flip, Weights()
    before = bits(model)
    for after in range(6):
        calls = 0

        def interrupted(strip: torch.Tensor, dtype: torch.dtype) -> None:
            nonlocal calls
            calls += 1
            if calls == after + 1:  # noqa: B023
                raise KeyboardInterrupt
            flip(strip, dtype)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(state, "_flip", interrupted)
            with state.changed_weights(model):
                pass
        assert bits(model) == before, after


def test_a_weight_of_several_modules_is_written_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(600, 512), nn.Linear(512, 600, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    report = export(Tied(), (torch.arange(4)[None],), tmp_path / "m.onnx", optimize=False)
    assert report.size < 1.1 * 600 * 512 * 4


PROGRAM = """
import sys, threading, time, torch
from twinop.export import export
from twinop.system.memory import tree_bytes
model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(4)])
found, is_done = [tree_bytes()], threading.Event()
def watch():
    while not is_done.wait(0.05):
        found.append(tree_bytes())
(thread := threading.Thread(target=watch)).start()
export(model, (torch.ones(2, 4096),), sys.argv[1], optimize=False)
is_done.set(), thread.join()
print(found[0], max(found))
"""
WEIGHTS = 4 * 4096 * 4097 * 4  # bytes: 268 MB


def test_no_parameter_is_copied(tmp_path: Path) -> None:
    done = warm_python.run(["-c", PROGRAM, tmp_path / "m.onnx"])
    assert done.returncode == 0, done.stderr
    before, most = map(int, done.stdout.split())
    # torch's exporter, ONNX Runtime and its process take 160 MB; one copy of all weights would not fit.
    assert before > WEIGHTS and most - before < 0.9 * WEIGHTS


@pytest.mark.parametrize(("outcome", "data"), [("fused", 1), ("nothing", EXTERNAL_DATA_BYTES), ("fails", 1)])
def test_the_disk_has_weights_once(
    outcome: str, data: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def used() -> int:
        return sum(each.stat().st_blocks for each in tmp_path.rglob("*")) * 512

    def watched(*arguments: Any, **options: Any) -> Any:
        at_start.append(used())
        if outcome == "fails":
            raise ExportError("it fails")
        return optimize(*arguments, **options)

    optimize, at_start, written = exporter.optimize_file, list[int](), list[dict[str, bytes]]()
    monkeypatch.setattr(exporter, "optimize_file", watched)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 600), nn.Linear(600, 512))
    device = "cpu" if outcome == "nothing" else "cuda"
    for least in (1 << 40, 1 << 20):
        monkeypatch.setattr(exporter, "_FREED", least)
        (folder := tmp_path / "new").mkdir()
        path, example = folder / "m.onnx", (torch.ones(2, 512),)
        report = export(model, example, path, external_data_bytes=data, device=device)
        assert (report.optimized is not None) == (outcome == "fused"), report.notes
        assert report.optimized is None or report.optimized.source.name == "m.onnx"
        assert all("it fails" in note for note in report.notes) or outcome != "fails"
        written.append({file.name: file.read_bytes() for file in folder.iterdir()})
        shutil.rmtree(folder)
    assert written[0] == written[1] and any(len(each) > 1 << 20 for each in written[0].values())
    assert at_start[0] > 2_000_000 > 100_000 > at_start[1]
