"""Run one batch of joined requests, and turn the errors of a run into messages for clients."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import cuda
from ..errors import RunError
from ..inference_session import Session
from .errors import BROKEN, INVALID, OUT_OF_MEMORY, RUN_FAILED, ServiceError

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

    def close(self) -> None:
        """Release the session. The last instance of a session frees its memory."""
        self.session = None


def _failure(error: Exception, device: str) -> ServiceError:
    text = str(error)
    # Only the driver knows: the text has names that the model's author chose.
    fatal = cuda.fatal_error(int(device.removeprefix("cuda:"))) if device != "cpu" else ""
    if fatal:
        _log.error("a run failed, and the driver answers %s: %s", fatal, text)
        return ServiceError(BROKEN, f"the GPU cannot be used any more, {fatal}: {without_paths(text)}")
    if isinstance(error, MemoryError) or _NO_MEMORY.search(text):
        _log.warning("a run was out of memory: %s", text)
        return ServiceError(
            OUT_OF_MEMORY, "not enough memory for this request: send fewer rows or smaller tensors"
        )
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
