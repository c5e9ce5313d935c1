"""Tests of which each `./build.sh test` runs some cases, and `--all` the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def often(cases: Iterable[str], *names: str) -> list[Any]:
    """Parametrises a test with names of cases; all but these ones are slow."""
    return [pytest.param(each, marks=() if each in names else pytest.mark.slow) for each in cases]
