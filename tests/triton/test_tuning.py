"""Configurations that were measured, and which of them a build chooses."""

from pathlib import Path
from typing import Any

import pytest
import triton
from ahead_kernels import gelu_kernel

from twinop.errors import BuildError
from twinop.triton.tuning import Entry, Tuning

SMALL, MIDDLE, LARGE = (triton.Config({"BLOCK": block}, num_warps=4) for block in (128, 512, 2048))


class Tensor:
    dtype = "torch.float32"


@pytest.fixture
def tuned() -> Any:
    return triton.autotune([SMALL, MIDDLE, LARGE], key=["n"])(gelu_kernel)


def entry(n: int, config: Any, arch: int = 90, dtype: str = "torch.float32") -> Entry:
    return Entry("gelu_kernel", arch, {"n": n}, [dtype, dtype], config.all_kwargs())


def chosen(tuning: Tuning, tuned: Any, n: int, arch: int = 90) -> Any:
    arguments = {"x_ptr": Tensor(), "y_ptr": Tensor(), "n": n}
    tuned.nargs = arguments
    return tuning.choose(tuned, arguments, arch)


def test_without_an_entry_the_first_configuration_is_taken(tuned: Any) -> None:
    assert chosen(Tuning(), tuned, 5) is SMALL
    assert chosen(Tuning([entry(100, LARGE, arch=80)]), tuned, 5) is SMALL
    assert chosen(Tuning([entry(100, LARGE, dtype="torch.float16")]), tuned, 5) is SMALL
    gone = triton.Config({"BLOCK": 64}, num_warps=4)
    assert chosen(Tuning([entry(100, gone)]), tuned, 5) is SMALL


def test_the_pruning_of_the_kernel_is_asked() -> None:
    prune = {"early_config_prune": lambda configs, *_, **__: configs[1:]}
    pruned = triton.autotune([SMALL, LARGE], key=["n"], prune_configs_by=prune)(gelu_kernel)
    assert chosen(Tuning(), pruned, 5) is LARGE


@pytest.mark.parametrize("text", ["", "[]", '{"entries": [{"kernel": "x"}]}'])
def test_a_damaged_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "gelu.tune.json"
    file.write_text(text)
    with pytest.raises(BuildError, match=r"gelu.tune.json: it is not what `twinop tune` writes"):
        Tuning.read(file)


def test_measured_calls_are_recorded(monkeypatch: pytest.MonkeyPatch, tuned: Any) -> None:
    monkeypatch.setattr(type(tuned), "run", lambda autotuner, *args, **kwargs: None)
    tuning = Tuning([entry(64, SMALL), entry(5, SMALL)])
    tuned.best_config = LARGE
    with tuning.recording(90) as measured:
        tuned[(1,)](Tensor(), Tensor(), 64)
    assert tuning.entries == [entry(5, SMALL), entry(64, LARGE)]
    assert [each for each, _ in measured] == [entry(64, LARGE)]
