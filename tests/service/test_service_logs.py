"""The log: JSON lines with the fields of their request."""

import json
import re
import subprocess
import sys
import textwrap
from typing import Any


def logged(script: str, level: str = "info") -> list[dict[str, Any]]:
    """Run a script that logs, and return its log, which must consist of JSON lines only."""
    program = f"""
import logging, warnings
from twinop.deploy.service import logs
logs.configure({level!r})
log = logging.getLogger("twinop.deploy.service.test")
{textwrap.dedent(script)}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_a_line_of_json_for_each_record() -> None:
    (line,) = logged('log.info("ready on %s", "cpu", extra={"http_port": 8080, "where": [1, 2]})')
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "info",
        "logger": "twinop.deploy.service.test",
        "message": "ready on cpu",
        "http_port": 8080,
        "where": [1, 2],
    }


def test_nothing_ends_a_line_early() -> None:
    hostile = "a\nb\r\n\x1b[31m{}\u2028\x85\ud800"
    (line,) = logged(f"log.warning('%s', {hostile!r}, extra={{'path': {hostile!r}, 'other': object}})")
    assert line["message"] == line["path"] == hostile
    assert line["other"] == "<class 'object'>"


def test_a_traceback_is_a_field() -> None:
    (line,) = logged("""
        try:
            1 / 0
        except ZeroDivisionError:
            log.exception("failed")
    """)
    assert line["message"] == "failed" and line["level"] == "error"
    assert line["traceback"].startswith("Traceback (most recent call last):\n")
    assert line["traceback"].endswith("ZeroDivisionError: division by zero")


def test_requests_keep_their_fields_apart() -> None:
    lines = logged("""
        import asyncio

        async def request(number):
            logs.bind(request_id=f"r{number}")
            await asyncio.sleep(0)
            logs.bind(model="m", version=number)
            log.info("answered")

        async def main():
            await asyncio.gather(*(asyncio.create_task(request(number)) for number in range(3)))
            log.info("outside")

        asyncio.run(main())
    """)
    found = [(line.get("request_id"), line.get("model"), line.get("version")) for line in lines]
    assert found == [("r0", "m", 0), ("r1", "m", 1), ("r2", "m", 2), (None, None, None)]


def test_levels() -> None:
    names = ("twinop.a", "uvicorn.error", "grpc._cython", "somebody")
    lines = logged(f"""
        for configured in ("debug", "info", "warning", "error"):
            logs.configure(configured)
            for name in {names}:
                for level in ("debug", "info", "warning", "error"):
                    getattr(logging.getLogger(name), level)(level, extra={{"configured": configured}})
    """)
    found = [(line["configured"], line["logger"]) for line in lines]
    for configured, own, others in (("debug", 4, 4), ("info", 3, 2), ("warning", 2, 2), ("error", 1, 1)):
        counts = [found.count((configured, name)) for name in names]
        assert counts == [own, own, own, others]
