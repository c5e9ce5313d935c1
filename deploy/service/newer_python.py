"""What the service needs of Python 3.11. For Python 3.10, `twinop[serve]` installs packages that have it."""

import sys

if sys.version_info >= (3, 11):
    from asyncio import Runner, timeout

    import tomllib
else:
    import tomli as tomllib
    from taskgroup import Runner, timeout

__all__ = ["Runner", "timeout", "tomllib"]
