"""Calls ops whose kernels were compiled ahead as an adapter does, on addresses without memory.

The functions run in a process of their own, which finds the stand-in for the CUDA driver.
"""

import ctypes
import json
import math
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from abi_structures import SET, Attribute, Call, Context, Error, Tensor, read_table

CREATE = ctypes.CFUNCTYPE(c_int32, POINTER(Call), POINTER(c_void_p), POINTER(Error))
SCRATCH = ctypes.CFUNCTYPE(c_int32, POINTER(Call), POINTER(c_int64), POINTER(Error))
BODY = ctypes.CFUNCTYPE(c_int32, POINTER(Call), POINTER(c_void_p), POINTER(c_size_t), POINTER(Error))

CODES = {"float32": 1, "float16": 2, "int32": 7}
SCRATCH_ADDRESS = 1 << 40


@dataclass(frozen=True)
class At:
    """A tensor by its address."""

    shape: tuple[int, ...]
    address: int = 1 << 20
    dtype: str = "float32"


@dataclass(frozen=True)
class Request:
    inputs: Sequence[At | None]
    outputs: Sequence[At] = (At((1,), 1 << 30),)
    attributes: Sequence[Any] = ()
    device: int = 0
    stream: int = 77


@dataclass
class Outcome:
    """What a call gave: `error` is the text of its failure."""

    error: str = ""
    scratch: int = 0
    log: list[dict[str, Any]] = field(default_factory=list)

    @property
    def launches(self) -> list[dict[str, Any]]:
        return [entry for entry in self.log if entry["call"] == "launch"]

    def entries(self, call: str) -> list[dict[str, Any]]:
        return [entry for entry in self.log if entry["call"] == call]


def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.stand_in_text.restype = ctypes.c_char_p
    return driver


def _log() -> list[dict[str, Any]]:
    return [json.loads(line) for line in _driver().stand_in_text().splitlines()]


def _tensor(at: At | None) -> Tensor:
    if at is None:
        return Tensor(None, None, None, 0, 0, 0, 0)
    sizes = (c_int64 * len(at.shape))(*at.shape)
    return Tensor(at.address, sizes, None, math.prod(at.shape), len(at.shape), CODES[at.dtype], 1)


def _attribute(value: Any) -> Attribute:
    if isinstance(value, str):
        return Attribute(s=value.encode(), s_size=len(value.encode()))
    return Attribute(f=value) if isinstance(value, float) else Attribute(i=value)


class Failure(Exception):
    pass


class Kernel:
    """The kernel of an op on a device."""

    def __init__(self, library: Path, op: int, device: int, dtype: str = "") -> None:
        self.op = read_table(library, 1).ops[op].contents
        self.device = device
        self.state = c_void_p()
        request = Request([], device=device)
        inputs = [Tensor(None, None, None, 0, 0, CODES[dtype] if dtype else 0, 0) for _ in range(4)]
        call = self._call(request, inputs)
        self._run(CREATE(self.op.create), call, byref(self.state))

    def _call(self, request: Request, inputs: list[Tensor] | None = None) -> Call:
        inputs = inputs or [_tensor(entry) for entry in request.inputs]
        context = Context(1, self.device, request.stream)
        return Call(
            (Tensor * len(inputs))(*inputs),
            (Tensor * len(request.outputs))(*map(_tensor, request.outputs)),
            (Attribute * max(1, len(request.attributes)))(*map(_attribute, request.attributes)),
            SCRATCH_ADDRESS,
            self.state,
            ctypes.pointer(context),
            len(inputs),
        )

    def _run(self, function: Any, call: Call, *results: Any) -> None:
        failure: list[str] = []
        error = Error(SET(lambda self, text, size: failure.append(ctypes.string_at(text, size).decode())))
        code = function(byref(call), *results, byref(error))
        assert (code != 0) == bool(failure)
        if failure:
            raise Failure(failure[0])

    def run(self, request: Request) -> Outcome:
        outcome, call = Outcome(), self._call(request)
        try:
            if self.op.scratch_size:
                scratch = c_int64()
                self._run(SCRATCH(self.op.scratch_size), call, byref(scratch))
                outcome.scratch = scratch.value
            self._run(self.op.cuda, call)
        except Failure as failure:
            outcome.error = str(failure)
        return outcome

    def body(self, request: Request) -> bytes:
        model, size = c_void_p(), c_size_t()
        self._run(BODY(self.op.body), self._call(request), byref(model), byref(size))
        return ctypes.string_at(model.value or 0, size.value)


def run(
    library: Path,
    requests: Sequence[Request],
    *,
    op: int = 0,
    capability: int = 90,
    fail: tuple[str, int] = ("", 0),
    dtype: str = "",
    current: int = 0,
) -> list[Outcome]:
    """Creates a kernel for each device of the requests and runs them.

    Args:
        capability: of device 0; device 1 has 80.
        fail: a function of the driver, and what it returns.
        dtype: that of the inputs, as far as the creation knows it.
        current: the device whose context is the current one; -1: none.
    """
    driver = _driver()
    driver.stand_in_capability(0, capability)
    driver.stand_in_context(current)
    driver.stand_in_fail(fail[0].encode(), fail[1])
    kernels: dict[int, Kernel] = {}
    outcomes = []
    _log()
    try:
        for request in requests:
            if request.device not in kernels:
                try:
                    kernels[request.device] = Kernel(library, op, request.device, dtype)
                except Failure as failure:
                    outcomes.append(Outcome(str(failure), log=_log()))
                    continue
            log = _log()
            outcome = kernels[request.device].run(request)
            outcome.log = log + _log()
            outcomes.append(outcome)
        assert driver.stand_in_current() == current
    finally:
        driver.stand_in_fail(b"", 0)
    return outcomes


def run_in_threads(library: Path, requests: Sequence[Request], threads: int) -> list[Outcome]:
    """Each thread creates a kernel and runs all requests. The first outcome has the log of all threads."""
    _log()
    results: list[list[Outcome]] = [[] for _ in range(threads)]

    def work(results: list[Outcome]) -> None:
        kernel = Kernel(library, 0, requests[0].device)
        results.extend(kernel.run(request) for request in requests)

    workers = [Thread(target=work, args=(entry,)) for entry in results]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    outcomes = [outcome for entry in results for outcome in entry]
    outcomes[0].log = _log()
    return outcomes


def creation_error(library: Path) -> str:
    """The text of the failure to create a kernel."""
    try:
        Kernel(library, 0, 0)
    except Failure as failure:
        return str(failure)
    return ""


def body(library: Path, request: Request) -> bytes:
    return Kernel(library, 0, 0).body(request)
