"""Run one batch of joined requests; ONNX Runtime copies it to the GPU and back on the session's stream."""

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import FeedError, RunError
from ..inference_session import Session
from .errors import INVALID, OUT_OF_MEMORY, RUN_FAILED, ServiceError

_log = logging.getLogger(__name__)
_Parts = Sequence[Mapping[str, np.ndarray]]

# Messages of ONNX Runtime, its allocators, torch, cuBLAS and NumPy when memory runs out.
_NO_MEMORY = re.compile(
    r"out of memory|failed to allocate memory|bad_alloc|alloc_failed|unable to allocate|cuda failure 2:", re.I
)
_STATUS = re.compile(r"\[ONNXRuntimeError\] : \d+ : (\w+) :")  # precedes the text that RunError keeps
# A location in ONNX Runtime's source, such as "element_wise_ops.h:583 void f(int, int) ".
_INTERNALS = re.compile(r"\S+\.(?:h|cc|cu|cuh):\d+ [^\n]*?\) ")
_PATH = re.compile(r"(?<![\w.])/(?:[^\s/:'\"()]+/)+")


class Gate:
    """Admits many runs at once, or one that captures a CUDA graph, which concurrent allocations break."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._alone = 0  # exclusive runs, waiting or running

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Admit a run beside others."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Admit a run once no other runs."""
        with self._changed:
            self._alone += 1
            self._changed.wait_for(lambda: not self._running)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._alone -= 1
                self._changed.notify_all()


GATE = Gate()


# Batches of at least this size are joined in pinned memory, which the GPU reads faster. For smaller ones the
# buffer costs more than it gains. A single request is not copied at all.
PINNED_BYTES = 1 << 20


