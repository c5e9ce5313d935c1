"""What the tests of sessions share."""

from collections.abc import Iterator
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
def bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """The addresses that a run binds, by input and output name."""
    addresses: dict[str, int] = {}

    class Spy:
        def __init__(self, inner: Any) -> None:
            self._binding = original(inner)

        def bind_input(self, name: str, *arguments: Any) -> None:
            addresses[name] = arguments[-1]
            self._binding.bind_input(name, *arguments)

        def bind_output(self, name: str, *arguments: Any) -> None:
            if len(arguments) > 1:
                addresses[name] = arguments[-1]
            self._binding.bind_output(name, *arguments)

        def get_outputs(self) -> Any:
            return self._binding.get_outputs()

    original = onnxruntime.SessionIOBinding
    run = Session._tensor_runner

    def spying(self: Session) -> Any:
        runner = run(self)
        inner = runner._inner

        class Inner:
            def run_with_iobinding(self, binding: Spy, options: Any) -> None:
                inner.run_with_iobinding(binding._binding, options)

        runner._inner = Inner()
        monkeypatch.setattr(onnxruntime, "SessionIOBinding", lambda _: Spy(inner))
        return runner

    monkeypatch.setattr(Session, "_tensor_runner", spying)
    yield addresses
