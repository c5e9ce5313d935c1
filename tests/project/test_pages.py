"""Pages of docs/ are typed from top to bottom in an empty folder, with a C++ compiler only.

A block behind the line "`file`:" is that file. A block that is not run has a comment above it, as in
test_docs.py. Python finds only the packages that the front page and the page itself install.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from record_driver import read_by_compiler
from test_docs import ROOT, SITE_CUSTOMIZE, Block, absent_modules, blocks_of

EXTENSION, RECORD = "docs/from-a-pytorch-extension.md", "docs/guide/record.md"
COMMANDS_ONLY = ("docs/guide/cmake.md", "docs/guide/performance.md")  # nothing in them is run here
PAGES = sorted(
    name
    for path in (ROOT / "docs/index.md", *(ROOT / "docs/guide").glob("*.md"))
    if re.search("^```(sh|python)", path.read_text(), re.MULTILINE)
    and (name := str(path.relative_to(ROOT))) not in (RECORD, *COMMANDS_ONLY)
)
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
MORE = {  # what is tried behind the page
    "docs/guide/first-op.md": "ls dist/mish-*.whl",
    "docs/guide/all.md": """
twinop build scaled.h --cpu
twinop test -k 'float32 and (bits or body or gradient or exporter) or first_of'
cat > calls.py <<'END'
import torch
from scaled import first_of, scaled
for call in (lambda: scaled(torch.ones(3), scale=-1.0), lambda: first_of(torch.ones(0))):
    try:
        call()
    except RuntimeError as error:
        print(error)
END
python calls.py > said
grep -F 'attribute scale is -1, expected a finite number > 0' said
grep -F 'x has no elements' said""",
    EXTENSION: """python -c "from twinop.libraries.library import read_library
found = read_library('build/libmy_relu.so').records
devices = {name: each.devices for name, each in found.items()}
assert devices == dict.fromkeys(('relu', 'relu_backward'), $DEVICES)"
""",
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
    parts = ["set -euo pipefail", "start=$PWD"]
    for block in blocks:
        named = re.match(r"# (\w+\.py)$", block.first_line)
        name = f"$start/{block.file}" if block.file else named[1] if named else "block.py"
        if block.file or block.language == "python":
            before = "" if block.file else context
            parts.append(f'mkdir -p "{Path(name).parent}"')
            parts.append(f"cat > \"{name}\" <<'END'\n{before}{block.text}END")
        if not block.file and block.language in ("sh", "python"):
            parts.append(block.text if block.language == "sh" else f"python {name}")
    return "\n".join(parts)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [EXTENSION, *PAGES])
def test_blocks(page: str, tmp_path: Path) -> None:
    folder = tmp_path / "an empty folder ä"
    folder.mkdir()
    for name, text in FILES.get(page, {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    blocks = [block for block in blocks_of(page) if block.reason is None]
    text = f"{script(blocks, CONTEXT.get(page, ''))}\n{MORE.get(page, '')}"
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    env |= {name: os.environ[name] for name in ("TWINOP_LIBRARY_DIR",) if name in os.environ}
    devices: tuple[str, ...] = ("cpu",)
    if page == EXTENSION and (nvcc := shutil.which("nvcc")):
        devices = ("cpu", "cuda")
        env |= {"CUDACXX": nvcc, "TWINOP_CUDA_ARCHS": "90"}
    env |= {"TWINOP_SOURCE": str(ROOT), "DEVICES": str(devices)}
    hidden = SITE_CUSTOMIZE.format(absent=absent_modules([], installed(page)))
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(hidden)
    # pytest would load the plugins of hidden packages too.
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout"}
    if "pip wheel" not in text:  # which loads the plugins of all packages that are there
        env["PYTHONPATH"] = str(tmp_path / "site")
    command, nothing = ["bash", "-c", text], subprocess.DEVNULL
    done = subprocess.run(command, cwd=folder, env=env, stdin=nothing, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"


def test_the_records_of_the_guide_compile() -> None:
    records = [block.text.strip() for block in blocks_of(RECORD) if block.language == "cpp"]
    assert len(records) >= 5
    checks = "\n".join(f"static_assert(Parse({text}).input_count > 0);" for text in records)
    source = f'#include "twinop/record/parse.h"\nnamespace twinop {{\n{checks}\n}}\n'
    done = read_by_compiler(source)
    assert done.returncode == 0, done.stderr


def test_the_python_of_the_records() -> None:
    names: dict[str, Any] = {}
    for block in blocks_of(RECORD):
        if block.language == "python":
            exec(compile(block.text, RECORD, "exec"), names)
    assert names["moved"].shape == (8, 64) and names["curvature"].shape == (64, 64)
    assert names["each"].shape == (8, 16)
    assert names["norm"](names["x"]).shape == (8, 64)
    given = names["reference"]("any")
    assert given.allowed("float32") == 4 and given.gradient_ulps == 64
