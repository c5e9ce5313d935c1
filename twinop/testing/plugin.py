"""pytest's part of `twinop test`: runs the tests of `matrix/` for the ops of a library.

A test of `matrix/` takes `record`, and may take `dtypes` (a combination of the record's) and `device`.
"""

from collections.abc import Callable, Generator
from typing import Any

import pytest

from twinop.errors import TwinopError

from . import child
from .target import TARGET, load

RECORDS = pytest.StashKey[Callable[[], Any]]()
"""In the stash of pytest's configuration: a function that returns the records of the ops to test."""

_MATRIX = f"{__package__}.matrix"
_MARKS = {
    "cuda": "needs an NVIDIA GPU",
    "backward_too": "a test of the matrix that also runs for backward ops",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        TARGET, help="A library, the module of its bodies, or a project: what `twinop test` runs."
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    child.note(item.nodeid)


def pytest_configure(config: pytest.Config) -> None:
    for name, said in _MARKS.items():
        config.addinivalue_line("markers", f"{name}: {said}")
    target = config.getoption(TARGET, None)
    if target is not None:
        config.stash[RECORDS] = lambda: load(target)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not metafunc.function.__module__.startswith(_MATRIX):
        return
    import torch

    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    records = {record.key: record for record in metafunc.config.stash[RECORDS]()}
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if "cuda" in marks:
        devices = devices[1:]
    names = [name for name in ("record", "dtypes", "device") if name in metafunc.fixturenames]
    cells = []
    for record in records.values():
        if record.is_backward and "backward_too" not in marks:
            continue
        for dtypes in record.combinations if "dtypes" in metafunc.fixturenames else ({},):
            kinds = "-".join(dict.fromkeys(dtypes.values()))
            for device in devices if {"device", "cuda"} & {*metafunc.fixturenames, *marks} else ["cpu"]:
                if device in record.devices:
                    given = {"record": record, "dtypes": dtypes, "device": device}
                    label = "-".join(filter(None, (record.name, kinds, device)))
                    needs = [pytest.mark.cuda] if device == "cuda" else []
                    cells.append(pytest.param(*map(given.get, names), id=label, marks=needs))
    metafunc.parametrize(names, cells)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Shows errors that are messages to the user without a traceback."""
    try:
        return (yield)
    except TwinopError as error:
        if not pyfuncitem.function.__module__.startswith(_MATRIX):
            raise
        said = str(error)
    pytest.fail(said, pytrace=False)  # here, so that the error is not shown as another one's context


class Causes:
    """Collects the failures of a run by their causes, for `twinop test`: a plugin of pytest."""

    def __init__(self) -> None:
        self._tests: dict[str, list[str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and call.excinfo is not None:
            is_ours = isinstance(item, pytest.Function) and item.function.__module__.startswith(_MATRIX)
            cause = _cause(call.excinfo.value) if is_ours else report.longreprtext
            self._tests.setdefault(cause.strip(), []).append(report.nodeid)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tests.setdefault(report.longreprtext.strip(), []).append(report.nodeid)

    def show(self) -> None:
        """Prints each cause once, behind the tests that fail for it; what most tests fail for comes last."""
        for cause, tests in sorted(self._tests.items(), key=lambda each: len(each[1])):
            more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
            print(f"\nFAILED {tests[0]}{more}:\n{cause}")


def _cause(error: BaseException) -> str:
    """Returns the message for the user in an error or in what it was raised from, else its first line."""
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, TwinopError):
            return str(each)
        each = (
            getattr(each, "inner_exception", None) or each.__cause__ or each.__context__
        )  # of torch.compile
    if isinstance(error, pytest.fail.Exception):
        return str(error.msg)
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''} (--verbose shows where)"
