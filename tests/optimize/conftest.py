"""What the tests of this folder share."""

import pytest

_OTHER_SIZES = ("test_growing_caches", "test_optimize_models", "test_optimize_sizes")


@pytest.fixture(autouse=True)
def _names_are_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small models have inputs that share names of axes, and their tests say which nodes come out.

    In the modules above the comparison also gives such axes other sizes, as it does for users.
    """
    if request.module.__name__.rpartition(".")[2] not in _OTHER_SIZES:
        monkeypatch.setattr("twinop.optimize.inputs.of_size_1", lambda model, case: {})
