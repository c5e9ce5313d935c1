"""What an op gains that packs a constant weight once per session: `twinop bench packed-weight`."""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from onnx import helper

from twinop.building.builder import build
from twinop.building.flags import Options
from twinop.building.project import find_project
from twinop.console import clear_errors

from . import report, runtime
from .recording import Commit, Output, Recording
from .timing import Run, host_times

SIZES = (256, 1024)
ONCE, EACH, AGAIN = "once per session", "in each call", "in each call, again"

SOURCE = """
#pragma once
#include <memory>
#include <vector>

#include "twinop/kernel.h"

namespace twinop {

inline void Transpose(const Tensor& weight, float* packed) {
  const auto* data = weight.as<const float>();
  const std::int64_t rows = weight.sizes[0], columns = weight.sizes[1];
  for (std::int64_t j = 0; j < rows; ++j)
    for (std::int64_t k = 0; k < columns; ++k) packed[k * rows + j] = data[j * columns + k];
}

// The transposed weight, if the model has it as a constant.
template <class Op>
struct PackedWeight {
  std::vector<float> values;

  static Status Create(const CallOf<Op>& call, std::unique_ptr<PackedWeight>* state) {
    *state = std::make_unique<PackedWeight>();
    const Tensor& weight = InputOf(call, "weight"_name);
    if (!weight.present || weight.numel == 0) return {};
    (*state)->values.resize(static_cast<std::size_t>(weight.numel));
    Transpose(weight, (*state)->values.data());
    return {};
  }
};

inline std::int64_t PackedSize(const Call& call) {
  return call.inputs[1].numel * static_cast<std::int64_t>(sizeof(float));
}

template <class Op>
Status LaunchPackedLinear(const CallOf<Op>& call) {
  const std::vector<float>& kept = static_cast<const PackedWeight<Op>*>(call.state)->values;
  const float* packed = kept.data();
  if (kept.empty()) {
    Transpose(InputOf(call, "weight"_name), static_cast<float*>(call.scratch));
    packed = static_cast<const float*>(call.scratch);
  }
  const float* x = InputData<float>(call, "x"_name);
  float* y = OutputData<float>(call, "y"_name);
  const std::int64_t columns = InputOf(call, "x"_name).numel, rows = OutputOf(call, "y"_name).numel;
  for (std::int64_t j = 0; j < rows; ++j) y[j] = 0;
  for (std::int64_t k = 0; k < columns; ++k)
    for (std::int64_t j = 0; j < rows; ++j) y[j] += x[k] * packed[k * rows + j];
  return {};
}

TWINOP_CPU_OP(packed_linear,
              Record("packed_linear(Tensor x, Tensor weight) -> Tensor")
                  .dtypes("float32")
                  .shapes("y = [weight[0]]")
                  .input_shapes("x = [weight[1]]")
                  .scratch<PackedSize>()
                  .state<PackedWeight<Op>>(),
              LaunchPackedLinear)

}  // namespace twinop
"""


def measure(size: int, library: Path, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measures y = W x in two sessions: W is a constant of the model, or an input.

    Raises:
        BenchError: a result is not torch's.
    """
    x, weight, y = torch.randn(size), torch.randn(size, size) / size**0.5, torch.empty(size)
    node = helper.make_node("CustomPackedLinear", ["x", "weight"], ["y"], domain="packed_linear")
    runs: dict[str, Run] = {}
    kept = {"weight": weight}
    for name, inputs, constants in ((ONCE, {"x": x}, kept), (EACH, {"x": x} | kept, {})):
        model = runtime.one_op([node], inputs, {"y": y}, fixed=True, constants=constants)
        session = runtime.open_session(model, torch.device("cpu"), library=library, cpu_threads=1)
        runs[name] = runtime.bind(session, inputs, {"y": y})
        runs[name]()
        if not torch.allclose(y, weight @ x, atol=1e-4):
            raise report.BenchError(f"{name}: the result is not that of torch: nothing is measured")
    runs[AGAIN] = runs[EACH]
    times = host_times(runs, rounds=rounds, seconds=seconds)
    return [{"size": size, "packed": name} | time.row() for name, time in times.items()]


def main(
    quick: Annotated[bool, typer.Option("--quick", help="A quick look: fewer runs.")] = False,
    output: Output = None,
    commit: Commit = None,
) -> None:
    """Measure an op on the CPU that packs its weight once per session, as a constant of the model.

    The op multiplies a vector by a matrix, which it transposes first. The other session gets the matrix as an
    input and transposes it in each call. The arithmetic is the same, on one thread.

    Example:

        twinop bench packed-weight --quick
    """
    with clear_errors(), tempfile.TemporaryDirectory() as folder:
        recording = Recording("packed-weight", torch.device("cpu"), output, commit)
        header = Path(folder) / "packed_linear.h"
        header.write_text(SOURCE)
        library = build(find_project([header]), options=Options(cpu=True)).library.path
        rows, verdicts = [], []
        for size in SIZES:
            found = measure(size, library, 201 if quick else 2001, 0.5 if quick else 8.0)
            us = {row["packed"]: row["median_us"] for row in found}
            text = f"packed {ONCE} / {EACH}, {size} x {size}, cpu"
            verdicts.append(report.bar(text, us[ONCE] / us[EACH], 1))
            rows += found
        report.show_rows("A matrix times a vector, float32", rows, ("size", "packed", "median_us", "low_us"))
        report.show_bars(verdicts)
        recording.write(settings={"quick": quick, "cpu_threads": 1}, bars=verdicts, rows=rows)
