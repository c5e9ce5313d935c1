"""A Ray Data job: it adds a model's outputs to each row of a Parquet dataset.

python examples/ray/map_dataset.py custom_relu.onnx rows/ results/
"""

import sys
from typing import Any

import numpy as np
import ray
import ray.data

from twinop import deploy


class Predict:
    """Runs batches in an actor. Each actor opens the model once, with its checked custom-op library."""

    def __init__(self, model: str) -> None:
        self.session = deploy.session(model)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with the model's outputs as further columns."""
        feeds = {
            spec.name: np.stack(batch[spec.name]).astype(spec.numpy_dtype) for spec in self.session.required
        }
        return batch | self.session.run(feeds)


def mapped(rows: ray.data.Dataset, model: str, actors: tuple[int, int] = (1, 4)) -> ray.data.Dataset:
    """Return the dataset with the outputs. Ray repeats the batches of a node that is lost."""
    pool = ray.data.ActorPoolStrategy(min_size=actors[0], max_size=actors[1])
    return rows.map_batches(
        Predict, fn_constructor_args=(model,), batch_size=64, compute=pool, num_cpus=1, max_restarts=-1
    )


if __name__ == "__main__":
    path, source, target = sys.argv[1:]
    mapped(ray.data.read_parquet(source), path).write_parquet(target)
