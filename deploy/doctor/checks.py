"""All checks of `twinop doctor`."""

from . import library_checks as library
from . import machine_checks as machine
from .facts import Environment
from .finding import Finding

_CHECKS = (
    machine.check_driver,
    machine.check_compilers,
    machine.check_gcc_and_nvcc,
    machine.check_torch,
    machine.check_runtime,
    machine.check_providers,
    library.check_packages,
    library.check_libraries,
    library.check_model,
    library.check_opsets,
    library.check_nodes,
)


def check(environment: Environment) -> list[Finding]:
    """Returns the findings of all checks."""
    return [finding for each in _CHECKS for finding in each(environment)]
