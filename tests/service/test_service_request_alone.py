"""A request that fails, is refused, expires or loses its client does not affect any other request."""

import threading
from collections.abc import Iterator
from functools import partial

import grpc
import pytest
from service_fixtures import Served, serve, wait_until
from service_models import place, slow
from service_rows import QUICK, ROW, call, in_flight, scaled


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    place(folder, "full", slow(rounds=3000), settings="max_queue = 1")
    place(folder, "quick", scaled(1))
    with serve(folder, *QUICK) as found:
        yield found


def test_a_full_queue_says_when_to_come_back_and_a_deadline_is_kept(served: Served) -> None:
    background = [threading.Thread(target=served.infer, args=("full", ROW)) for _ in range(2)]
    for number, thread in enumerate(background, 1):
        thread.start()
        wait_until(partial(in_flight, served, number, "full"))
    full = served.infer("full", ROW)
    assert full.status == 429 and "requests waiting" in full.error
    assert int(full.headers["retry-after"]) >= 1
    with pytest.raises(grpc.RpcError) as error:
        call(served, "full")
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.value.details() == full.error
    assert int(dict(error.value.trailing_metadata())["retry-after"]) >= 1
    assert served.metric("twinop_failures_total", model="full", reason="overloaded") == 2
    for thread in background:
        thread.join()
    late = served.infer("full", ROW, parameters={"timeout": 10_000})  # microseconds
    assert late.status == 504
    assert served.metric("twinop_failures_total", model="full", reason="deadline") == 1
    with pytest.raises(grpc.RpcError) as error:
        call(served, "full", 0.05)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
