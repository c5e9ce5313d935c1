"""Runs examples/ray on a local cluster of two nodes, one of which is killed under load.

Prints what came of it as JSON on the last line. Run by test_ray.py, with Ray and examples/ray on PYTHONPATH.
"""

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import map_dataset
import psutil
import ray
import ray.data
import serve_model
from ray import serve
from ray.cluster_utils import Cluster

CLIENTS = 4
ROWS = 4000
NODE = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}


@contextmanager
def cluster() -> Iterator[tuple[Cluster, Any]]:
    """A cluster of two nodes, and the second of them."""
    found = Cluster(initialize_head=True, head_node_args=NODE)
    second = found.add_node(**NODE)
    ray.init(address=found.address, log_to_driver=False)
    try:
        yield found, second
    finally:
        ray.shutdown()
        found.shutdown()


def workers_of(node: Any) -> list[str]:
    """What the processes of a node call themselves, such as ray::ServeReplica:default:Model."""
    [raylet] = node.all_processes["raylet"]
    found = [each.cmdline()[0] for each in psutil.Process(raylet.process.pid).children(recursive=True)]
    return [name for name in found if name.startswith("ray::")]


def map_rows(model: str) -> dict[str, Any]:
    with cluster() as (nodes, second):
        rows = [{"number": number, "x": [float(number), -1.0, 2.0, -3.0]} for number in range(ROWS)]
        mapped = map_dataset.mapped(ray.data.from_items(rows, override_num_blocks=100), model, (2, 2))
        found: list[dict[str, Any]] = []
        killed: list[str] = []
        for batch in mapped.iter_batches(batch_size=40, prefetch_batches=0):
            found += [
                {"number": int(number), "y": y.tolist()}
                for number, y in zip(batch["number"], batch["y"], strict=True)
            ]
            if not killed:
                killed = workers_of(second)
                nodes.remove_node(second, allow_graceful=False)
        return {"killed": killed, "rows": sorted(found, key=lambda row: row["number"])}


def serve_requests(model: str, port: int) -> dict[str, Any]:
    with cluster() as (nodes, second):
        serve.start(http_options={"port": port}, proxy_location="HeadOnly")
        two = {"min_replicas": 2, "max_replicas": 4, "target_ongoing_requests": 4}
        model_on_two: Any = serve_model.Model
        serve.run(model_on_two.options(autoscaling_config=two).bind(model))
        url = f"http://127.0.0.1:{port}/"
        try:
            urllib.request.urlopen(url, b'{"z": [1]}', timeout=60)
            refusal = ""
        except urllib.error.HTTPError as error:
            refusal = f"{error.code} {error.read().decode()}"
        answers: list[list[float]] = []
        failures: list[str] = []
        stop = threading.Event()

        def client(number: int) -> None:
            count = 0
            while not stop.is_set():
                count += 1
                body = json.dumps({"x": [[number, count, -1, 2]]}).encode()
                for _ in range(50):
                    try:
                        with urllib.request.urlopen(url, body, timeout=60) as answer:
                            answers.append([number, count, *json.load(answer)["y"][0]])
                            break
                    except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
                        failures.append(str(error))
                        time.sleep(0.1)

        clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
        for each in clients:
            each.start()
        while len(answers) < 200:
            time.sleep(0.05)
        killed = workers_of(second)
        nodes.remove_node(second, allow_graceful=False)
        answered = len(answers)
        while len(answers) < answered + 200:
            time.sleep(0.05)
        stop.set()
        for each in clients:
            each.join()
        serve.shutdown()
        return {"killed": killed, "refusal": refusal, "answers": answers, "failures": failures}


if __name__ == "__main__":
    what, path, number = sys.argv[1:]
    print(json.dumps(map_rows(path) if what == "map" else serve_requests(path, int(number))))
