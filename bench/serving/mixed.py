"""Requests good and bad for the soak, over both protocols: what they share."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from twinop.bench.serving.servers import REST
from twinop.record import DOMAIN, DOMAIN_VERSION

NAME = "soak"


class Wrong(Exception):
    """An answer is not what must come back."""


@dataclass(frozen=True)
class Answer:
    """`status` is HTTP's number or gRPC's name of it, whose details are the `body` of a failure."""

    status: int | str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Case:
    """One request. `check` gives the version that answered, None for a refusal; it raises Wrong."""

    kind: str
    request: bytes
    check: Callable[[Answer], int | None]
    protocol: str = REST
    method: str = ""  # gRPC's


def model(version: int) -> onnx.ModelProto:
    """y = CustomRelu(x) + version: an answer tells which version made it."""
    nodes = [
        helper.make_node("CustomRelu", ["x"], ["r"], domain=DOMAIN),
        helper.make_node("Add", ["r", "version"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in "xy"]
    weight = numpy_helper.from_array(np.array([version], np.float32), "version")
    graph = helper.make_graph(nodes, "soak", ends[:1], ends[1:], [weight])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def compared(y: np.ndarray, x: np.ndarray, version: int) -> int:
    """
    Raises:
        Wrong: y differs from what that version must give, in any bit.
    """
    if not np.array_equal(y, np.maximum(x, 0) + np.float32(version)):
        raise Wrong(f"version {version} gave {y.tolist()} for {x.tolist()}")
    return version


def require(answer: Answer, status: int | str, words: str = "") -> None:
    """
    Raises:
        Wrong: the answer has another status, lacks the words, or shows a stack trace.
    """
    if answer.status != status or words not in answer.body.decode(errors="replace"):
        raise Wrong(f"expected {status} and {words!r}, not {answer.status}: {answer.body[:200]!r}")
    if b"Traceback" in answer.body:
        raise Wrong(f"a stack trace: {answer.body[:200]!r}")


def refusal(status: int | str, words: str) -> Callable[[Answer], None]:
    def check(answer: Answer) -> None:
        require(answer, status, words)

    return check
