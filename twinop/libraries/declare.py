"""Declares ops of one's own in Python, beside their C++ source: bodies, second derivatives, the library.

    import twinop

    library_path = twinop.library_beside(__file__)

    @twinop.op
    def mish(op, x):
        return op.Mul(x, op.Tanh(op.Softplus(x)))

A module that does this, such as mish.py, imports neither torch nor onnx.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import LibraryError, TwinopError
from ..record.body_registry import BODIES, DefaultInput, body
from ..record.names import check_domain, check_op_name
from ..record.op_spec import OpSpec, key_of
from .built import warn_if_old

SECOND_DERIVATIVES: dict[str, Callable[..., Any]] = {}
"""Backward ops in torch's operators by `OpSpec.key`; `torch_op/second_derivatives.py` explains them."""

DERIVATIVES: dict[str, Callable[..., Any]] = {}
"""The derivatives by `OpSpec.key` that are torch functions, of ops declared in Python (`kernel_op.py`)."""

CPU_FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""What runs in torch on CPU tensors, by `OpSpec.key`, for ops whose library has no CPU kernel.

A function of the op's inputs, by position, and of its attributes, by name. Inputs of 16 bits arrive in fp32,
and the results are rounded to the op's types.
"""


def cpu_function(record: OpSpec) -> Callable[..., Any] | None:
    """Returns what runs on CPU tensors of an op without a CPU kernel: its function, or its body."""
    if record.key in BODIES:
        CPU_FUNCTIONS.setdefault(record.key, partial(body_on_cpu, record))
    return CPU_FUNCTIONS.get(record.key)


def body_on_cpu(record: OpSpec, *inputs: Any, **attributes: Any) -> Any:
    """Computes the outputs of an op from its body."""
    from ..export.body_in_torch import evaluate_body

    return evaluate_body(record, inputs, attributes)


class Op:
    """An op of one's own: called with tensors, it runs in torch.

    The first call loads torch and the library: the `library_path()` of the defining module, or else the one
    that is found for the domain (`twinop.libraries.find`).

    Attributes:
        name, domain: the op is `torch.ops.<domain>.<name>`, with "_" for "." in the domain.
        body: the function that builds its function body, for use in other bodies.
    """

    def __init__(self, build: Callable[..., Any], domain: str) -> None:
        self.name, self.domain, self.body = build.__name__, domain, build
        self.__name__, self.__qualname__, self.__doc__ = build.__name__, build.__qualname__, build.__doc__
        self.__module__ = build.__module__
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            key = f"{self.domain}::{self.name}"
            _load(self.__module__, self.domain, self.name, key)
            self._function = _torch_functions[key]
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<op {self.domain}::{self.name}>"

    def __reduce__(self) -> str:
        return self.__qualname__  # pickled by its place, as a function


def op(
    function: Callable[..., Any] | None = None,
    *,
    domain: str | None = None,
    defaults: Mapping[str, DefaultInput] | None = None,
) -> Any:
    """Makes a function the function body of the op of its name, and returns the op.

    `twinop/model/bodies.py` says how a body is written.

    Args:
        domain: the domain of the op's library. Default: the top-level name of the function's module.
        defaults: what each omitted optional input stands for, by name (`twinop.DefaultInput`).

    Returns:
        An `Op`.

    Raises:
        TwinopError: the op or the domain has a name that it cannot have.
        ExportError: the op already has a body, from another function.
    """

    def declare(function: Callable[..., Any]) -> Op:
        place = _place(function, domain)
        body(function, defaults=defaults, domain=place)
        return Op(function, place)

    return declare if function is None else declare(function)


def second_derivative(function: Callable[..., Any] | None = None, *, domain: str | None = None) -> Any:
    """Registers a backward op in torch's operators, from which torch derives the second derivative.

    The function has the name of the backward op. Its parameters are those of the op's inputs and attributes
    that it needs, by name. It returns the op's output, or a dict of outputs by name where there are several:

        @twinop.second_derivative
        def square_backward(grad_y, x):
            return 2 * grad_y * x

    Args:
        domain: as in `op`.

    Raises:
        TwinopError: the op or the domain has a name that it cannot have.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        SECOND_DERIVATIVES[key_of(_place(function, domain), function.__name__)] = function
        return function

    return declare if function is None else declare(function)


