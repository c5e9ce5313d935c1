"""What the service needs of Python 3.11. For Python 3.10, `twinop[serve]` installs packages that have it."""

import sys

if sys.version_info >= (3, 11):
    from asyncio import Runner, timeout
    from enum import StrEnum

    import tomllib
else:
    from enum import Enum

    import tomli as tomllib
    from taskgroup import Runner, timeout

    class StrEnum(str, Enum):
        """An enumeration whose members are their texts, also where they are printed."""

        __str__ = str.__str__


__all__ = ["Runner", "StrEnum", "timeout", "tomllib"]
