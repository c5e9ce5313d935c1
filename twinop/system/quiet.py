"""Silences what the libraries that make and optimise models log and warn of."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = (
    "torch.onnx", "torch.export", "torch.fx.experimental.symbolic_shapes", "onnxscript", "onnx_ir",
    "onnxruntime.tools.symbolic_shape_infer",
)  # fmt: skip


@contextmanager
def silent_loggers() -> Iterator[None]:
    """Silences the loggers of the packages that models are read and made with."""
    # Silent ones stay as they are: to set a level clears the cache of each logger, of which torch has 100.
    found = map(logging.getLogger, _LOGGERS)
    loggers = [logger for logger in found if logger.level != logging.CRITICAL]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Silences loggers and warnings; yields the list into which warnings go."""
    with silent_loggers(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
