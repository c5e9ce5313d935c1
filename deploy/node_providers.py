"""Reads from ONNX Runtime's profile which provider ran each node, and how long it took."""

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SUFFIX = "_kernel_time"


@dataclass(frozen=True)
class NodeRun:
    """The runs of one node. `node` is ONNX Runtime's name for it; unnamed nodes are named after their op."""

    node: str
    op_type: str
    provider: str
    runs: int
    microseconds: float


class Profile:
    """Enables profiling in session options. The files are deleted with this object.

    Args:
        custom: the types of the custom nodes.
    """

    def __init__(self, options: Any, custom: Iterable[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="twinop-profile-")
        self._custom = frozenset(custom)
        self._runs: list[NodeRun] | None = None
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(self._folder.name) / "ort")

    def read(self, session: Any, custom_only: bool) -> list[NodeRun]:
        """Returns the nodes that have run. The first call ends the recording."""
        if self._runs is None:
            self._runs = parse_profile(Path(session.end_profiling()).read_text())
        return [run for run in self._runs if not custom_only or run.op_type in self._custom]


def parse_profile(text: str) -> list[NodeRun]:
    """Returns the nodes of a profile in the order of their first run, once for each provider."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for event in json.loads(text):
        arguments = event.get("args", {})
        if event.get("cat") == "Node" and event["name"].endswith(_SUFFIX) and "provider" in arguments:
            key = (event["name"].removesuffix(_SUFFIX), arguments["op_name"], arguments["provider"])
            found.setdefault(key, []).append(event["dur"])
    return [NodeRun(*key, runs=len(times), microseconds=float(sum(times))) for key, times in found.items()]
