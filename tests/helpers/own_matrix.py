"""The order of tests, and which of twinop's own matrix wait for `./build.sh test --all`.

Their neighbours show the same.
"""

from typing import Any

import pytest

# On the CPU one half of the ops has the former two, and the other half the latter.
HALVES = {"test_gradcheck": 0, "test_layouts": 0, "test_the_body_gives_what_the_kernel_gives": 1}
# kernels/test_linear_fp8.py shows that they are an op and quantize_rows, bit for bit.
PRODUCERS = ("norm_fp8", "gelu_fp8")


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
    """Which dtypes, exporter and checks an op is tested with differs from op to op.

    They share the code behind it. On the CPU tests of the body have the op's first combination of dtypes, in
    the first and the last opset, with and without optional inputs, and each other test one of them. Some ops
    are exported, or traced and compiled with open sizes; a half has the tests of HALVES.
    """
    from twinop.model.attach import OPSETS

    record, number = given["record"], sum(given["record"].name.encode())
    on_cpu = given.get("device", "cpu") == "cpu"
    if on_cpu and number % 2 != HALVES.get(test, number % 2):
        return True
    if on_cpu and record.name.endswith(PRODUCERS) and "_gives_what_the_" in test:
        return True
    if test == "test_the_body_runs_with_and_without_optional_inputs":
        return True
    if on_cpu and (dtypes := given.get("dtypes")):
        combinations = record.combinations
        return dtypes != combinations[0 if "body" in test else (number + len(test)) % len(combinations)]
    if test == "test_both_exporters_carry_the_op":
        return number % 5 != 0 or given["exporter"] != ("torchscript", "dynamo")[number % 2]
    if test == "test_compile_without_graph_break":
        return number % 9 != 0
    if test == "test_opcheck":
        return given["device"] == "cpu" and number % 6 != 0
    return test == "test_the_body_in_every_opset" and given["opset"] not in (OPSETS[0], OPSETS[-1])
