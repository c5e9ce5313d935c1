"""Finds the library of a domain: in the current project, in installed packages, in twinop's own folders.

The project's libraries are those that `twinop build` or CMake built in `build/` of the current folder. A file
beside each says so: a library from elsewhere is not loaded because it lies there.

A package of ops has an entry point of the group `twinop.libraries`. Its name is the domain, its value a
module whose `library_path()` returns the library's path. The module is imported only when a model or the user
names the domain; its import registers function bodies and second derivatives.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from ..errors import LibraryError
from ..record.op_spec import DOMAIN
from .built import mark
from .declare import library_beside
from .library import library_folders, read_library

GROUP = "twinop.libraries"


@dataclass(frozen=True)
class Package:
    """An installed package with the ops of a domain. `name` and `version` are the distribution's."""

    domain: str
    name: str
    version: str
    module: str

    @property
    def requirement(self) -> str:
        """The package as pip takes it: `mish==0.1.0`."""
        return f"{self.name}=={self.version}"

    def library_path(self) -> Path:
        """Imports the package's module and returns the path of its library.

        Where something that the module imports is missing, such as Triton on a machine that only serves
        models, it is the library beside the module. LibraryError: the import fails, the module has no
        `library_path()`, or the file is missing.
        """
        what = f"package {self.name} {self.version}, which has the ops of the domain {self.domain}"
        again = f"pip install --force-reinstall {self.requirement}"
        try:
            module = importlib.import_module(self.module)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and (beside := self._library_beside()) is not None:
                return beside
            raise LibraryError(
                f"{what}: importing its module {self.module} failed: {type(error).__name__}: {error}. Fix "
                f"or reinstall it ({again}), or name the library to use"
            ) from error
        function = getattr(module, "library_path", None)
        if not callable(function):
            raise LibraryError(
                f"{what}: its module {self.module} has no function library_path(). Expected, in that module: "
                "library_path = twinop.library_beside(__file__)"
            )
        path = Path(function())
        if not path.is_file():
            raise LibraryError(f"{what}: its library {path} is missing. Install it again: {again}")
        return path

    def _library_beside(self) -> Path | None:
        try:
            spec = importlib.util.find_spec(self.module)
            return Path(library_beside(spec.origin)()) if spec is not None and spec.origin else None
        except (ImportError, LibraryError):
            return None


def package_key(domain: str) -> str:
    """Returns the key of a model's metadata that names the package of a domain, as `Package.requirement`."""
    return f"twinop.package.{domain}"


def package_of(domain: str) -> Package | None:
    """Returns the installed package with a domain's ops, not imported; LibraryError: several have it."""
    packages = set[Package]()
    for entry in entry_points(group=GROUP, name=domain):
        about = (entry.dist.name, entry.dist.version) if entry.dist is not None else (entry.module, "?")
        packages.add(Package(domain, *about, entry.module))
    if len(packages) > 1:
        names = " and ".join(sorted(f"{each.name} {each.version}" for each in packages))
        raise LibraryError(
            f"the installed packages {names} both have ops of the domain {domain}, and one process holds one "
            "library of a domain. Uninstall one of them, or name the library to use"
        )
    return next(iter(packages), None)


def project_libraries() -> list[Path]:
    """Returns the libraries that were built in `build/` of the current folder. Links are not followed."""
    found = sorted((Path.cwd() / "build").glob("lib*.so"))
    return [path for path in found if mark(path).is_file() and not path.is_symlink()]


def searched(domain: str, places: Sequence[Path]) -> str:
    """Returns places as a message lists them, and what in `build/` was skipped."""
    build = Path.cwd() / "build"
    names = [str(place) for place in places if place.parent != build]
    if domain == DOMAIN:
        return ", ".join(names)
    strange = [path.name for path in sorted(build.glob("lib*.so")) if path not in project_libraries()]
    why = f" (not {', '.join(strange)}, which twinop build did not put there)" if strange else ""
    return ", ".join([str(build) + why, *names])


def places_of(domain: str) -> list[Path]:
    """Returns where a library of a domain is looked for: files and folders.

    These are the project's libraries, that of an installed package, and those of twinop's installation.
    twinop's own domain has the last ones only. LibraryError: several packages have the domain, or one is
    broken.
    """
    if domain == DOMAIN:  # or the library of another project would be taken
        return library_folders()
    package = package_of(domain)
    packaged = [package.library_path()] if package is not None else []
    return [*project_libraries(), *packaged, *library_folders()]


def find_library_of(domain: str) -> str:
    """Returns the path of a domain's library; LibraryError: there is none, or as `places_of`."""
    places = places_of(domain)
    skipped = []
    for place in dict.fromkeys(places):
        for path in [place] if place.is_file() else sorted(place.glob("lib*.so")):
            try:
                if read_library(path).domain == domain:
                    return str(path)
            except LibraryError as error:
                skipped.append(str(error))
    passed = f" Skipped: {'; '.join(skipped)}." if skipped else ""
    raise LibraryError(
        f"no library of the domain {domain} found; searched {searched(domain, places)}.{passed} Build "
        "it (twinop build), or install the package that has it"
    )
