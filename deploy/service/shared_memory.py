"""System shared memory: tensors of local clients that lie in /dev/shm, as Triton's clients ask for it.

The files are read and written as files. A mapping would end the process if a client cut its file short.
"""

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .budget import Held
from .datatypes import Datatype, from_bytes, shown, to_bytes
from .errors import NOT_FOUND, OFF, OVERLOADED, ServiceError, invalid
from .http_body import Limit
from .request import Request, Result, off_loop
from .settings import Settings

FOLDER = Path("/dev/shm")
MOST_REGIONS = 1024


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a region, where a tensor lies."""

    region: str
    size: int
    offset: int


@dataclass(slots=True)
class Shared:
    """Which inputs and outputs of a request lie in shared memory; of the inputs also datatype and shape."""

    inputs: dict[str, tuple[Place, Datatype, list[int]]] = field(default_factory=dict)
    outputs: dict[str, Place] = field(default_factory=dict)


def place_of(where: str, parameters: Mapping[str, Any]) -> Place | None:
    """Return where the tensor with these parameters lies; None if it is part of the message.

    Raises:
        ServiceError: the size is missing, or a parameter has another type.
    """
    if "shared_memory_region" not in parameters:
        return None
    region, what = parameters["shared_memory_region"], f"{where}: parameter shared_memory_"
    if not isinstance(region, str):
        raise invalid(f"{what}region must be a region's name, not {shown(region)}")
    size = byte_count(f"{what}byte_size", parameters.get("shared_memory_byte_size"))
    return Place(region, size, byte_count(f"{what}offset", parameters.get("shared_memory_offset", 0)))


def byte_count(what: str, value: Any) -> int:
    """Return a client's number of bytes.

    Raises:
        ServiceError: it is none.
    """
    if type(value) is not int or value < 0:
        raise invalid(f"{what} must be a number of bytes, not {shown(value)}")
    return value


class _Region:
    """A registered part of a file, which stays open as long as somebody uses this object."""

    def __init__(self, name: str, caller: str, key: Any, offset: int, size: int) -> None:
        self.name, self.caller, self.key, self.offset, self.size = name, caller, key, offset, size
        file = key.removeprefix("/") if isinstance(key, str) else ""
        if file in ("", ".", "..") or "/" in file or "\0" in file:
            raise invalid(f"region {name}: key {shown(key)} must be the name of a segment, such as /mine")
        try:
            self.file = os.open(FOLDER / file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            said = f"the segment {shown(key)} cannot be opened: {error.strerror}"
            raise invalid(f"region {name}: {said}") from None
        if not stat.S_ISREG(os.fstat(self.file).st_mode):
            raise invalid(f"region {name}: {shown(key)} is not a shared memory segment")
        self.require(offset + size, "the region")

    def __del__(self) -> None:
        if hasattr(self, "file"):
            os.close(self.file)

    @property
    def is_gone(self) -> bool:
        """Whether nobody can open its file any more."""
        return os.fstat(self.file).st_nlink == 0

    def require(self, end: int, what: str = "a tensor") -> None:
        """Check that the file reaches to `end`."""
        if (has := os.fstat(self.file).st_size) < end:
            raise invalid(f"region {self.name}: {what} ends at byte {end}, but its segment has only {has}")

    def read(self, at: int, size: int) -> bytearray:
        data, done = bytearray(size), 0
        while done < size:
            self.require(at + size)
            done += os.preadv(self.file, [memoryview(data)[done:]], at + done)
        return data

    def write(self, at: int, data: memoryview) -> None:
        self.require(at + len(data))
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self.file, data[done:], at + done)
        except OSError as error:
            raise invalid(f"region {self.name} cannot be written: {error.strerror}") from None


class Regions:
    """The registered regions by name. `caller` identifies a client's connection.

    Whoever knows a region's name may use it, because a client may have several connections.
    """

    def __init__(self, settings: Settings) -> None:
        self._is_on = settings.policy.shared_memory
        self._limit = Limit(settings.server.max_request_bytes, what="request's shared memory")
        self._found: dict[str, _Region] = {}

    def register(self, name: str, caller: str, key: Any, offset: Any, size: Any) -> None:
        """Open a part of a segment. The same segment may be registered again, in place of the earlier part.

        Raises:
            ServiceError: shared memory is off, the name is taken, or there is no such segment of this size.
        """
        self._require_on()
        offset, size = byte_count('"offset"', offset), byte_count('"byte_size"', size)
        self._forget(lambda region: region.is_gone)
        if name in self._found and self._found[name].key != key:
            raise invalid(f"there is a region {name} already, with another key")
        if len(self._found) >= MOST_REGIONS:
            said = f"{MOST_REGIONS} regions are registered, and no more are kept: unregister some"
            raise ServiceError(OVERLOADED, said)
        self._found[name] = _Region(name, caller, key, offset, size)

    def unregister(self, name: str, caller: str) -> None:
        """Forget a region, if there is one; for "" those of the caller, and those whose segment is gone."""
        self._require_on()
        self._forget(lambda each: each.name == name if name else each.caller == caller or each.is_gone)

    def status(self, name: str, caller: str) -> list[dict[str, Any]]:
        """Describe a region; for "" those of the caller.

        Raises:
            ServiceError: shared memory is off, or there is no such region.
        """
        self._require_on()
        found = (
            [self._get(name)] if name else [each for each in self._found.values() if each.caller == caller]
        )
        return [
            {"name": each.name, "key": each.key, "offset": each.offset, "byte_size": each.size}
            for each in found
        ]

    async def read(self, asked: Request, shared: Shared, held: Held) -> None:
        """Add the inputs that lie in shared memory, copied, to a request. Outputs are checked as well.

        Raises:
            ServiceError: shared memory is off, a region is unknown, or a tensor does not fit.
        """
        for place in shared.outputs.values():
            self._within(place)
        total = sum(place.size for place, *_ in shared.inputs.values())
        if total > self._limit.bytes:
            raise self._limit.exceeded()
        held.take(total)
        found = {}
        for name, (place, kind, shape) in shared.inputs.items():
            region, at = self._within(place)
            data = await off_loop(place.size, region.read, at, place.size)
            found[name] = from_bytes(name, kind, shape, memoryview(data))
        asked.inputs = {**asked.inputs, **found}

    async def write(self, result: Result, shared: Shared) -> None:
        """Write the outputs that were asked for in shared memory.

        Raises:
            ServiceError: an output does not fit into its place, or the region has changed.
        """
        for name, place in shared.outputs.items():
            region, at = self._within(place)
            found = to_bytes(result.outputs[name])
            data = memoryview(found if isinstance(found, bytes) else found.reshape(-1).view(np.uint8).data)
            if len(data) > place.size:
                said = f"output {name} has {len(data)} bytes, but shared_memory_byte_size is {place.size}"
                raise invalid(said)
            await off_loop(len(data), region.write, at, data)

    def _within(self, place: Place) -> tuple[_Region, int]:
        """Return the region, and where in its file a place begins."""
        region, end = self._get(place.region), place.offset + place.size
        if end > region.size:
            raise invalid(f"region {place.region} has {region.size} bytes, but a tensor in it ends at {end}")
        return region, region.offset + place.offset

    def _get(self, name: str) -> _Region:
        self._require_on()
        if name not in self._found:
            raise ServiceError(NOT_FOUND, f"there is no region {shown(name)} of shared memory: register it")
        return self._found[name]

    def _forget(self, is_meant: Callable[[_Region], bool]) -> None:
        self._found = {name: region for name, region in self._found.items() if not is_meant(region)}

    def _require_on(self) -> None:
        if not self._is_on:
            said = "shared memory is off: the server permits it with shared_memory = true under [policy]"
            raise ServiceError(OFF, said)
