"""The errors that twinop raises on purpose. Each says what was wrong, what was expected, and what to do."""


class TwinopError(Exception):
    """Base of all twinop errors."""


class RecordError(TwinopError):
    """An op record or one of its texts does not parse, or a call does not fit it."""


class LibraryError(TwinopError):
    """A custom-op library is missing, damaged, for another machine, or not twinop's."""


class ForeignLibraryError(LibraryError):
    """A shared library that was not built by twinop."""


class ExportError(TwinopError):
    """A model cannot be exported to ONNX, or the exported model does not fulfil the request."""


class BuildError(TwinopError):
    """An op's sources cannot be built into a library."""
