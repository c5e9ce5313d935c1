"""The pages of docs/ as a site: all of them are in it, and the page of the first op is true."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FIRST_OP = ROOT / "docs/guide/first-op.md"
PART = re.compile(
    r"(?:^`(?P<file>[\w/.-]+)`:\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


def pages(entry: object) -> list[str]:
    if isinstance(entry, dict):
        return [page for value in entry.values() for page in pages(value)]
    return [page for each in entry for page in pages(each)] if isinstance(entry, list) else [str(entry)]


def test_every_page_is_in_the_navigation() -> None:
    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    docs = ROOT / "docs"
    assert sorted(listed) == sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_op(tmp_path: Path) -> None:
    """The page is followed from top to bottom, with a C++ compiler only, in an empty folder."""
    folder = tmp_path / "an empty folder ä"
    folder.mkdir()
    binaries = Path(sys.executable).parent
    env = {"PATH": f"{binaries}:/usr/bin:/bin", "HOME": str(tmp_path), "LANG": "C.UTF-8", "COLUMNS": "100"}
    env |= {name: os.environ[name] for name in ("TWINOP_LIBRARY_DIR",) if name in os.environ}
    parts = list(PART.finditer(FIRST_OP.read_text()))
    assert len(parts) >= 9
    for part in parts:
        if part["file"]:
            (folder / part["file"]).write_text(part["text"])
            continue
        program = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[
            part["language"]
        ]
        place = folder / "mish" if part["language"] == "python" else folder
        done = subprocess.run([*program, part["text"]], cwd=place, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{part['text']}\n{done.stdout}{done.stderr}"
    assert list((folder / "mish/dist").glob("mish-*.whl"))
