"""examples/ray on this machine: a request to the deployment, and a dataset with the model's outputs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import service_models
from service_fixtures import free_ports
from wheels import installed

ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import json, sys, urllib.error, urllib.request
import map_dataset, ray, ray.data, serve_model
from ray import serve

model, port = sys.argv[1:]
ray.init(num_cpus=4, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
rows = [{"number": number, "x": [float(number), -1.0, 2.0, -3.0]} for number in range(400)]
mapped = map_dataset.mapped(ray.data.from_items(rows), model, (1, 2)).take_all()
found = {int(row["number"]): row["y"].tolist() for row in mapped}

serve.start(http_options={"port": int(port)})
serve.run(serve_model.app({"model": model}))

def ask(given):
    data = json.dumps(given).encode()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", data, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"

print(json.dumps({"rows": found, "answer": ask({"x": [[-1, 2, -3, 4]]}), "refusal": ask({"z": [1]})}))
serve.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_examples_run(tmp_path: Path) -> None:
    onnx.save(service_models.relu(), tmp_path / "model.onnx")
    path = [installed(ROOT / "requirements/ray.txt"), ROOT / "examples/ray"]
    env = os.environ | {"PYTHONPATH": ":".join(map(str, path)), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", DRIVER, "model.onnx", str(free_ports(1)[0])]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("{")]  # Ray prints, too
    found = json.loads(line)
    assert found["rows"] == {str(number): [number, 0, 2, 0] for number in range(400)}
    assert found["answer"] == {"y": [[0, 2, 0, 4]]}
    assert found["refusal"].startswith("400") and "the model has no input 'z'" in found["refusal"]
