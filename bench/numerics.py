"""How exact every op is: the largest error in units in the last place, beside torch's and ONNX Runtime's."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from twinop import torch_op
from twinop.bench import report
from twinop.bench.cases import ROWS, Case, family_of, input_shape, make_outputs
from twinop.bench.cells import IN_ORT, IN_TORCH, OURS
from twinop.bench.peers import Entry
from twinop.bench.providers import EAGER, Problem, Providers, reason_of
from twinop.bench.runs import reference
from twinop.bench.verdicts import Verdict

DTYPES = ("float32", "float16", "bfloat16")
ELEMENTS = 1 << 22
SHAPE = (512, 4096)
SHIFTED = ("layer_norm", "add_layer_norm")
"""A result near zero is a difference of larger numbers here: its error is counted in ulp of 1 at least."""

CAPTION = (
    "ulp: of the exact result in the result's dtype (layer_norm: of 1 at least); 0.5 is correctly rounded. "
    "16-bit types of one input: every finite value."
)


def providers(entries: Mapping[str, Entry]) -> list[str]:
    """Whose errors are compared."""
    return [IN_TORCH, IN_ORT, EAGER, *(name for entry in entries.values() for name in entry.ort)]


def measure(who: Providers, entries: Mapping[str, Entry]) -> list[dict[str, Any]]:
    """A row for each op, dtype and provider: the largest error over all outputs."""
    rows: list[dict[str, Any]] = []
    with report.progress("numerics", len(entries) * len(DTYPES)) as step, torch.no_grad():
        for name, entry in entries.items():
            for dtype in DTYPES:
                step(f"{name} {dtype}")
                rows += _op(who, name, entry, dtype)
            who.close()
    return rows


def _op(who: Providers, name: str, entry: Entry, dtype: str) -> list[dict[str, Any]]:
    family = family_of(torch_op.records()[entry.op], entry)
    case = Case(name, family, dtype, SHAPE if family == ROWS else (ELEMENTS,), kind="numerics")
    inputs = draw(case, entry, who.device)
    if family != ROWS:
        case = Case(name, family, dtype, tuple(next(iter(inputs.values())).shape), kind="numerics")
    outputs = make_outputs(case, entry, who.device)
    expected = reference(case, entry, inputs, outputs)
    least = 1.0 if entry.op in SHIFTED else 0.0
    rows = []
    for provider, subject in who.build(case, entry, inputs, outputs).items():
        try:
            results = subject.result()
            error = max(ulp_error(a, b, least) for a, b in zip(results, expected, strict=True))
        except Exception as failure:  # whatever a peer raises
            who.problems.append(Problem(case, provider, reason_of(failure)))
            continue
        rows.append(
            {
                "op": name,
                "family": family,
                "dtype": dtype,
                "device": who.device.type,
                "provider": provider,
                "values": results[0].numel(),
                "max_ulp": error if error == float("inf") else round(error, 4),
            }
        )
    return rows


def draw(case: Case, entry: Entry, device: torch.device) -> dict[str, Tensor]:
    """Inputs of all magnitudes: every finite value where there are few, else normal and log-uniform ones."""
    if case.family == "unary" and case.torch_dtype.itemsize == 2:
        every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device=device).to(torch.int16)
        x = every.view(case.torch_dtype)
        x = x[x.isfinite()]
        return {"x": x[x > 0] if entry.positive else x}
    inputs = {}
    for name in entry.input_names:
        shape = input_shape(name, case)
        x = torch.randn(shape, device=device, dtype=torch.float64)
        if case.family != ROWS:
            wide = torch.exp2(torch.empty_like(x).uniform_(-24, 6)) * x.sign()
            x = torch.where(torch.rand_like(x) < 0.5, wide, 3 * x)
        if case.entry == "pow":
            x = torch.exp2(torch.empty_like(x).uniform_(-4, 4)) if name == "a" else x.clamp(-8, 8)
        elif name in entry.positive:
            x = x.abs().clamp_min(1e-6)
        inputs[name] = x.to(case.torch_dtype)
    return inputs


def ulp_error(actual: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """The largest distance from `expected` (fp64), in ulp of `actual`'s dtype at max(|expected|, least).

    Results beyond the dtype's range are left out. NaN or infinity for any other counts as infinite.
    """
    info = torch.finfo(actual.dtype)
    kept = expected.abs() <= info.max
    exact, given = expected[kept], actual[kept].double()
    if exact.numel() == 0:
        return 0.0
    _, exponent = torch.frexp(exact.abs().clamp_min(max(info.tiny, least)))
    ulp = torch.ldexp(torch.full_like(exact, info.eps), exponent - 1)
    inf = float("inf")
    return float(((given - exact).abs() / ulp).nan_to_num(inf, posinf=inf).max())


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Ours is never the worst; element-wise 16-bit results are within 1 ulp."""
    found: list[Verdict] = []
    for op, dtype in dict.fromkeys((row["op"], row["dtype"]) for row in rows):
        errors = {r["provider"]: r["max_ulp"] for r in rows if (r["op"], r["dtype"]) == (op, dtype)}
        family = next(row["family"] for row in rows if row["op"] == op)
        others = {name: error for name, error in errors.items() if name not in OURS}
        for ours in filter(errors.__contains__, OURS):
            value = errors[ours]
            if others:
                worst = max(others, key=others.__getitem__)
                group = "numerics, never the worst"
                bar = {"bar": f"<= {others[worst]} ({worst})", "passed": bool(value <= others[worst] + 1e-3)}
                found.append(
                    {"group": group, "what": f"{group}: {ours}, {op}, {dtype}", "value": value} | bar
                )
            if family != ROWS and dtype != "float32":
                group = "numerics, element-wise in 16 bits, ulp"
                bar = {"bar": "<= 1", "passed": bool(value <= 1)}
                found.append(
                    {"group": group, "what": f"{group}: {ours}, {op}, {dtype}", "value": value} | bar
                )
    return found


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    device = rows[0]["device"]
    columns = ["", "dtype", IN_TORCH, IN_ORT, EAGER, "ONNX Runtime's own"]
    table = report.table(f"Largest error in ulp, {device}", columns, CAPTION)
    for op, dtype in dict.fromkeys((row["op"], row["dtype"]) for row in rows):
        errors = {r["provider"]: r["max_ulp"] for r in rows if (r["op"], r["dtype"]) == (op, dtype)}
        others = [error for name, error in errors.items() if name not in OURS]
        cells = []
        for name in (IN_TORCH, IN_ORT, EAGER):
            text = f"{errors[name]:.3g}" if name in errors else ""
            if name in OURS and name in errors and others:
                good = errors[name] <= max(others) + 1e-3
                text = f"[{'green' if good else 'red'}]{text}[/]"
            cells.append(text)
        ort = {name.removeprefix("ORT "): e for name, e in errors.items() if name.startswith("ORT ")}
        table.add_row(op, dtype, *cells, "; ".join(f"{name} {error:.3g}" for name, error in ort.items()))
    report.show(table)
