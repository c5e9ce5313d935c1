"""One server for all tests of requests that change none of its settings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import service_models as models
from service_fixtures import Served, serve
from service_held import held
from service_rows import LIMIT

from twinop.deploy.tensor_specs import RIGHT_PADDED

SETTINGS = {
    "batched": "max_batch_size = 4",
    "counted": "max_batch_size = 8",
    "full": "instances = 2\nmax_queue = 1",
    "uneven": "max_batch_size = 2\nrun_timeout_seconds = 60",
}


def place_all(folder: Path) -> None:
    """Writes the models, some of them for one test alone; `broken` cannot be loaded."""
    made = {f"id_{datatype.lower()}": models.identity(datatype) for datatype in models.ELEMENTS}
    made |= {name: models.relu() for name in ("relu", "two_versions", "held", "followed", "broken")}
    made |= {name: models.relu() for name in SETTINGS} | {"uneven": models.uneven()}
    made |= {
        "two_outputs": models.two_outputs(),
        "add": models.add(),
        "expand": models.expand(),
        "padded": models.relu(metadata={RIGHT_PADDED: "x"}),
    }
    for name, model in made.items():
        models.place(folder, name, model, settings=SETTINGS.get(name))
    models.place(folder, "two_versions", models.identity("FP32"), 2, settings='versions = "all"')
    (folder / "broken/1/model.onnx").write_bytes(b"half of a model")
    (folder / "twinop.toml").write_text(f"[server]\nmax_request_bytes = {LIMIT}\n")


@pytest.fixture(scope="session")
def held_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While it exists, runs wait."""
    return tmp_path_factory.mktemp("held") / "file"


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, held_file: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    place_all(folder)
    with serve(folder, "--provider", "cpu", program=held(runs=held_file)) as server:
        yield server


@pytest.fixture(scope="session")
def stub(served: Served) -> Iterator[Any]:
    with served.stub() as found:
        yield found
