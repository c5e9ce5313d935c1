"""`twinop new`: a project of one op, which works."""

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..cli.console import out
from ..errors import BuildError
from ..record.names import check_project_name
from ..system.publish import work_folder
from .cache import writing

_TEMPLATES = Path(__file__).parent / "templates"


Kind = Literal["elementwise", "rowwise", "kernel"]
"""What kind of op a project starts with: a folder of templates."""


def create_project(name: str, kind: Kind = "elementwise", parent: Path | None = None) -> Path:
    """Writes a project into a folder of its name: the op's header and Python file, a test, pyproject.toml.

    BuildError: the folder already exists, or cannot be written. TwinopError:
    the name cannot be that of an op and its domain.
    """
    check_project_name(name)
    folder = (parent or Path()) / name
    if folder.exists():
        raise BuildError(f"{folder} already exists. Choose another name, or another folder to start from")
    words = {"my_op": name, "MyOp": "".join(word[:1].upper() + word[1:] for word in name.split("_"))}
    with writing(folder, "start from another folder"):
        if not folder.parent.exists():  # a file in its place is no directory
            folder.parent.mkdir(parents=True)
        with work_folder(folder.parent) as scratch:
            (draft := scratch / name).mkdir()
            for source in (_TEMPLATES / "pyproject.toml", *sorted((_TEMPLATES / kind).glob("*my_op*.*"))):
                text = source.read_text(encoding="utf-8")
                text = re.sub("|".join(map(re.escape, words)), lambda found: words[found[0]], text)
                (draft / source.name.replace("my_op", name)).write_text(text, encoding="utf-8")
            draft.rename(folder)
    return folder


def new(
    name: Annotated[str, typer.Argument(help="The op's name, which is also the project's: mish.")],
    kind: Annotated[
        Kind,
        typer.Option(
            help="elementwise: a functor of one element; rowwise: sums over rows; kernel: a launcher and "
            "CUDA kernels of your own."
        ),
    ] = "elementwise",
) -> None:
    """Start a project of one op: its header and Python file, a test and a pyproject.toml.

    Example: twinop new mish && cd mish && twinop build && twinop test
    """
    folder = create_project(name, kind)
    for file in sorted(folder.iterdir()):
        out.print(file, soft_wrap=True)
    out.print(f"next: cd {folder} && twinop build && twinop test", soft_wrap=True)
