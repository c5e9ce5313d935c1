"""The files that comments, docstrings and documents name exist."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(
    r"(?<![\w<$*{}/.-])((?:[\w.-]+/)*[\w-]+\.(?:py|h|cuh|cu|cpp|cmake|sh|md|toml))\b(?![\w(*{])"
)
OTHERS = {  # of users and of other projects
    "twinop.toml",
    "models/twinop.toml",
    "file.py",
    "mish.h",
    "mish.py",
    "test_mish.py",
    "test_cube.py",
    "model.py",
    "mish/__init__.py",
    "my_models.py",
    "setup.py",
    "kernels/ops/mish.h",  # of the guides' test
    "kernels/ops/l2_normalize.h",
    "kernels/ops/soft_clip.h",
    "onnxruntime_c_api.h",
    "onnxruntime_cxx_api.h",
    "element_wise_ops.h",
}
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
STEP = re.compile(r"^`([\w/.]+)`:$|^```python\n# ([\w/.]+)$|^Path\(\"([\w.]+)\"\)\.write_text", re.MULTILINE)
"""A file that a guide writes: named on a line of its own, at the start of a block, or by the code in one."""
COMMENTS = {".h": "//", ".cuh": "//", ".cu": "//", ".cpp": "//", ".cmake": "#", ".sh": "#", ".txt": "#"}


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: the files of the project are not known")
    return listed.stdout.split()


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Returns the numbered lines for readers: a whole document, or a program's comments and docstrings."""
    if path.suffix not in {".md", ".py", *COMMENTS}:
        return
    text = path.read_text()
    if path.suffix == ".md":
        yield from enumerate(text.splitlines(), 1)
    elif path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Expr(value=ast.Constant(value=str(docstring))):
                    yield from enumerate(docstring.splitlines(), node.lineno)
    else:
        for number, line in enumerate(text.splitlines(), 1):
            yield number, line.partition(COMMENTS[path.suffix])[2]


def test_files_that_are_named_exist() -> None:
    """A name may leave folders out at its beginning, such as `json.h` or `math/cuda.cuh`.

    A guide writes files of its own (`STEP`).
    """
    files = tracked()
    ends = {"/".join(parts[i:]) for parts in (Path(file).parts for file in files) for i in range(len(parts))}
    includes = ROOT / "twinop/include"
    wrong = []
    for file in files:
        path = ROOT / file
        if not path.is_file() or path.is_symlink():
            continue
        steps = STEP.findall(path.read_text()) if path.suffix == ".md" else ()
        known = ends | OTHERS | {name for step in steps for name in step}
        for number, line in prose(path):
            names = (name for name in NAME.findall(line) if name not in known)
            for name in names:
                if not any((folder / name).exists() for folder in (ROOT, includes, path.parent)):
                    wrong.append(f"{file}:{number}: {name}")
    assert not wrong, "these files do not exist:\n" + "\n".join(wrong)


def test_links_of_the_documents_lead_somewhere() -> None:
    wrong = []
    for file in (name for name in tracked() if name.endswith(".md")):
        for link in re.findall(r"\]\(([^)#]+)", BLOCK.sub("", (ROOT / file).read_text())):
            if "://" not in link and not ((ROOT / file).parent / link).exists():
                wrong.append(f"{file}: {link}")
    assert not wrong, "these links lead nowhere:\n" + "\n".join(wrong)
