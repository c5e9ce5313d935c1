"""Kernels in Helion, and an op of one. Their import takes seconds: tests import it when they run."""

import helion
import helion.language as hl
import torch

import twinop


@helion.kernel(config=helion.Config(block_sizes=[16]), static_shapes=False)
def scaled_kernel(x, factor, twice: hl.constexpr):
    y = torch.empty_like(x)
    for tile in hl.tile(x.size(0)):
        y[tile] = x[tile] * (2 * factor if twice else factor)
    return y


@twinop.triton_op(
    "helion_scaled(Tensor x, float factor=3.0, bool twice=False) -> Tensor",
    dtypes=["float32"],
    body=lambda x, *, factor, twice: x * (2 * factor if twice else factor),
    domain="helion_unbuilt",
)
def helion_scaled(x, *, factor, twice):
    return scaled_kernel(x.view(-1), factor, twice).view(x.shape)


@helion.kernel(config=helion.Config(block_sizes=[16]), static_shapes=False)
def for_known_sizes(x):
    y = torch.empty_like(x)
    for tile in hl.tile(hl.specialize(x.size(0))):
        y[tile] = x[tile]
    return y


def copied(x):
    y = torch.empty_like(x)
    for tile in hl.tile(x.size(0)):
        y[tile] = x[tile]
    return y


CONFIG = helion.Config(block_sizes=[16])
PERSISTENT = helion.Config(block_sizes=[16], pid_type="persistent_blocked")
without_config = helion.kernel(copied, static_shapes=False)
for_one_shape = helion.kernel(copied, config=CONFIG)
for_all_processors = helion.kernel(copied, config=PERSISTENT, static_shapes=False)
