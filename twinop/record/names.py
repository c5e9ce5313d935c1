"""Checks the names of domains, ops and libraries."""

import keyword
import re
import sys

from ..errors import TwinopError
from .op_spec import DOMAIN

BUILT_IN = re.compile(r"(ai\.onnx|com\.microsoft|com\.ms|org\.pytorch)(\..*)?")
"""The domains of ONNX and ONNX Runtime, and their subdomains."""

_TORCH = {"aten": "torch's own operators", "prim": "torch's primitive operators"}


def check_domain(name: str) -> None:
    """Raises TwinopError unless a domain is of identifiers joined by dots, and not a reserved one."""
    refuse_keyword("domain", name)
    if not all(map(_is_identifier, name.split("."))):
        raise TwinopError(
            f"domain {name!r}: expected a name of letters, digits and _, such as my_ops, or several joined "
            "by dots, such as my.ops"
        )
    owner = _TORCH.get(name)
    if name == DOMAIN:
        owner = "twinop's own ops"
    elif BUILT_IN.fullmatch(name):
        owner = "ONNX's operators" if name.startswith("ai.") else "ONNX Runtime's operators"
    if owner is not None:
        raise TwinopError(f"domain {name}: reserved for {owner}. Choose another name, such as my_ops")


def check_op_name(name: str) -> None:
    """Raises TwinopError unless the name of an op is an identifier that formulas can use."""
    refuse_keyword("op name", name)
    if not (_is_identifier(name) and name.strip("_")):
        raise TwinopError(f"op name {name!r}: expected letters, digits and _, such as my_op")
    taken = {"torch": "formulas use torch", "name": "torch.ops.<domain>.name is the name of the domain"}
    if name in taken:
        raise TwinopError(f"op name {name}: reserved, because {taken[name]}. Choose another name")


def check_project_name(name: str) -> None:
    """Raises TwinopError unless a name can be a project's, and so its op's, domain's and Python module's."""
    check_op_name(name)
    check_domain(name)
    others = ["__init__", "main", "conftest", "setup", "pytest", "twinop", "onnx", "numpy", "triton", "test"]
    is_module = name in sys.stdlib_module_names or name in others
    if is_module or name in ("library_path", "tl"):
        why = f"would hide the module {name}" if is_module else "has something else of this name"
        raise TwinopError(
            f"project name {name}: its Python file {why}. Choose another name, such as my_{name}"
        )


def refuse_keyword(what: str, name: str) -> None:
    """Raises TwinopError if a name is a keyword of Python."""
    if keyword.iskeyword(name):
        raise TwinopError(
            f"{what} {name}: a keyword of Python. Choose another name, such as my_{name.lower()}"
        )


def _is_identifier(name: str) -> bool:
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