def library_beside(file: str | os.PathLike[str]) -> Callable[[], str]:
    """Returns a function for a module with ops: `library_path = twinop.library_beside(__file__)`.

    The function returns the path of `lib<module>.so`, which lies beside the file (in an installed package) or
    in `build/` (in a project). It raises LibraryError if neither has it.
    """
    path = Path(file).resolve()
    is_package = path.stem == "__init__"
    name = f"lib{path.parent.name if is_package else path.stem}.so"
    places = [path.parent, path.parent / "build", *([path.parent.parent / "build"] if is_package else [])]

    def library_path() -> str:
        for place in places:
            if (place / name).is_file():
                warn_if_old(place / name)
                return str(place / name)
        raise LibraryError(
            f"{name} not found; searched {', '.join(map(str, places))}. `twinop build --name "
            f"{name[3:-3]}` in {places[-1].parent} builds it"
        )

    return library_path


def _place(function: Callable[..., Any], domain: str | None) -> str:
    """Checks the names of an op and returns its domain."""
    check_op_name(function.__name__)
    domain = declared_domain(function, domain)
    check_domain(domain)
    return domain


def declared_domain(function: Callable[..., Any], domain: str | None) -> str:
    """Returns an op's domain, by default the name of its function's module; TwinopError: it has no name."""
    domain = function.__module__.partition(".")[0] if domain is None else domain
    if domain != "__main__":
        return domain
    file = getattr(sys.modules["__main__"], "__file__", None)  # it is run as a script
    if file is None:
        raise TwinopError(
            f"op {function.__name__}: its domain is its module's name, and this module has none. Pass "
            'domain="my_ops"'
        )
    return Path(file).stem


def load_module(path: Path) -> ModuleType:
    """Imports the Python file of an op under its own name; TwinopError: it fails, or the name is taken."""
    name = path.parent.name if path.name == "__init__.py" else path.stem
    if (known := sys.modules.get(name)) is not None:
        file = getattr(known, "__file__", None) or "built into Python"
        if Path(file).resolve() != path.resolve():
            raise TwinopError(
                f"{path} cannot be imported: another module has the name {name} ({file}). Rename the file"
            )
        return known
    folder = str(path.parent.parent if path.name == "__init__.py" else path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except TwinopError:
        raise
    except ModuleNotFoundError as error:
        package = {"triton": "'twinop[triton]'", "helion": "helion"}.get(error.name or "")
        advice = f". Install it: pip install {package}" if package else ""
        raise TwinopError(f"{path} cannot be imported: {error}{advice}") from error
    except Exception as error:
        raise TwinopError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error


_torch_functions: dict[str, Callable[..., Any]] = {}


def _load(module: str, domain: str, name: str, key: str) -> None:
    library_path = getattr(sys.modules.get(module), "library_path", None)
    torch_op = importlib.import_module("twinop.torch_op")
    if (function := torch_op.load_declared(key)) is not None:  # its kernels are written in Python
        _torch_functions[key] = function
        return
    ops = torch_op.load_domain(domain) if library_path is None else torch_op.load(library_path())
    library = ops.library
    if library.domain != domain:
        raise LibraryError(
            f"{library.path} has the domain {library.domain}, and {module} declares {domain}::{name}. Build "
            f'the library for {domain}, or declare the op with @twinop.op(domain="{library.domain}")'
        )
    if name not in ops.functions:
        raise LibraryError(
            f"{library.path} has no op {name}, which {module} declares; it has: {', '.join(ops.functions)}. "
            "Build it again, or rename one of the two"
        )
    _torch_functions[key] = ops.functions[name]


# torch.compile calls it while it traces, instead of tracing it.
_load._dynamo_marked_constant = True  # type: ignore[attr-defined]