class Instance:
    """A loaded model that runs one batch at a time."""

    def __init__(self, session: Session) -> None:
        self._session: Any = session
        # Pinned memory comes from torch, which has no strings.
        strings = any(each.dtype == "str" for each in (*session.inputs.values(), *session.outputs.values()))
        self._pinned = Pinned() if session.stream is not None and not strings else None
        self._graphs = Graphs(session, self._pinned) if self._pinned and session.cuda_graph else None

    def run(self, parts: _Parts, outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """Run the requests in `parts`, joined along axis 0. All must have the same inputs.

        Returns:
            The outputs by name, in newly allocated memory.

        Raises:
            ServiceError: the inputs do not fit the model, or the run failed. The message is for clients.
        """
        with _translated():
            if self._session.device == "cpu":
                return self._session.run(self._joined(parts), outputs)
            try:
                if self._graphs is not None:
                    return self._graphs.run(parts, outputs)
                with GATE.shared():
                    return self._session.run(self._joined(parts), outputs)
            except Exception as error:
                if _NO_MEMORY.search(str(error)):
                    with GATE.shared():  # freeing memory breaks a graph capture
                        _empty_torch_cache()  # ONNX Runtime may need the memory that torch caches
                raise

    def stop_capturing(self) -> None:
        """Capture no further CUDA graphs, because a capture stops all other runs."""
        self._session.stop_capturing()
        if self._graphs is not None:
            self._graphs.captures = False

    def close(self) -> None:
        """Release the session and the buffers. The last instance of a session frees its memory."""
        self._session = self._graphs = self._pinned = None

    def _joined(self, parts: _Parts) -> Mapping[str, np.ndarray]:
        if len(parts) == 1:
            return parts[0]
        each = {name: [part[name] for part in parts] for name in parts[0]}
        if self._pinned is None:
            return {name: np.concatenate(arrays) for name, arrays in each.items()}
        return {
            name: self._pinned.joined(name, arrays)[1]
            if sum(array.nbytes for array in arrays) >= PINNED_BYTES
            else np.concatenate(arrays)
            for name, arrays in each.items()
        }


class Pinned:
    """Named buffers in pinned memory. They grow to powers of two and are kept."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._buffers: dict[str, Any] = {}

    def buffer(self, name: str, size: int) -> Any:
        """Return a buffer of `size` bytes."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            self._buffers.pop(name, None)  # free it before the next allocation: pinned memory is scarce
            buffer = self._torch.empty(
                1 << max(size - 1, 1).bit_length(), dtype=self._torch.uint8, pin_memory=True
            )
            self._buffers[name] = buffer
        return buffer[:size]

    def joined(self, name: str, arrays: Sequence[np.ndarray]) -> tuple[Any, np.ndarray]:
        """Join the arrays along axis 0. Return the buffer that holds them and a view of it."""
        first = arrays[0]
        shape = first.shape
        if len(arrays) > 1:
            shape = (sum(array.shape[0] for array in arrays), *shape[1:])
        buffer = self.buffer(name, sum(array.nbytes for array in arrays))
        view = buffer.numpy().view(first.dtype).reshape(shape)
        np.concatenate(arrays, out=view) if len(arrays) > 1 else np.copyto(view, first)
        return buffer, view


class Graphs:
    """Runs through CUDA graphs, whose inputs must be on the GPU. They pass through pinned memory."""

    def __init__(self, session: Session, pinned: Pinned) -> None:
        import torch

        self.captures = True
        self._torch = torch
        self._session = session
        self._pinned = pinned
        self._stream = session.stream
        self._device = torch.device(session.device)
        self._dtypes = {
            name: getattr(torch, spec.dtype) for name, spec in (session.inputs | session.outputs).items()
        }

    def run(self, parts: _Parts, outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """Run the requests in `parts`, joined along axis 0, and return the outputs by name."""
        torch = self._torch
        gate = GATE.alone() if self.captures else GATE.shared()
        # The session's stream is the current one, so no other stream has to be awaited.
        with gate, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                feeds = {name: self._send(name, [part[name] for part in parts]) for name in parts[0]}
                found = self._session.run(feeds, outputs)
                views = {name: self._fetch(name, tensor) for name, tensor in found.items()}
                self._stream.synchronize()
            except Exception:
                with contextlib.suppress(Exception):  # copies from or to the buffers may be pending
                    self._stream.synchronize()
                raise
        return {name: view.copy() for name, view in views.items()}

    def _send(self, name: str, arrays: Sequence[np.ndarray]) -> Any:
        """Return the arrays as one tensor on the GPU; the copy is queued on the stream."""
        staged, view = self._pinned.joined(f"in {name}", arrays)
        tensor = self._torch.empty(view.shape, dtype=self._dtypes[name], device=self._device)
        tensor.reshape(-1).view(self._torch.uint8).copy_(staged, non_blocking=True)
        return tensor

    def _fetch(self, name: str, tensor: Any) -> np.ndarray:
        """Queue a copy of the tensor; return a view of the buffer, valid once the stream is synchronized."""
        dtype = self._session.outputs[name].numpy_dtype
        shape = tuple(tensor.shape)
        if not tensor.numel():
            return np.empty(shape, dtype)
        staged = self._pinned.buffer(f"out {name}", tensor.nbytes)
        staged.copy_(tensor.reshape(-1).view(self._torch.uint8), non_blocking=True)
        return staged.numpy().view(dtype).reshape(shape)


def _empty_torch_cache() -> None:
    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Convert the exceptions of a run to ServiceError."""
    try:
        yield
    except ServiceError:
        raise
    except FeedError as error:
        raise ServiceError(INVALID, str(error)) from error
    except Exception as error:
        raise _failure(error) from error


def _failure(error: Exception) -> ServiceError:
    text = str(error)
    if isinstance(error, MemoryError) or _NO_MEMORY.search(text):
        _log.warning("a run was out of memory: %s", text)
        return ServiceError(
            OUT_OF_MEMORY, "not enough memory for this request: send fewer rows or smaller tensors"
        )
    status = _STATUS.search(str(error.__cause__))
    if status is not None and status[1] == "INVALID_ARGUMENT":
        return ServiceError(INVALID, f"the model refuses the request: {without_paths(text)}")
    _log.error("a run failed: %s", text, exc_info=error)
    if isinstance(error, RunError):
        return ServiceError(RUN_FAILED, f"the run failed: {without_paths(text)}")
    return ServiceError(RUN_FAILED, "the run failed; the server's log says why")


def without_paths(text: str) -> str:
    """Return the text for clients, with each path reduced to its file name."""
    return _PATH.sub("", _INTERNALS.sub("", text)).strip()
