"""The front page and docs/guide/ are typed from top to bottom in an empty folder; what is not run is known.

tests/project/test_site.py follows the page of the first op, test_all_page.py the one of all
that one may write. A block that is not run has a comment above
it, as in test_docs.py. Python finds only the packages that the front page and the page itself install.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import ROOT, SITE_CUSTOMIZE, Block, absent_modules, blocks_of

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "docs/index.md", *(ROOT / "docs/guide").glob("*.md"))
    if path.name not in ("first-op.md", "record.md", "all.md")
    and re.search("^```(sh|python)", path.read_text(), re.MULTILINE)
)
COMMANDS_ONLY = ("docs/guide/cmake.md", "docs/guide/performance.md")  # nothing in them is run here
NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 5)

    def forward(self, x):
        return torch.nn.functional.relu(self.linear(x))

    def example_inputs(self):
        return (torch.randn(4, 5),)


def make():
    return Net(), (torch.randn(4, 5),)
"""
FILES = {"docs/guide/exporting.md": {"model.py": NET, "my_package/models.py": NET}}  # the reader's own
CONTEXT = {
    "docs/guide/exporting.md": "import torch\nfrom model import Net\nmodel, x = Net(), torch.randn(4, 5)\n"
}


def installed(page: str) -> list[str]:
    """What the front page and then the page install with pip: twinop's wheel itself needs what it needs."""
    blocks = [*blocks_of("docs/index.md"), *blocks_of(page)]
    lines = re.findall(r"(?m)^pip install ([^#\n]+)", "".join(block.text for block in blocks))
    asked = ["twinop" if text.endswith(".whl") else text for line in lines for text in shlex.split(line)]
    assert {"twinop", "torch", "onnxruntime"} <= set(asked)
    return asked


def script(blocks: list[Block], context: str) -> str:
    """Returns the blocks as one program of bash: a folder that a block enters stays the current one."""
    parts = ["set -euo pipefail"]
    for block in blocks:
        if block.language == "sh":
            parts.append(block.text)
            continue
        named = re.match(r"# (\w+\.py)$", block.first_line)
        name = named[1] if named else "block.py"
        parts.append(f"cat > {name} <<'END'\n{context}{block.text}END\npython {name}")
    return "\n".join(parts)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if page not in COMMANDS_ONLY])
def test_blocks(page: str, tmp_path: Path) -> None:
    """With a C++ compiler only."""
    folder = tmp_path / "an empty folder ä"
    folder.mkdir()
    for name, text in FILES.get(page, {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    blocks = [block for block in blocks_of(page) if block.reason is None and block.language != "text"]
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    env |= {name: os.environ[name] for name in ("TWINOP_LIBRARY_DIR",) if name in os.environ}
    hidden = SITE_CUSTOMIZE.format(absent=absent_modules([], installed(page)))
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(hidden)
    # pytest would load the plugins of hidden packages too.
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout"}
    env["PYTHONPATH"] = str(tmp_path / "site")
    command = ["bash", "-c", script(blocks, CONTEXT.get(page, ""))]
    done = subprocess.run(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
