"""An export copies no parameter, and leaves each with its bits."""

import pytest
import torch
from torch import nn

from twinop.export import state

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
    return {
        name: each.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, each in model.state_dict().items()
    }


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_noise_changes_last_bits_only_and_restores_them(
    error: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
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
