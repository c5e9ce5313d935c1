"""The repository without a server: models load beside each other, and are freed on a thread."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from service_models import place, relu

from twinop.deploy.service import repository
from twinop.deploy.service.errors import NOT_FOUND, ServiceError
from twinop.deploy.service.repository import Repository
from twinop.deploy.service.settings import Control, ModelSettings, ServerSettings, Settings
from twinop.deploy.service.version import LoadedModel

EXPLICIT = Settings(server=ServerSettings(control=Control.EXPLICIT), model=ModelSettings(provider="cpu"))


def test_with_explicit_control_a_folder_may_be_empty_at_first(tmp_path: Path) -> None:
    async def test() -> None:
        models = Repository(tmp_path, EXPLICIT)
        await models.load_all()
        assert not models.why_not_ready() and await models.index() == []
        with pytest.raises(ServiceError) as caught:
            await models.load_by_request("m")
        assert caught.value.failure is NOT_FOUND
        place(tmp_path.parent, "outside", relu())
        for name in ("../outside", "..", ".", "", str(tmp_path.parent / "outside"), "outside\0"):
            for asked in (models.load_by_request, models.unload_by_request):
                with pytest.raises(ServiceError, match="there is no model"):
                    await asked(name)
        place(tmp_path, "m", relu())
        await models.load_by_request("m")
        assert models.find("m").loaded.version == 1
        await models.close()

    asyncio.run(test())


def test_a_load_that_takes_long_delays_no_other_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, load = threading.Event(), repository.load

    def slow(where: Any, *arguments: Any) -> LoadedModel:
        assert where.model != "long" or held.wait(60)
        return load(where, *arguments)

    monkeypatch.setattr(repository, "load", slow)

    async def test() -> None:
        models = Repository(tmp_path, EXPLICIT)
        await models.load_all()
        for name in ("long", "short"):
            place(tmp_path, name, relu())
        long = asyncio.create_task(models.load_by_request("long"))
        while not any(each["state"] == "LOADING" for each in await models.index()):
            await asyncio.sleep(0.01)
        await models.load_by_request("short")
        assert not long.done() and list(models.models) == ["short"]
        held.set()
        await long
        await models.close()

    asyncio.run(asyncio.wait_for(test(), 120))


def test_sessions_are_freed_on_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, close = [], LoadedModel.close

    def noted(self: LoadedModel) -> None:
        threads.append(threading.get_ident())
        close(self)

    monkeypatch.setattr(LoadedModel, "close", noted)
    place(tmp_path, "m", relu())

    async def test() -> None:
        models = Repository(tmp_path, EXPLICIT)
        await models.load_all()
        await models.unload_by_request("m")
        await models.close()

    asyncio.run(test())
    assert len(threads) == 1 and threads[0] != threading.get_ident()
