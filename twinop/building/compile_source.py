"""`twinop.compile`: an op from C++ text, for notebooks."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BuildError
from ..record.body_registry import BODIES, Body, DefaultInput
from ..record.op_spec import key_of
from .builder import build
from .cache import cache_folder, digest, write
from .project import Options, find_project, op_names

if TYPE_CHECKING:
    from twinop.torch_op import Ops


@dataclass(frozen=True)
class CompiledOp:
    """An op that `compile` built: called with tensors, it runs in torch."""

    name: str  # the op's
    ops: "Ops"  # all ops of the source as attributes, and their records
    library_path: Path  # for ONNX Runtime, and for `library=` of `twinop.deploy` and `twinop.export`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.ops.functions[self.name](*args, **kwargs)


def compile(
    source: str,
    *,
    name: str | None = None,
    domain: str | None = None,
    body: Callable[..., Any] | None = None,
    defaults: Mapping[str, DefaultInput] | None = None,
    archs: str | None = None,
    cpu: bool = False,
    debug: bool = False,
) -> CompiledOp:
    """Builds an op from C++ text, loads it into torch and returns it.

        mish = twinop.compile(source, body=lambda op, x: op.Mul(x, op.Tanh(op.Softplus(x))))
        y = mish(x)                                 # = torch.ops.mish.mish(x)
        twinop.export.export(net, (x,), "net.onnx", library=mish.library_path)

    The library is kept in the cache (`~/.cache/twinop`, or $TWINOP_CACHE), so that the same text is compiled
    once. Edited text gives a new op, which takes the name: torch.ops.<domain> and the exporters
    mean the op that was compiled last. torch's dispatcher cannot redefine an op that compiled graphs or
    autograd graphs may hold. Therefore each text has a namespace of its own in the dispatcher,
    `<domain>_<hash>`, and torch.ops.<domain> is an alias of the newest. Older ops keep working, and caches
    of torch.compile do not mix them up. The domain in ONNX models has no hash.

    If a library that `torch_op.load` loaded has the domain, torch.ops.<domain> stays the op of that library.

    Args:
        source: the text of a header with ops, as in the file that `twinop new` makes.
        name: the op that is returned, if the text has several. Default: its first.
        domain: the domain of the ops. Default: `name`.
        body: the op's function body, as `twinop.op` takes it.
        defaults: what each omitted optional input of the body stands for.
        archs: CUDA architectures. Default: this machine's GPUs.
        cpu: leaves the CUDA kernels out.
        debug: no optimization, symbols, assertions.

    Raises:
        BuildError: the text has no op, or not the one named, or does not compile; or no compiler is found.
    """
    names = op_names(source)
    if name is None and names:
        name = names[0]
    if name not in names:
        raise BuildError(
            f"the source has no op {name!r}; it has {', '.join(names)}"
            if names
            else "the source registers no op. Expected C++ text with TWINOP_UNARY, TWINOP_ELEMENTWISE, "
            "TWINOP_ROWWISE or TWINOP_OP, as in a header that `twinop new mish` makes"
        )
    domain = domain or name
    options = Options(archs or os.environ.get("TWINOP_CUDA_ARCHS", "native"), cpu, debug)
    library = _library(source, name, domain, options)
    from twinop import torch_op  # behind a compiler's errors, because torch takes seconds to import

    ops = torch_op.load(library, f"{domain.replace('.', '_')}_{library.parents[1].name[:12]}")
    _set_body(name, domain, body, defaults)
    return CompiledOp(name, ops, library)


@cache
def _library(source: str, name: str, domain: str, options: Options) -> Path:
    folder = cache_folder() / "sources" / digest(source, name, domain, asdict(options))
    write(folder / f"{name}.h", source.encode())
    project = find_project([folder / f"{name}.h"], name, domain)
    return build(project, folder / "build" / f"lib{name}.so", options).library.path


_FROM_HERE: set[str] = set()
"""The ops whose bodies came from here, by `OpSpec.key`."""


def _set_body(
    name: str, domain: str, body: Callable[..., Any] | None, defaults: Mapping[str, DefaultInput] | None
) -> None:
    """Registers the body for the exporters. Without one, takes back that of an earlier text."""
    key = key_of(domain, name)
    if body is not None:
        BODIES[key] = Body(body, dict(defaults or {}))
        _FROM_HERE.add(key)
    elif key in _FROM_HERE:
        _FROM_HERE.discard(key)
        BODIES.pop(key, None)
