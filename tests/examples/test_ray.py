"""examples/ray on a local cluster of two nodes, of which one is killed under load."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import service_models
from wheels import installed

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def drive(what: str, model: onnx.ModelProto, folder: Path) -> dict[str, Any]:
    onnx.save(model, folder / "model.onnx")
    path = [installed(ROOT / "requirements/ray.txt"), ROOT / "examples/ray"]
    env = os.environ | {"PYTHONPATH": ":".join(map(str, path)), "RAY_USAGE_STATS_ENABLED": "0"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("ray_driver.py")), what, "model.onnx", str(port)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_dataset_is_mapped_whole_though_a_node_ends(tmp_path: Path) -> None:
    found = drive("map", service_models.relu(), tmp_path)
    assert any("MapBatches" in name for name in found["killed"])
    assert found["rows"] == [{"number": number, "y": [number, 0, 2, 0]} for number in range(4000)]


def test_requests_are_answered_though_a_node_ends(tmp_path: Path) -> None:
    found = drive("serve", service_models.slow(50), tmp_path)
    assert any("ServeReplica" in name for name in found["killed"])
    assert "400" in found["refusal"] and "input missing: x (float32[N, 4]); given: z" in found["refusal"]
    assert all(given == [number, count, -1, 2] for number, count, *given in found["answers"])
    counts = {
        number: [count for each, count, *_ in found["answers"] if each == number] for number in range(4)
    }
    assert all(each == list(range(1, len(each) + 1)) for each in counts.values())  # each once, none lost
    assert len(found["failures"]) <= 4, found["failures"]  # what was on the node; the client asked again
