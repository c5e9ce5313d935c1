"""The errors that the report on all ops measures, in units in the last place."""

import pytest
import torch

from twinop import torch_op
from twinop.bench import numerics
from twinop.bench.cases import Case
from twinop.bench.cells import IN_ORT, IN_TORCH, numeric_verdicts
from twinop.bench.peers import ENTRIES
from twinop.bench.providers import EAGER, Budget, Providers

CPU = torch.device("cpu")
BUILT = {name: entry for name, entry in ENTRIES.items() if entry.op in torch_op.records()}


def test_ulp() -> None:
    exact = torch.tensor([1.0, -3.0, 1e-40, 1e39], dtype=torch.float64)
    near = torch.tensor([1.0, -3.0, 0.0, 5.0], dtype=torch.float32)
    tiny_ulp = 2.0**-149
    assert numerics.ulp_error(near, exact) == pytest.approx(1e-40 / tiny_ulp)  # 1e39: no float32
    one_off = torch.tensor([1 + 2.0**-23])
    assert numerics.ulp_error(one_off, torch.ones(1, dtype=torch.float64)) == 1
    half = torch.tensor([0.5 + 2.0**-24])
    assert numerics.ulp_error(half, torch.tensor([0.5], dtype=torch.float64)) == 1
    assert numerics.ulp_error(half, torch.tensor([0.5], dtype=torch.float64), least=1.0) == 0.5
    assert numerics.ulp_error(torch.tensor([float("nan")]), exact[:1]) == float("inf")


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gelus_reference_is_exact_where_torchs_formula_cancels(name: str) -> None:
    """Near 0 and above, torch's formula does not cancel, and both agree."""
    x = torch.linspace(-1, 40, 1001, dtype=torch.float64)
    entry = ENTRIES[name]
    assert entry.reference is not None
    torch.testing.assert_close(entry.reference(x), entry.eager(x), rtol=1e-13, atol=1e-16)
    low = entry.reference(torch.tensor([-10.0]))
    assert -1e-20 < float(low) < 0 and float(entry.eager(torch.tensor([-10.0], dtype=torch.float64))) == 0


def test_every_finite_value_of_16_bits() -> None:
    [x] = numerics.draw(Case("relu", "unary", "float16", (1,)), ENTRIES["relu"], CPU).values()
    assert x.numel() == 2 * 31 * 1024 and x.isfinite().all()


@pytest.mark.parametrize("name", list(BUILT))
def test_numerics(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "ELEMENTS", 1000)
    monkeypatch.setattr(numerics, "SHAPE", (4, 40))
    entries = {name: BUILT[name]}
    who = Providers(CPU, None, 2, ["twinop", "eager"], Budget(0, 0), only=numerics.providers(entries))
    rows = numerics.measure(who, entries)
    assert {row["dtype"] for row in rows} == set(numerics.DTYPES)
    assert {row["provider"] for row in rows} == {IN_TORCH, IN_ORT, EAGER}
    for row in rows:
        if row["provider"] == IN_TORCH:
            twin = next(r for r in rows if (r["dtype"], r["provider"]) == (row["dtype"], IN_ORT))
            assert twin["max_ulp"] == row["max_ulp"], "torch and ONNX Runtime run the same kernel"
    found = numeric_verdicts(rows)
    assert {verdict["group"] for verdict in found} >= {"numerics, never the worst"}
