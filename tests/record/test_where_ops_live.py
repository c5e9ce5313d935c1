"""CONTRIBUTING's table of where an op lives: each file of an op's column names the op."""

import re

import pytest
from record_driver import ROOT

TABLE = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where does an op live?")[2].partition("\n## ")[0]
OPS, _, *LAYERS = [line.split("|")[1:-1] for line in TABLE.splitlines() if line.count("|") == 7]
COLUMNS = {
    name.strip(): [file for layer in LAYERS for file in re.findall("`(.*?)`", layer[column])]
    for column, name in enumerate(OPS)
    if column > 0
}


@pytest.mark.parametrize("op", COLUMNS)
def test_an_op_is_found_by_its_name_in_each_layer(op: str) -> None:
    assert len(COLUMNS) >= 5 and len(set(COLUMNS[op])) > 1
    name = re.compile(rf"\b(custom)?{op.replace('_', '_?')}(_kernel)?\b", re.IGNORECASE)
    assert [file for file in COLUMNS[op] if not name.search((ROOT / file).read_text())] == []
