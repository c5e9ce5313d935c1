"""The errors that twinop raises on purpose. Each says what was wrong, what was expected, and what to do."""


class TwinopError(Exception):
    """Base of all twinop errors."""


class RecordError(TwinopError):
    """An op record or one of its texts does not parse, or a call does not fit it."""


class RecordSyntaxError(RecordError):
    """A text of a record does not parse. The message shows the text with a caret under the place."""

    def __init__(self, what: str, text: str, position: int, problem: str):
        before, after = text[:position], text[position:]
        line = before.rpartition("\n")[2] + after.partition("\n")[0]
        caret = " " * len(before.rpartition("\n")[2]) + "^"
        super().__init__(f"{what}: {problem}\n  {line}\n  {caret}")


class LibraryError(TwinopError):
    """A custom-op library is missing, damaged, for another machine, or not twinop's."""


class ForeignLibraryError(LibraryError):
    """A shared library that was not built by twinop."""


class ExportError(TwinopError):
    """A model cannot be exported to ONNX, or the exported model does not fulfil the request."""


class BuildError(TwinopError):
    """An op's sources cannot be built into a library."""
