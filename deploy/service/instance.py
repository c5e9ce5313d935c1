"""A loaded model, which runs one batch of joined requests; a run's errors as messages for clients."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import cuda
from ..errors import RunError
from ..inference_session import Session
from ..tensor_specs import Spec
from .datatypes import datatype_of
from .errors import BROKEN, INVALID, RUN_FAILED, ServiceError, out_of_memory
from .settings import ModelSettings

_log = logging.getLogger(__name__)
_Parts = Sequence[Mapping[str, np.ndarray]]

# Messages of ONNX Runtime, its allocators, cuBLAS and NumPy when memory runs out.
_NO_MEMORY = re.compile(
    r"out of memory|failed to allocate memory|bad_alloc|alloc_failed|unable to allocate|cuda failure 2:", re.I
)
# A location in ONNX Runtime's source, such as "element_wise_ops.h:583 void f(int, int) ".
_INTERNALS = re.compile(r"\S+\.(?:h|cc|cu|cuh):\d+ [^\n]*?\) ")
_PATH = re.compile(r"(?<![\w.])/(?:[^\s/:'\"()]+/)+")


class Instance:
    """A loaded model that runs one batch at a time."""

    def __init__(self, session: Session) -> None:
        import onnxruntime

        self.session: Any = session
        self._options = onnxruntime.RunOptions()

    def run(self, parts: _Parts, outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """Run checked requests, joined along axis 0, whose inputs are the same; errors are for clients."""
        try:
            inputs = parts[0]
            if len(parts) > 1:
                inputs = {name: np.concatenate([part[name] for part in parts]) for name in inputs}
            return self.session.run_checked(inputs, list(outputs), self._options)
        except Exception as error:
            raise _failure(error, self.session.device) from error

    def terminate(self, now: bool = True) -> None:
        """Let the current run and all further ones fail, until `now` is False. Any thread may call it."""
        self._options.terminate = now


@dataclass
class LoadedModel:
    """A version that is ready to run."""

    name: str
    version: int
    settings: ModelSettings
    session: Any  # the first one, until `close`; its inputs are those that clients may send
    instances: list[Instance]
    custom_nodes: list[str]  # the ops that the libraries' kernels run, such as "CustomRelu x3"
    difference: str | None = None  # of kernels and function bodies in the first run; None: not compared
    load_seconds: float = 0.0
    rows_independent: bool = True  # each row of the outputs depends on the same row of the inputs alone
    may_run_on_loop: bool = False  # short runs: no library's code, no loop of a request's length

    def summary(self) -> str:
        """Return what runs the model, and what was checked of it, in a line."""
        parts = [f"runs on {self.session.device} ({self.session.reason})"]
        if self.session.libraries:
            paths = ", ".join(str(library.path) for library in self.session.libraries)
            parts.append(f"{', '.join(self.custom_nodes)} from {paths}")
            parts.append(f"SHA-256 {', '.join(self.session.checksums)}")
            parts.append(f"difference from the function bodies: {self.difference or 'not compared'}")
        return "; ".join(parts)

    def describe(self) -> dict[str, Any]:
        """Return the inputs and outputs as the protocol lists them, and `parameters`: how the model runs."""
        parameters: dict[str, str | int | float] = {
            "device": self.session.device,
            "device_reason": without_paths(self.session.reason),
            "custom_nodes": ", ".join(self.custom_nodes),
            "difference_from_function_bodies": self.difference or "",
            "max_batch_size": self.settings.max_batch_size,
            "instances": self.settings.instances,
            "load_seconds": round(self.load_seconds, 3),
        }
        if libraries := self.session.libraries:
            parameters["library"] = ", ".join(library.path.name for library in libraries)
            parameters["library_version"] = ", ".join(library.version for library in libraries)
            parameters["library_sha256"] = ", ".join(self.session.checksums)
        return {
            "inputs": [_described(spec) for spec in self.session.inputs.values()],
            "outputs": [_described(spec) for spec in self.session.outputs.values()],
            "parameters": parameters,
        }

    def close(self) -> None:
        """Free the sessions. ONNX Runtime writes its profiles."""
        self.session = None
        for instance in self.instances:  # the last one of a session frees its memory
            instance.session = None


def _described(spec: Spec) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else -1 for size in spec.shape or (-1,)]
    return {
        "name": spec.name,
        "datatype": datatype_of(spec.numpy_dtype),
        "shape": shape if spec.shape != () else [],
    }


def _failure(error: Exception, device: str) -> ServiceError:
    text = str(error)
    # Only the driver knows: the text has names that the model's author chose.
    fatal = cuda.fatal_error(int(device.removeprefix("cuda:"))) if device != "cpu" else ""
    if fatal:
        _log.error("a run failed, and the driver answers %s: %s", fatal, text)
        return ServiceError(BROKEN, f"the GPU cannot be used any more, {fatal}: {without_paths(text)}")
    if isinstance(error, MemoryError) or _NO_MEMORY.search(text):
        _log.warning("a run was out of memory: %s", text)
        return out_of_memory()
    if isinstance(error, RunError) and error.code == "InvalidArgument":
        return ServiceError(INVALID, f"the model refuses the request: {without_paths(text)}")
    _log.error("a run failed: %s", text, exc_info=error)
    if isinstance(error, RunError):
        return ServiceError(RUN_FAILED, f"the run failed: {without_paths(text)}")
    return ServiceError(RUN_FAILED, "the run failed; the server's log says why")


def without_paths(text: str) -> str:
    """Return the text for clients: paths are reduced to file names, and what is not UTF-8 is escaped."""
    shown = _PATH.sub("", _INTERNALS.sub("", text)).strip()
    return shown.encode(errors="backslashreplace").decode()
