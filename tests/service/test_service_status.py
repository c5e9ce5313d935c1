"""The status page without a browser: its content, its formats, and what it asks the repository."""

import asyncio
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from twinop.deploy.service.metrics import ModelMetrics
from twinop.deploy.service.status import (
    ServerStatus,
    VersionStatus,
    count,
    moment,
    page,
    short,
    span,
    sparkline,
    status_page,
)

SERVER = ServerStatus(version="0.1.0", state="ready", started=time.time(), control="poll")


def test_the_page_escapes() -> None:
    hostile = "<b>\"'&"
    html = page(SERVER, [VersionStatus(name=hostile, version=1, state="unavailable", message=hostile)])
    assert "<b>" not in html and "&lt;b&gt;&#34;&#39;&amp;" in html


def test_the_page_holds_nothing_from_elsewhere() -> None:
    html = page(SERVER, [])
    assert not re.search(r"https?://", html)
    assert "No models yet" in html


@pytest.mark.parametrize(("number", "said"), [(None, "–"), (0, "0"), (41250, "41,250"), (3.25, "3.2")])
def test_count(number: float | None, said: str) -> None:
    assert count(number) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "–"), (0, "0 µs"), (1.23e-5, "12 µs"), (4.1e-4, "0.41 ms"), (0.0353, "35.3 ms"),
        (0.84, "840 ms"), (1.2, "1.20 s"), (75, "75.00 s"),
    ],
)  # fmt: skip
def test_short(seconds: float | None, said: str) -> None:
    assert short(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-1, "0 s"), (0, "0 s"), (42.9, "42 s"), (190, "3 min 10 s"), (3605, "1 h"),
        (18_120, "5 h 2 min"), (1_047_600, "12 d 3 h"),
    ],
)  # fmt: skip
def test_span(seconds: float, said: str) -> None:
    assert span(seconds) == said


def test_moment() -> None:
    assert moment(0) == "1970-01-01 00:00:00 UTC"


def test_sparkline() -> None:
    assert sparkline([], 10, 10) == sparkline([1], 10, 10) == ""
    assert sparkline([0, 0], 10, 10) == "0.0,10.0 10.0,10.0"
    assert sparkline([1, 4, 2], 10, 8) == "0.0,6.0 5.0,0.0 10.0,4.0"
    peak = sparkline([1.0] * 500 + [9.0] + [1.0] * 499, 100, 9, most=10)
    assert len(peak.split()) == 10 and ",0.0" in peak


ASKED = Request({"type": "http"})


class FakeRepository:
    """The part of a `repository.Repository` that the page uses."""

    draining = False
    started = 0.0
    ready = True
    settings = SimpleNamespace(server=SimpleNamespace(control="explicit"))

    def __init__(self, loaded: Any, seen: ModelMetrics) -> None:
        served = SimpleNamespace(loaded=loaded, batcher=SimpleNamespace(queued=2), metrics=seen)
        self.models = {"m": SimpleNamespace(versions={1: served})}

    async def index(self) -> list[dict[str, str]]:
        return [
            {"name": "m", "version": "1", "state": "READY", "reason": ""},
            {"name": "m", "version": "2", "state": "UNAVAILABLE", "reason": "no model.onnx"},
        ]


def test_status_page_of_a_repository() -> None:
    model = ModelMetrics("m", 1)
    settings = SimpleNamespace(
        max_batch_size=8, preferred_batch_sizes=(), max_queue_delay_us=0, max_queue=256
    )
    told = {"device_reason": "no GPU here", "fallback": "", "library": "libcustom_relu.so"}
    loaded = SimpleNamespace(
        settings=settings, device="cpu", reason="no GPU in /dev", custom_nodes=("CustomRelu x3",),
        body_nodes=(), difference=None, instances=[1, 2], load_seconds=0.5,
        describe=lambda: {"parameters": told},
    )  # fmt: skip
    repository: Any = FakeRepository(loaded, model)
    answer = asyncio.run(status_page(repository, ASKED))
    html = bytes(answer.body).decode()
    assert "libcustom_relu.so" in html and "no GPU here" in html and "/dev" not in html
    assert "up to 8 rows a run" in html and "2 waiting" in html and "no model.onnx" in html
    assert answer.headers["cache-control"] == "no-store"
    (nonce,) = set(re.findall(r"nonce-([\w-]+)", answer.headers["content-security-policy"]))
    assert html.count(f'nonce="{nonce}"') == 2
    repository.draining = True
    answer = asyncio.run(status_page(repository, ASKED))
    assert "<title>twinop: draining</title>" in bytes(answer.body).decode()
    model.drop()
