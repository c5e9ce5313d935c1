"""Which provider ran each node, read from ONNX Runtime's own profile."""

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SUFFIX = "_kernel_time"


@dataclass(frozen=True)
class NodeRun:
    """One node's runs. `node` is ONNX Runtime's name for it: an unnamed node is called after its op."""

    node: str
    op_type: str
    provider: str
    runs: int
    microseconds: float


@dataclass(frozen=True)
class Cost:
    """What all nodes of one type took on one provider. `share` is of the time of all nodes given."""

    op_type: str
    provider: str
    nodes: int
    runs: int
    microseconds: float
    share: float


class Profile:
    """Switches profiling on in session options; the files lie in a folder that goes with this object."""

    def __init__(self, options: Any, custom: Iterable[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="twinop-profile-")
        self._custom = frozenset(custom)
        self._runs: list[NodeRun] | None = None
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(self._folder.name) / "ort")

    def read(self, session: Any, custom_only: bool) -> list[NodeRun]:
        """What ran until now; the first call ends the recording."""
        if self._runs is None:
            self._runs = parse_profile(Path(session.end_profiling()).read_text())
        return [run for run in self._runs if not custom_only or run.op_type in self._custom]


def parse_profile(text: str) -> list[NodeRun]:
    """The nodes of a profile, in the order of their first run; a node may have run on several providers."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for event in json.loads(text):
        arguments = event.get("args", {})
        if event.get("cat") == "Node" and event["name"].endswith(_SUFFIX) and "provider" in arguments:
            key = (event["name"].removesuffix(_SUFFIX), arguments["op_name"], arguments["provider"])
            found.setdefault(key, []).append(event["dur"])
    return [NodeRun(*key, runs=len(times), microseconds=float(sum(times))) for key, times in found.items()]


def costs(nodes: Iterable[NodeRun]) -> list[Cost]:
    """The time by op type, dearest first. On CUDA it is the host's: a node's kernel runs on behind it."""
    groups: dict[tuple[str, str], list[NodeRun]] = {}
    for node in nodes:
        groups.setdefault((node.op_type, node.provider), []).append(node)
    whole = sum(node.microseconds for group in groups.values() for node in group)
    found = []
    for (op_type, provider), group in groups.items():
        time = sum(node.microseconds for node in group)
        share = time / whole if whole else 0.0
        found.append(Cost(op_type, provider, len(group), sum(node.runs for node in group), time, share))
    return sorted(found, key=lambda cost: -cost.microseconds)
