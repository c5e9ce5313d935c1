"""Prints what a library holds."""

from rich.table import Table

from ..libraries.library import Library
from .console import out


def show_library(library: Library) -> None:
    """Prints a library's ops as a table."""
    domain = f"domain {library.domain} {library.domain_version}"
    title = f"{library.path} ({domain}, twinop {library.version}, CUDA: {library.cuda_archs})"
    out.print(title, style="italic", soft_wrap=True)
    table = Table()
    for column in ("op", "ONNX", "schema", "dtypes", "devices"):
        table.add_column(column, overflow="fold")
    for record in library.records.values():
        onnx_name = "torch only" if record.is_backward else record.onnx_name
        dtypes = "\n".join(part.strip() for part in record.dtypes.split(";"))
        table.add_row(record.name, onnx_name, record.schema, dtypes, ", ".join(record.devices))
    out.print(table)
