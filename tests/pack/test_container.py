"""The image that `twinop pack` describes, built and run: read-only, without a network, drained by SIGTERM."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import containers
import pytest
from containers import podman
from pack_fixtures import packed_case

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
TAG = "localhost/twinop-test:1"
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [-1, 2, -3, 4]}]})

# Sends half of a request, says so, and the rest when it is told to; from outside, in the container's network.
CLIENT = f"""
import socket
body = {BODY!r}.encode()
head = "POST /v2/models/custom_relu/infer HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer secret\\r\\n"
head += "Content-Type: application/json\\r\\nConnection: close\\r\\n"
head += f"Content-Length: {{len(body)}}\\r\\n\\r\\n"
one = socket.create_connection(("127.0.0.1", 8080))
one.sendall(head.encode() + body[:10])
print("sent", flush=True)
input()
one.sendall(body[10:])
print(b"".join(iter(lambda: one.recv(65536), b"")).decode(), flush=True)
"""

FACTS = """
import importlib.util, json, os, urllib.error, urllib.request
def ours(name):
    found = importlib.util.find_spec(name)
    return found is not None and found.origin.startswith("/opt/")
def writes(path):
    try:
        open(path, "w").close()
        return True
    except OSError:
        return False
print(json.dumps({
    "user": os.getuid(), "network": os.listdir("/sys/class/net"),
    "writes": [path for path in ("/x", "/opt/twinop/x", "/mnt/models/x", "/tmp/x") if writes(path)],
    "packages": list(filter(ours, ("onnxruntime", "torch", "kserve", "pandas", "kubernetes", "pip"))),
}))
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    containers.require_tools()
    containers.build(packed_case(tmp_path_factory.mktemp("image"), "cpu"), TAG)
    return TAG


@pytest.fixture
def container(image: str) -> Iterator[str]:
    """A container that is healthy, by the image's own HEALTHCHECK."""
    started = containers.start(image, "--env", "TWINOP_TOKEN=secret")
    try:
        for _ in range(120):
            if podman("healthcheck", "run", started, check=False).strip() in ("", "healthy"):
                break
            assert podman("inspect", "--format", "{{.State.Running}}", started).strip() == "true", podman(
                "logs", started
            )
            time.sleep(0.5)
        else:
            pytest.fail(podman("logs", started))
        yield started
    finally:
        podman("rm", "--force", started)


def test_what_is_in_it(container: str) -> None:
    found = json.loads(podman("exec", container, "python", "-c", FACTS))
    assert found == {"user": 10001, "network": ["lo"], "writes": ["/tmp/x"], "packages": ["onnxruntime"]}


def test_it_serves_and_finishes_what_it_accepted(container: str) -> None:
    process = podman("inspect", "--format", "{{.State.Pid}}", container).strip()
    enter = ["nsenter", f"--net=/proc/{process}/ns/net", sys.executable, "-c", CLIENT]
    client = subprocess.Popen(enter, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None and client.stdout.readline() == "sent\n"
    podman("kill", "--signal", "TERM", container)
    answer, _ = client.communicate("\n", timeout=60)
    assert answer.startswith("HTTP/1.1 200")
    assert json.loads(answer.splitlines()[-1])["outputs"][0]["data"] == [0, 2, 0, 4]
    assert podman("wait", container).strip() == "0", podman("logs", container)
