"""`twinop tune`."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cli.console import clear_errors, err, out, print_note
from ..errors import BuildError
from ..libraries.kernel_op import KernelOp
from .tuning import Entry, Tuning, tuning_file

_SIZES = (256, 1024, 4096)
_ELEMENTS = (2**12, 2**16, 2**20, 2**24)


def tune(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(help="Python files with ops, or a project's folder. Default: the current folder."),
    ] = None,
    sizes: Annotated[
        str,
        typer.Option(
            help="The sizes that `samples(dtype, size)` of an op gets; without it, the numbers of elements. "
            f"Default: {', '.join(map(str, _SIZES))}; for elements 2^12, 2^16, 2^20, 2^24.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Measure the configurations of autotuned Triton kernels on this GPU, for builds.

    For every op of a file, every dtype and every size, Triton measures the configurations of
    `triton.autotune`. The best ones go to a file beside the source, mish.tune.json for mish.py, which
    `twinop build` reads. What it says of other GPUs stays.

    A size between two that were measured takes the configuration of the nearer one, by ratio. On a GPU that
    was not measured, a kernel takes its first configuration.

    Examples:

        twinop tune mish.py

        twinop tune matmul.py --sizes 128,512,2048,8192
    """
    with clear_errors():
        from ..building.project import find_project
        from .compile import check_triton

        wanted = _numbers(sizes)
        files = find_project(sources or ()).modules
        if not files:
            raise BuildError("no Python file declares an op with kernels, so there is nothing to tune")
        check_triton()
        arch = _architecture()
        for file in files:
            _tune(file, wanted, arch)


def _numbers(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise BuildError(f"--sizes {text}: expected positive numbers, such as 256,1024,4096")
    return sizes


def _architecture() -> int:
    import torch

    if not torch.cuda.is_available():
        raise BuildError(
            "`twinop tune` measures on an NVIDIA GPU, and torch finds none here. Without a tuning file, a "
            "build takes the first configuration of each kernel"
        )
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _tune(file: Path, sizes: Sequence[int], arch: int) -> None:
    from rich.progress import track

    from .build import declared_in

    target = tuning_file(file)
    tuning = Tuning.read(target)
    notes: dict[str, None] = {}  # without repetitions
    calls = [
        (op, dtypes, size)
        for op in declared_in(file)
        for dtypes in op.record.combinations
        for size in sizes or (_ELEMENTS if op.samples is None else _SIZES)
    ]
    with tuning.recording(arch) as measured:
        for op, dtypes, size in track(
            calls, f"measuring {file.name}", console=err, transient=True, disable=not err.is_terminal
        ):
            try:
                for inputs, attributes in _calls(op, dtypes, size):
                    op.launch(inputs, attributes)
            except Exception as error:  # of the user's launcher, for one of the sizes
                notes[f"{op.name}, size {size}: left out: {type(error).__name__}: {error}"] = None
    for note in notes:
        print_note(note)
    if not measured:
        raise BuildError(
            f"{file}: no kernel with @triton.autotune was launched, so there is nothing to tune"
            + (". The notes say which calls failed" if notes else "")
        )
    tuning.write(target)
    _show(measured)
    out.print(f"{target}: {len(tuning.entries)} entries; `twinop build` reads it", soft_wrap=True)


def _calls(op: KernelOp, dtypes: Mapping[str, str], size: int) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Yields the inputs, on the GPU, and the attributes of calls."""
    from ..testing.samples import make_sample, torch_dtype

    calls = op.calls(dtypes[op.record.inputs[0].name], size)
    if calls is None:
        calls = [dict(make_sample(op.record, dtypes, (size,), tame=True).inputs)]
    for call in calls:
        given = [(call.pop(entry.name, None), torch_dtype(dtypes[entry.name])) for entry in op.record.inputs]
        yield [None if tensor is None else tensor.to("cuda", dtype) for tensor, dtype in given], call


def _show(measured: Sequence[tuple[Entry, float | None]]) -> None:
    from rich.table import Table

    table = Table("kernel", "dtype", "size", "best configuration")
    table.add_column("gain over the first", justify="right")
    for entry, gain in measured:
        table.add_row(
            entry.kernel,
            entry.dtypes[0].removeprefix("torch.") if entry.dtypes else "",
            ", ".join(f"{name}={value}" for name, value in entry.key.items()),
            ", ".join(f"{name}={value}" for name, value in entry.config.items() if value is not None),
            "" if gain is None else f"{gain:.2f}",
        )
    out.print(table)
