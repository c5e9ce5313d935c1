"""What the tests of sessions share."""

from typing import Any

import onnxruntime
import pytest
from models import BINDS_BFLOAT16, make_model

from twinop.deploy import Session, session


@pytest.fixture(autouse=True)
def _bfloat16_needs_1_20(request: pytest.FixtureRequest) -> None:
    parameters = getattr(request.node, "callspec", None)
    if not BINDS_BFLOAT16 and parameters is not None and "bfloat16" in parameters.params.values():
        pytest.skip("this ONNX Runtime takes no bfloat16 feeds from Python")


@pytest.fixture(scope="module")
def relu() -> Session:
    return session(make_model("CustomRelu"))


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The addresses that a run binds, by input and output name."""
    addresses: dict[str, int] = {}

    class Spy(onnxruntime.SessionIOBinding):
        def bind_input(self, name: str, *arguments: Any) -> None:
            addresses[name] = arguments[-1]
            super().bind_input(name, *arguments)

        def bind_output(self, name: str, *arguments: Any) -> None:
            if len(arguments) > 1:
                addresses[name] = arguments[-1]
            super().bind_output(name, *arguments)

    monkeypatch.setattr(onnxruntime, "SessionIOBinding", Spy)
    return addresses
