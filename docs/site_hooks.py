"""For mkdocs: takes the errors of troubleshooting from the sources, and files of the tree that pages link."""

import ast
import html
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
AREAS = {
    "Your library": ("twinop/*.py", "twinop/building/*.py"),
    "Records of ops": ("kernels/record/*.h", "kernels/record/*.cpp"),
    "Ops in PyTorch": ("torch_op/*.py", "torch_op/*.cpp", "torch_op/*.h"),
    "Ops in ONNX Runtime": ("ort_customop/*.cpp", "ort_customop/*.h"),
    "Exporting": ("export/*.py",),
    "Sessions and checks": ("deploy/*.py",),
    "The service": ("deploy/service/*.py",),
    "Packing": ("deploy/pack/*.py",),
}


# What throws or returns an error in C++; and what some functions put before the message.
_CPP_ERROR = re.compile(r"\bthrow(?= \")|\b(?:Status::Error|runtime_error|Failure|Refuse|WrongAttribute)\(")
_CPP_STARTS = {"WrongAttribute(": "attribute ‹name› "}
_CPP_TOKEN = re.compile(r"//[^\n]*|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])+'|\s+|\w+|.", re.DOTALL)
_CPP_TYPES = {"std", "string", "to_string", "view", "schema"}


def messages(path: Path) -> list[str]:
    """Returns the texts of a file's errors, with expressions as words in angle brackets."""
    return _python_messages(path) if path.suffix == ".py" else _cpp_messages(path)


def _cpp_messages(path: Path) -> list[str]:
    """Returns the last argument of each error: literals and expressions that are joined by `+`."""
    source, found = path.read_text(), []
    for match in _CPP_ERROR.finditer(source):
        pieces: list[list[str]] = [[]]
        depth = 0
        for token in _CPP_TOKEN.findall(source, match.end()):
            depth += (token in "([{") - (token in ")]}")
            if depth < 0 or (depth == 0 and token == ";"):
                break
            if depth == 0 and token == ",":
                pieces = [[]]
            elif depth == 0 and token == "+":
                pieces.append([])
            elif token.strip() and not token.startswith("//"):
                pieces[-1].append(token)
        text = _CPP_STARTS.get(match[0], "") + "".join(map(_cpp_piece, pieces))
        if len(text.split()) >= 4:
            found.append(text)
    return found


def _cpp_piece(tokens: list[str]) -> str:
    words = [token for token in tokens if re.fullmatch(r"[A-Za-z]\w+", token) and token not in _CPP_TYPES]
    if words:  # InputName(schema, i): the input name; kMaxRank: max rank
        name = re.sub("^k(?=[A-Z])", "", words[-1])
        return f"‹{re.sub('(?<=[a-z])(?=[A-Z])', ' ', name).lower()}›"
    return "".join(ast.literal_eval(token) for token in tokens if token.startswith('"'))


def _python_messages(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call) or not node.exc.args:
            continue
        if not ast.unparse(node.exc.func).endswith("Error"):
            continue
        text = _text(node.exc.args[0])
        if len(text.split()) >= 6:
            found.append(text)
    return found


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.FormattedValue):
        words = re.findall(r"[a-z]\w+", ast.unparse(node.value))
        return f"‹{words[-1] if words else '...'}›"
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return _text(node.body)
    return ""


def list_of_messages() -> str:
    parts = []
    for area, patterns in AREAS.items():
        texts = sorted(
            {text for pattern in patterns for path in ROOT.glob(pattern) for text in messages(path)}
        )
        parts.append(f"## {area}\n\n" + "\n".join(f"* {_escaped(text)}" for text in texts))
    return "\n\n".join(parts)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def on_page_markdown(markdown: str, page: Any, files: Files, config: Any) -> str:
    """Fills in the messages. Files of the tree that a page links come into the site, below tree/."""

    def link(match: re.Match[str]) -> str:
        path = (ROOT / "docs" / page.file.src_uri).parent.joinpath(match["target"]).resolve()
        if path.is_relative_to(ROOT / "docs") or not path.is_relative_to(ROOT):
            return match[0]
        if not path.is_file():  # a folder
            return match["text"]
        name = f"tree/{path.relative_to(ROOT)}" + (".txt" if path.suffix == ".md" else "")  # not a page
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(path)))
        return f"{match['image']}[{match['text']}]({'../' * page.file.src_uri.count('/')}{name})"

    if (place := "<!-- messages -->") in markdown:
        markdown = markdown.replace(place, list_of_messages())
    return re.sub(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>\.\./[\w./-]+)\)", link, markdown)
