"""Raw HTTP requests to a server with a model `relu`, and checks that it still answers well."""

import json
import time

from service_fixtures import Served, receive, tensor
from service_rows import message

X = tensor("x", "FP32", [1, 4], [-1, 0, 1, 2])
BODY = json.dumps({"inputs": [X]}).encode()
REQUEST = b"POST /v2/models/relu/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n"


def answers_well(server: Served, times: int = 10) -> None:
    """Ask `relu` over HTTP and gRPC, several times on one connection each."""
    with server.connect() as connection, server.stub() as stub:
        for _ in range(times):
            connection.sendall(REQUEST)
            answer = receive(connection)
            assert answer.status == 200 and answer.json["outputs"][0]["data"] == [0, 0, 1, 2]
            found = stub.ModelInfer(message("relu", -1, 0, 1, 2), timeout=60)
            assert list(found.outputs[0].contents.fp32_contents) == [0, 0, 1, 2]


def settled(server: Served) -> None:
    """Wait until connections that another test left behind have timed out."""
    last, since = server.files, time.monotonic()
    while time.monotonic() < since + 0.3:
        time.sleep(0.05)
        if server.files != last:
            last, since = server.files, time.monotonic()
