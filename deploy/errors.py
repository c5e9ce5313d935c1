"""The errors between a model file and its outputs. `LibraryError` is in twinop.errors."""

from twinop.errors import TwinopError


class ModelError(TwinopError):
    """The model file is missing or damaged, or does not fit the library."""


class ProviderError(TwinopError):
    """ONNX Runtime is missing or too old, or a requested execution provider cannot be used."""


class PackError(TwinopError):
    """An option of `twinop pack` does not fit, or the folder cannot be written."""


class FeedError(TwinopError):
    """The inputs of a run do not fit the model."""


class RunError(TwinopError):
    """ONNX Runtime or a kernel refused a model or a run; the message is theirs.

    Attributes:
        code: ONNX Runtime's name of its status, such as "NotImplemented", or "".
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
