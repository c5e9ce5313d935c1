"""docs/guide/troubleshooting.md: twinop says each message that the page quotes; each has cause and cure."""

import ast
import importlib
import re
from functools import cache

import pytest
from test_docs import ROOT

PAGE = ROOT / "docs/guide/troubleshooting.md"
FOLDERS = ("twinop", "torch_op", "export", "model", "optimize", "deploy", "kernels", "ort_customop")
ROW = re.compile(r"^\| `(?P<message>[^|]+)` \| (?P<cause>[^|]+) \| (?P<cure>[^|]+) \|$", re.MULTILINE)


def quoted() -> list[str]:
    """The messages with a cause and a cure."""
    return [match["message"] for match in ROW.finditer(PAGE.read_text().partition("## No library")[2])]


@cache
def texts() -> list[str]:
    """All texts of twinop's sources, with an expression as a word in angle brackets."""
    hooks = importlib.import_module("site_hooks")
    found = []
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*")):
        if path.suffix == ".py" and path.is_file():
            nodes = ast.walk(ast.parse(path.read_text()))
            kinds = (ast.Constant, ast.JoinedStr, ast.BinOp)
            found += [hooks._text(node) for node in nodes if isinstance(node, kinds)]
        elif path.suffix in (".h", ".cpp"):
            found += hooks.messages(path)
    return found


@pytest.mark.parametrize("message", quoted())
def test_the_message_is_in_the_sources(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs", reason="./build.sh setup docs installs it")
    monkeypatch.syspath_prepend(ROOT / "docs")
    wanted = re.compile(".*?".join(re.escape(part) for part in re.split("‹[^›]*›", message)), re.DOTALL)
    assert any(wanted.search(text) for text in texts())
