"""Find runs that take less time than handing them to a thread."""

SHORT_SECONDS = 50e-6  # about the cost of handing a run to a thread and back
LONG_SECONDS = 10e-3  # of processor time; a longer run must not block the event loop


class ShortRuns:
    """Classifies one model's runs by input bytes: a run is short if it is no larger than a past short run.

    If a run on the event loop's thread turns out long, the model's run time does not depend on the size
    alone, and no further run counts as short.
    """

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self._bytes = -1

    def include(self, size: int) -> bool:
        """Return whether a run with inputs of `size` bytes is short."""
        return size <= self._bytes

    def learn(self, size: int, seconds: float) -> None:
        """Learn from a successful run in a worker thread."""
        if self._allowed and seconds < SHORT_SECONDS:
            self._bytes = max(self._bytes, size)

    def check(self, cpu_seconds: float) -> None:
        """Check the processor time of a run on the event loop's thread."""
        if cpu_seconds > LONG_SECONDS:
            self._allowed, self._bytes = False, -1
