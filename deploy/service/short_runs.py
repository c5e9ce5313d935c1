"""Which runs are so short that handing them to a thread would take longer."""

SHORT_SECONDS = 50e-6  # a run; giving it to a thread and taking it back costs about as much
LONG_SECONDS = 10e-3  # of processor time: so long must nothing else of the server wait


class ShortRuns:
    """Of one model, by the bytes of their inputs: those are short that are no larger than one that was.

    A run on the event loop's thread that takes long nevertheless shows that the model's time does not follow
    from the size. From then on none is taken for short.
    """

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self._bytes = -1

    def include(self, size: int) -> bool:
        return size <= self._bytes

    def learn(self, size: int, seconds: float) -> None:
        """From a run in a worker thread that succeeded."""
        if self._allowed and seconds < SHORT_SECONDS:
            self._bytes = max(self._bytes, size)

    def check(self, cpu_seconds: float) -> None:
        """After a run on the event loop's thread."""
        if cpu_seconds > LONG_SECONDS:
            self._allowed, self._bytes = False, -1
