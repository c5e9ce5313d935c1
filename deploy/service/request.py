"""A request and its answer between the protocols and the models: names and arrays, nothing of a protocol."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from twinop.deploy.service.errors import invalid

if TYPE_CHECKING:
    from twinop.deploy.service.metrics import ModelMetrics

LARGE = 256 << 10  # bytes of a request or an answer: from here on it is worked on in a thread
MOST_TENSORS = 64  # inputs, or outputs, of a request to a model that has fewer


@dataclass(slots=True)
class Request:
    """One inference request, decoded but not yet held against the model.

    Attributes:
        inputs: arrays by name. BF16 is ml_dtypes.bfloat16; BYTES is an object array of str.
        outputs: the names wanted, in order; None for all.
        version: the version asked for; None for the latest.
        id: what the logs and the answer call it: the client's, or one made here.
        deadline: when the client gives up, in seconds of time.monotonic(); None for never.
        arrived: when the request had been read, likewise.
    """

    model: str
    inputs: Mapping[str, np.ndarray]
    outputs: Sequence[str] | None = None
    version: int | None = None
    id: str = ""
    deadline: float | None = None
    arrived: float = 0.0


@dataclass(slots=True)
class Result:
    """The outputs by name in the order asked for, who made them, and the seconds that it took."""

    model: str
    version: int
    outputs: dict[str, np.ndarray]
    id: str = ""
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    batch_size: int = field(default=1)
    arrived: float = 0.0  # the request's
    metrics: "ModelMetrics | None" = None  # where it is counted once the answer is made


def check_count(what: str, count: int, most: int) -> None:
    """Before each of them costs time.

    Raises:
        ServiceError: there are too many inputs, or outputs.
    """
    if count > most:
        raise invalid(f"{count} {what}: a request to this model has up to {most}")
