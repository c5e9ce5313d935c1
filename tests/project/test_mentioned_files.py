"""Files that comments, docstrings and documents name exist."""

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
    "my_models.py",
    "mish.h",
    "onnxruntime_c_api.h",
    "element_wise_ops.h",
}
COMMENTS = {".h": "//", ".cuh": "//", ".cu": "//", ".cpp": "//", ".cmake": "#", ".sh": "#", ".txt": "#"}


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: the files of the project are not known")
    return listed.stdout.split()


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that people read: all of a document, a program's comments and docstrings."""
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
    files = tracked()
    names = {Path(file).name for file in files}
    wrong = []
    for file in files:
        path = ROOT / file
        if not path.is_file() or path.is_symlink():
            continue
        for number, line in prose(path):
            for name in NAME.findall(line):
                known = name in OTHERS or (name in names if "/" not in name else (ROOT / name).exists())
                if not known and not (path.parent / name).exists():
                    wrong.append(f"{file}:{number}: {name}")
    assert not wrong, "these files do not exist:\n" + "\n".join(wrong)
