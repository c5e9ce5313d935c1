"""`twinop check`: do what `twinop serve` does before it serves a model, and end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from twinop.cli.console import Timeout, clear_errors, out
from twinop.errors import TwinopError

from .service.options import settings_of, takes_settings
from .service.settings import FILE


@takes_settings(
    Models=(
        "library", "library_sha256", "library_folders", "allow_model_libraries", "provider", "max_batch_size",
    ),
)  # fmt: skip
def main(
    models: Annotated[Path, typer.Argument(help="An .onnx file, or a folder of models.")],
    config: Annotated[Path | None, typer.Option(help=f"Default: {FILE} in the folder.")] = None,
    timeout: Timeout = 600,
    **given: Any,
) -> None:
    """Check models as twinop serve does before it serves them.

    Reads the same settings and takes the same options. For each version that
    would be served, it finds the custom-op library, compares the model's nodes
    with the library's records, opens the session, runs the model, and compares
    the kernels with the model's function bodies. Then it ends: nothing listens
    on a port. The exit code is 0 if all of them can be served, else 1, as an
    init container or a pipeline needs it.

    Examples:

        twinop check custom_relu.onnx --library build/libcustom_relu.so

        twinop check models/ --allow-model-libraries --provider cpu
    """
    with clear_errors():
        settings = settings_of(models, config, given)
        from .ort_process import SERVER, time_limit
        from .service.folders import scan

        problems = []
        for name, folder in scan(models).items():
            try:
                asked = folder.settings(settings)
                for where in folder.wanted(asked.versions).values():
                    with time_limit(timeout):
                        [summary] = SERVER.run(_load, where, asked, settings.server, settings.policy)
                    line = f"{name} version {where.version} can be served: {summary}"
                    out.print(line, soft_wrap=True)
            except TwinopError as error:
                problems.append(f"model {name}: {error}")
        if problems:
            raise TwinopError("\n".join(problems))


def _load(*version: Any) -> Iterator[str]:
    """Yields how a version would be served, in another process."""
    from .service.loading import load

    loaded = load(*version)
    yield loaded.summary()
    loaded.close()
