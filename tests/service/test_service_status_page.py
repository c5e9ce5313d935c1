"""The status page in headless Chromium: its content, updates, narrow screens, and the dark scheme."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from chromium import PROGRAM, Page, chromium, row
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from twinop.deploy.service.errors import INVALID, OVERLOADED
from twinop.deploy.service.metrics import ModelMetrics
from twinop.deploy.service.request import Result
from twinop.deploy.service.status import ServerStatus, VersionStatus, response

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="needs Chromium: apt-get install --no-install-recommends chromium"
)

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\"'{{7*7}}"


class Stage:
    """A page of invented models that a test can change."""

    def __init__(self) -> None:
        self.server = ServerStatus(
            version="0.1.0", state="ready", started=time.time() - 11_700, control="poll"
        )
        self.versions: list[VersionStatus] = []
        self.url = ""

    async def answer(self, request: HttpRequest) -> Response:
        return response(self.server, self.versions)


@pytest.fixture(scope="module")
def server() -> Iterator[Stage]:
    stage = Stage()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        stage.url = f"http://127.0.0.1:{listening.getsockname()[1]}/status"
        app = Starlette(routes=[Route("/status", stage.answer)])
        running = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        yield stage
        running.should_exit = True
        thread.join()


@pytest.fixture
def stage(server: Stage) -> Iterator[Stage]:
    server.versions = made_up()
    yield server
    for each in server.versions:
        if each.metrics is not None:
            each.metrics.drop()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(browser: Page, stage: Stage) -> Page:
    browser.size(1280, 900)
    browser.dark(False)
    browser.scripts(True)
    browser.open("about:blank#again")
    browser.console.clear()
    browser.open(stage.url)
    return browser


def traffic(name: str, version: int, requests: int, typical: float) -> ModelMetrics:
    metrics, chance = ModelMetrics(name, version), random.Random(name)
    for _ in range(requests):
        seconds = typical * chance.lognormvariate(0, 0.25) * (5 if chance.random() < 0.02 else 1)
        metrics.started()
        metrics.answered(Result(name, version, {}, "", seconds / 4, seconds * 3 / 4), seconds)
        if chance.random() < 0.3:
            metrics.ran(chance.choice((1, 3, 4, 5)), seconds)
    return metrics


def made_up() -> list[VersionStatus]:
    classifier = traffic("classifier", 3, 41_250, 4e-4)
    for failure, times in ((INVALID, 12), (OVERLOADED, 3)):
        for _ in range(times):
            classifier.started()
            classifier.failed(failure)
    return [
        VersionStatus(
            name="classifier", version=3, state="ready", device="cuda",
            reason="CUDA works here (NVIDIA H200, driver 570)",
            custom_nodes=("CustomRelu x12", "CustomLayerNorm x4"), library="libcustom_ops.so",
            library_sha256="9f2b64c1d0aa17" + "0" * 50, difference="none",
            max_batch_size=64, preferred_batch_sizes=(16, 32), max_queue_delay_us=100, instances=2, queued=5,
            max_queue=256, load_seconds=0.84, metrics=classifier,
        ),
        VersionStatus(
            name="encoder_with_quite_a_long_name", version=12, state="ready", device="cpu",
            reason="CUDA was not asked for", body_nodes=("CustomGelu x4",),
            fallback="libcustom_ops.so was built for aarch64, this machine is x86_64",
            max_queue=256, load_seconds=2.1, metrics=traffic("encoder", 12, 700, 0.02),
        ),
        VersionStatus(
            name="fresh", version=1, state="ready", device="cpu", reason="no GPU here", max_queue=256,
            metrics=ModelMetrics("fresh", 1),
        ),
        VersionStatus(name="next", version=2, state="loading"),
        VersionStatus(
            name="broken", version=1, state="unavailable",
            message="models/broken/1/model.onnx: the model file does not parse. Export it again",
        ),
    ]  # fmt: skip


def test_overview(page: Page) -> None:
    tiles = page.text(".tiles")
    assert "Server ● ready" in tiles and "Versions 3 of 5 ready" in tiles and "Up for 3 h 15 min" in tiles
    assert "Control poll" in tiles and "Requests 41,965" in tiles
    assert row(page, "classifier")[:6] == ["classifier version 3", "● ready", "cuda", "41,265", "15", "5"]
    assert row(page, "encoder_with")[1] == "● ready fallback"
    assert row(page, "fresh")[3:9] == ["0", "0", "0", "–", "–", "–"]
    assert row(page, "next")[1] == "◐ loading"
    assert row(page, "broken")[1] == "✕ unavailable"
    assert page.console == []  # the content security policy refuses nothing


def test_details(page: Page) -> None:
    classifier = page.text("#classifier-3")
    for part in (
        "cuda CUDA works here (NVIDIA H200, driver 570)",
        "CustomRelu x12 CustomLayerNorm x4",
        "libcustom_ops.so SHA-256 9f2b64c1d0aa…",
        "Difference none between kernels and function bodies",
        "up to 64 rows a run, waits up to 100 µs for 16 or 32",
        "5 waiting of at most 256, 0 in flight",
        "invalid 12 overloaded 3",
        "in 840 ms",
        "Latency of the latest 1,000 answers",
    ):
        assert part in classifier
    assert "Custom nodes none On bodies CustomGelu x4" in page.text("#encoder_with_quite_a_long_name-12")
    fallback = page.text("#encoder_with_quite_a_long_name-12 .box")
    assert "function bodies: libcustom_ops.so was built for aarch64, this machine is x86_64" in fallback
    assert page.text("#broken-1 .box").startswith("models/broken/1/model.onnx: the model file does not parse")
    page.run("document.querySelector('tbody a[href=\"#broken-1\"]').click()")
    assert page.run("document.querySelector(':target').id") == "broken-1"


def test_draws_the_latencies(page: Page, stage: Stage) -> None:
    assert page.run("document.querySelectorAll('article svg').length") == 2  # models with requests
    drawn = page.run(
        "[...document.querySelectorAll('#classifier-3 polyline')[0].points].map(p => [p.x, p.y])"
    )
    assert len(drawn) == 80 and [drawn[0][0], drawn[-1][0]] == [0, 300]
    assert min(y for _, y in drawn) == 0 and max(y for _, y in drawn) < 80  # the slowest is at the top


def test_keeps_itself_up_to_date(page: Page, stage: Stage) -> None:
    page.run("window.mine = 1; document.querySelector('tbody a').focus(); scrollTo(0, 300)")
    metrics = stage.versions[0].metrics
    assert metrics is not None
    metrics.started()
    metrics.answered(Result("classifier", 3, {}), 4e-4)
    stage.versions[3:4] = [VersionStatus(name="next", version=2, state="ready", device="cpu")]
    page.wait_for("document.querySelector('main').innerText.includes('41,266')")
    assert row(page, "next")[1] == "● ready"
    assert page.text("#updates") == "Updates every 2 s"
    assert page.run("[window.mine, scrollY]") == [1, 300]  # the page was not reloaded
    assert page.run("document.activeElement.getAttribute('href')") == "#classifier-3"


def test_can_be_paused(page: Page, stage: Stage) -> None:
    page.run("document.querySelector('button').click()")
    assert page.text("button") == "Go on" and page.text("#updates") == "Paused"
    stage.versions = []
    time.sleep(2.5)
    assert "classifier" in page.text("main")
    page.run("document.querySelector('button').click()")
    page.wait_for("document.querySelector('main').innerText.includes('No models yet')")


def test_says_when_the_server_is_gone(page: Page) -> None:
    page.offline(True)
    try:
        page.wait_for("document.getElementById('updates').innerText.includes('does not answer')")
        assert "classifier" in page.text("main")
    finally:
        page.offline(False)
    page.wait_for("document.getElementById('updates').innerText == 'Updates every 2 s'")


def test_works_without_scripts(page: Page, stage: Stage) -> None:
    page.scripts(False)
    page.open(stage.url)
    assert "classifier" in page.text("main")
    assert page.text("noscript a") == "Read again"
    assert page.run("document.querySelector('noscript a').href") == stage.url
    assert page.run("document.getElementById('pause').hidden") is True


def test_is_a_table_to_a_screen_reader(page: Page) -> None:
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = [node.get("role", {}).get("value") for node in nodes]
    names = {node.get("name", {}).get("value") for node in nodes if node["role"]["value"] == "table"}
    assert names == {"Models"}
    assert roles.count("columnheader") == 10 and roles.count("rowheader") == 5
    assert roles.count("main") == 1 and roles.count("banner") == 1
    labels = [node["name"]["value"] for node in nodes if node["role"]["value"] == "image"]
    assert labels[0].startswith("Latencies of the latest 1,000 requests, from 0 to ")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_fits_and_can_be_read(page: Page, width: int, dark: bool, tmp_path: Path) -> None:
    page.size(width, 900)
    page.dark(dark)
    page.screenshot(tmp_path / f"status-{width}-{'dark' if dark else 'light'}.png")  # for inspection
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run(_WORST_CONTRAST)[0] >= 4.5  # WCAG 2.2, 1.4.3
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(", "))) < 384) == dark


_WORST_CONTRAST = """(() => {
  const rgba = text => { const v = text.match(/[\\d.]+/g).map(Number); return v.length > 3 ? v : [...v, 1]; };
  const ground = e => {  // backgrounds may let through what is behind
    if (!e) return [255, 255, 255];
    const [r, g, b, a] = rgba(getComputedStyle(e).backgroundColor);
    if (a === 1) return [r, g, b];
    const behind = ground(e.parentElement);
    return [r, g, b].map((v, i) => v * a + behind[i] * (1 - a));
  };
  const light = c => c.slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const texts = [...document.querySelectorAll('body *')].filter(e => e.offsetParent
    && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
  return texts.map(e => {
    const [a, b] = [light(rgba(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.innerText];
  }).sort((x, y) => x[0] - y[0])[0];
})()"""


def test_nothing_is_taken_for_html(page: Page, stage: Stage) -> None:
    stage.versions = [
        VersionStatus(
            name=HOSTILE, version=1, state="ready", message=HOSTILE, device=HOSTILE, reason=HOSTILE,
            custom_nodes=(HOSTILE,), body_nodes=(HOSTILE,), fallback=HOSTILE, library=HOSTILE,
            library_sha256=HOSTILE, difference=HOSTILE, metrics=ModelMetrics(HOSTILE, 1),
        )
    ]  # fmt: skip
    page.open(stage.url + "?x=" + HOSTILE.replace(" ", "%20"))
    assert page.run("document.title") == "twinop: ready"
    assert page.run("document.querySelectorAll('script, img').length") == 1  # its own script
    assert page.text("h3") == f"{HOSTILE} version 1"
    assert page.run("decodeURIComponent(document.querySelector('article').id)") == f"{HOSTILE}-1"
    assert page.run("document.documentElement.outerHTML.includes('?x=')") is False
    assert page.console == []
