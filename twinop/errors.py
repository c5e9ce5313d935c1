"""The errors that twinop raises on purpose: what was wrong, what was expected, what to do."""


class TwinopError(Exception):
    """Base of all twinop errors."""


class RecordError(TwinopError):
    """An op record, or one of its small texts, does not parse or does not fit the call."""


class LibraryError(TwinopError):
    """A custom-op library is missing, damaged, for another machine, or not one of ours."""


class ForeignLibraryError(LibraryError):
    """A shared library that was not built by twinop."""


class ReplacedLibraryError(LibraryError):
    """A library's file was replaced after this process loaded it, and only a restart loads the new one."""


class ExportError(TwinopError):
    """A model cannot be exported to ONNX, or what was exported is not what was asked for."""
