"""A fixture for tests of zero copy: the addresses that ONNX Runtime is given."""

from collections.abc import Iterator
from typing import Any

import onnxruntime
import pytest

from twinop.deploy import Session


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
