"""The order of tests, and which of twinop's own matrix wait for `./build.sh test --all`.

Their neighbours show the same.
"""

from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)  # before pytest leaves the slow ones out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in (each for each in items if isinstance(each, pytest.Function)):
        if not item.function.__module__.startswith("twinop.testing.matrix."):
            continue
        if is_repeated(item.originalname, item.callspec.params):
            item.add_marker(pytest.mark.slow)
    # Tests that wait come first, in one process, while others compute: at the end all would wait.
    items.sort(key=lambda item: not item.nodeid.startswith(("tests/service/", "tests/journeys/")))


def is_repeated(test: str, given: dict[str, Any]) -> bool:
    """Each op goes through one of the two exporters, its body runs in the first and the last opset.

    What does not depend on the dtype is shown for the first and the last one, as the body is: each kernel
    is compared with what its body means. opcheck traces each op, and its derivative, with open sizes; some
    of them are compiled as well.
    """
    from twinop.model.attach import OPSETS

    number = sum(given["record"].name.encode())
    if test == "test_both_exporters_carry_the_op":
        return given["exporter"] != ("dynamo", "torchscript")[number % 2]
    if test == "test_compile_without_graph_break":
        return number % 6 != 0
    if test == "test_the_body_in_every_opset":
        return given["opset"] not in (OPSETS[0], OPSETS[-1])
    if test == "test_the_body_runs_with_and_without_optional_inputs":
        return given["dtypes"] != given["record"].combinations[0]
    if test in (
        "test_any_number_of_threads_gives_the_same_bits",
        "test_the_body_gives_what_the_kernel_gives",
    ):
        combinations = given["record"].combinations
        return given["dtypes"] not in (combinations[0], combinations[-1])
    return False
