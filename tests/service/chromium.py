"""Drive headless Chromium over its DevTools pipe, without a driver or further packages."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


class Page:
    """A tab. `console` keeps its errors, and what the content security policy refused."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._last = 0
        self._session: str | None = None
        self.console: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call one method of the DevTools protocol."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _read(self, seconds: float = 30) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], seconds)[0]:
                raise TimeoutError(f"Chromium said nothing for {seconds} s")
            if not (part := os.read(self._from, 1 << 20)):
                raise RuntimeError("Chromium has ended")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        if message.get("method") == "Log.entryAdded":
            self.console.append(message["params"]["entry"]["text"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.console.append(str(message["params"]["exceptionDetails"]))
        return message

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    def dark(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def scripts(self, on: bool) -> None:
        self.call("Emulation.setScriptExecutionDisabled", value=not on)

    def offline(self, offline: bool) -> None:
        self.call(
            "Network.emulateNetworkConditions",
            offline=offline, latency=0, downloadThroughput=-1, uploadThroughput=-1,
        )  # fmt: skip

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("location.href != 'about:blank' && document.readyState == 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the visible text of the first matching element on one line."""
        return " ".join(self.run(f"document.querySelector({json.dumps(selector)}).innerText").split())

    def wait_for(self, script: str, seconds: float = 10) -> None:
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"not within {seconds} s: {script}"
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        """Save the whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


def row(page: Page, name: str) -> list[str]:
    """Return the cells of a model's row in the status page's overview."""
    script = f"[...document.querySelectorAll('tbody tr')].find(e => e.innerText.includes('{name}'))"
    cells: list[str] = page.run(f"[...{script}.children].map(e => e.innerText.trim().replace(/\\s+/g, ' '))")
    return cells


@contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """Start a browser with an empty profile below `folder`. Needs PROGRAM."""
    assert PROGRAM is not None
    read, to_browser = os.pipe()
    from_browser, write = os.pipe()

    def as_3_and_4() -> None:  # where Chromium expects them
        ends = os.dup(read), os.dup(write)
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    process = subprocess.Popen(
        [PROGRAM, *_FLAGS, f"--user-data-dir={folder / 'profile'}"],
        preexec_fn=as_3_and_4, close_fds=False, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    os.close(read)
    os.close(write)
    try:
        yield Page(to_browser, from_browser)
    finally:
        os.close(to_browser)  # ends it
        os.close(from_browser)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
