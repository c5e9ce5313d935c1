"""Hatchling's build hook `twinop`: a wheel with an op's library and its Python file.

    [tool.hatch.build.targets.wheel.hooks.twinop]
    archs = "all"     # optional: the CUDA architectures, as `twinop build --archs`

The wheel of a project has a package of its name: the project's Python file and, beside it, the library.
"""

import os
import platform
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.plugin import hookimpl

from twinop.errors import BuildError

from .builder import build
from .project import Options, find_project


class TwinopBuildHook(BuildHookInterface):
    """Builds the library before Hatchling packs the wheel."""

    PLUGIN_NAME = "twinop"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds the library, and says what belongs to the wheel, and its platform; or raises BuildError."""
        if self.target_name != "wheel" or version == "editable":
            return
        root = Path(self.root)
        project = find_project([root])
        module = root / f"{project.name}.py"
        if not module.is_file():
            raise BuildError(
                f"{module}: no such file. The wheel of {project.name} has it as its Python package"
            )
        archs = self.config.get("archs") or os.environ.get("TWINOP_CUDA_ARCHS", "native")
        built = build(project, root / "build" / f"lib{project.name}.so", Options(archs=archs))
        build_data["force_include"] |= {
            str(module): f"{project.name}/__init__.py",
            str(built.library.path): f"{project.name}/{built.library.path.name}",
        }
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"


@hookimpl
def hatch_register_build_hook() -> type[TwinopBuildHook]:
    """Tells Hatchling of the hook."""
    return TwinopBuildHook
