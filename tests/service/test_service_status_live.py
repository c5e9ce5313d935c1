"""The status page of a running server in headless Chromium, after requests good and bad."""

from collections.abc import Iterator

import pytest
import service_models as models
from chromium import PROGRAM, Page, chromium, row
from service_fixtures import Served, serve, tensor, wait_until

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="needs Chromium: apt-get install --no-install-recommends chromium"
)
ROW = tensor("x", "FP32", [1, 4], [-1, 2, -3, 4])
NOT_THE_LIBRARY = f'library_sha256 = "{"0" * 64}"\nallow_fallback = true\n'


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Version 2 of `kernels` is served, its version 3 is broken; `bodies` runs without its library."""
    folder = tmp_path_factory.mktemp("models")
    models.place(folder, "kernels", models.relu(), settings="max_batch_size = 16")
    models.place(folder, "bodies", models.relu(), settings=NOT_THE_LIBRARY)
    (folder / "twinop.toml").write_text("[server]\npoll_seconds = 0.1\n")
    with serve(folder, "--provider", "cpu") as found:
        models.place(folder, "kernels", models.relu(), version=2)
        wait_until(lambda: found.ask("GET", "/v2/models/kernels/versions/2/ready").status == 200)
        (folder / "kernels" / "3").mkdir()
        (folder / "kernels" / "3" / "model.onnx").write_bytes(b"not a model")
        wait_until(lambda: found.versions().get(("kernels", 3), ("",))[0] == "unavailable")
        for _ in range(40):
            assert found.infer("kernels", ROW).status == 200
        for _ in range(7):
            assert found.infer("bodies", ROW).status == 200
        for _ in range(3):
            assert found.infer("kernels", ROW | {"shape": [2, 2]}).status == 400
        yield found


@pytest.fixture(scope="module")
def page(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("chromium")) as found:
        found.size(1280, 900)
        found.open(f"http://127.0.0.1:{served.http_port}/status")
        yield found


def test_overview(page: Page, served: Served) -> None:
    tiles = page.text(".tiles")
    assert "Server ● ready" in tiles and "Versions 2 of 3 ready" in tiles
    assert "Control poll" in tiles and "Requests 50" in tiles
    kernels = row(page, "kernels")
    assert kernels[:7] == ["kernels version 2", "● ready", "cpu", "43", "3", "0", "1.0"]
    assert all(cell.endswith(("µs", "ms")) for cell in kernels[7:9])  # p50, p99
    assert row(page, "bodies")[:5] == ["bodies version 1", "● ready fallback", "cpu", "7", "0"]
    assert page.run("document.querySelectorAll('tbody tr').length") == 3
    assert page.console == []  # the content security policy refuses nothing


def test_details(page: Page, served: Served) -> None:
    told = served.ask("GET", "/v2/models/kernels").json["parameters"]
    kernels = page.text("#kernels-2")
    for part in (
        "Custom nodes CustomRelu x1",
        f"{told['library']} SHA-256 {told['library_sha256'][:12]}…",
        "Difference none between kernels and function bodies",
        "up to 16 rows a run",
        "0 waiting of at most 256, 0 in flight",
        "invalid 3",
        "Latency of the latest 40 answers",
    ):
        assert part in kernels
    assert page.run("document.querySelectorAll('#kernels-2 svg polyline').length") >= 1
    bodies = page.text("#bodies-1")
    assert "Custom nodes none On bodies CustomRelu x1" in bodies
    assert "its SHA-256 is" in page.text("#bodies-1 .box") and str(served.root) not in bodies
    assert "not a complete ONNX model" in page.text("#kernels-3 .box")


def test_follows_the_server(page: Page, served: Served) -> None:
    before = row(page, "bodies")[3]
    assert served.infer("bodies", ROW).status == 200
    page.wait_for("document.querySelector('.tiles').innerText.replace(/\\s+/g, ' ').includes('Requests 51')")
    assert (before, row(page, "bodies")[3]) == ("7", "8")
    assert page.text("#updates") == "Updates every 2 s"
