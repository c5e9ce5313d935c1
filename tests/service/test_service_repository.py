"""The repository without a server: models load beside each other."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from service_models import place, relu

from twinop.deploy.service import repository
from twinop.deploy.service.instance import LoadedModel
from twinop.deploy.service.repository import Repository
from twinop.deploy.service.settings import Settings

SETTINGS = Settings(server={"poll_seconds": 0.01}, model={"provider": "cpu"})


def test_a_load_that_takes_long_delays_no_other_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, load = threading.Event(), repository.load

    def slow(where: Any, *arguments: Any) -> LoadedModel:
        assert where.model != "long" or held.wait(60)
        return load(where, *arguments)

    monkeypatch.setattr(repository, "load", slow)
    monkeypatch.setattr(repository, "PATIENCE_SECONDS", 0.01)

    async def test() -> None:
        models = Repository(tmp_path, SETTINGS)
        for name in ("long", "short"):
            place(tmp_path, name, relu())
        loading = asyncio.create_task(models.load_all())
        while "short" not in models.models:
            await asyncio.sleep(0.01)
        states = {each["name"]: each["state"] for each in models.index()}
        assert states == {"long": "LOADING", "short": "READY"} and models.why_not_ready()
        held.set()
        await loading
        await models.close()

    asyncio.run(asyncio.wait_for(test(), 120))
