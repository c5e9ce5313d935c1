"""pytest's part of `twinop test`: runs the tests of `matrix/` for the ops of a library.

A test of `matrix/` takes `record`, and may take `dtypes` (a combination of the record's) and `device`.
"""

from collections.abc import Callable, Generator
from typing import Any

import pytest

from twinop.errors import TwinopError
from twinop.op_spec import OpSpec

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
    parser.addoption(
        "--twinop-left-out", action="append", default=[], help="An op or a test that is not run again."
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {*config.getoption("--twinop-left-out", [])}

    def is_left_out(item: pytest.Item) -> bool:
        return bool(left_out & {item.nodeid, _op_of(item)})

    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
        items[:] = [item for item in items if not is_left_out(item)]


def _op_of(item: pytest.Item) -> str:
    record = item.callspec.params.get("record") if hasattr(item, "callspec") else None
    return record.qualified_name if isinstance(record, OpSpec) else ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    child.note_call("")
    child.note(test=item.nodeid, op=_op_of(item))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """What is told, and not run again, if a later test ends the process."""
    before = child.running()
    if report.when == "teardown":
        child.note(done=[*before.get("done", []), report.nodeid])
    elif report.failed:
        child.note(failures=[*before.get("failures", []), f"{report.nodeid}: {report.longreprtext}"[:2000]])


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
        pytest.fail(str(error), pytrace=False)
