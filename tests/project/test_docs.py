"""Runs every block of README.md, CONTRIBUTING.md and docs/ as it stands, as a reader does after ./build.sh.

Each document is read from top to bottom in a folder that looks like the checkout; every block gets a new
shell. A server that a block starts runs until the end of the document. A block that is not run has a comment
above it, `<!-- not run: reason -->`. Blocks of `text` are output and pictures: nobody types them.

Python finds only what the page has installed above a block (`./build.sh serve`, `pip install`)
and what that needs.
"""

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
GUIDES = "adding-|from-a-"  # the blocks of these pages are parts of an op: other tests apply them
SERVERS = {
    "README.md",
    "docs/serving.md",
    "docs/existing-service.md",
    "docs/trust.md",
}  # take 10 to 40 s each
SITE = {"index.md"}  # written for an installation: test_pages.py
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    *(
        f"docs/{path.name}"
        for path in sorted((ROOT / "docs").glob("*.md"))
        if path.name not in SITE and not re.match(GUIDES, path.name)
    ),
)
_FENCE = re.compile(
    r"(?:^`(?P<file>[\w/.-]+)`:[^\n]*\n\n)?^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?"
    r"```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PORTS = (8080, 8081)


@dataclass(frozen=True)
class Block:
    place: str
    language: str
    text: str
    reason: str | None
    file: str | None

    @property
    def first_line(self) -> str:
        return self.text.splitlines()[0]

    @property
    def installed(self) -> list[str]:
        """The files of requirements/ that the page has installed above the block."""
        document, _, line = self.place.partition(":")
        above = "".join((ROOT / document).read_text().splitlines(keepends=True)[: int(line) + 1])
        named = set(re.findall(r"\./build\.sh (?:setup )?(serve|bench)\b", above))
        return ["base", "cpu", *sorted(named)]


def blocks_of(document: str) -> list[Block]:
    content = (ROOT / document).read_text()
    found = [
        Block(
            f"{document}:{content[: match.start('text')].count(chr(10))}",
            match["language"],
            match["text"],
            match["reason"],
            match["file"],
        )
        for match in _FENCE.finditer(content)
    ]
    assert 2 * len(found) == len(re.findall("^```", content, re.MULTILINE)), (
        f"{document}: a fence is not closed"
    )
    return found


SITE_CUSTOMIZE = """
import importlib.machinery, sys
class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {absent!r} else super().find_spec(name, path, target)
sys.meta_path = [Finder if each is importlib.machinery.PathFinder else each for each in sys.meta_path]
"""


packages = cache(metadata.packages_distributions)
requires = cache(metadata.requires)


def needed(requirements: list[str]) -> set[str]:
    """The distributions that pip installs for requirements, of those that are here."""
    rest, seen = [Requirement(text) for text in requirements], set[tuple[str, frozenset[str]]]()
    while rest:
        one = rest.pop()
        key = canonicalize_name(one.name), frozenset(one.extras)
        if key in seen:
            continue
        seen.add(key)
        with suppress(metadata.PackageNotFoundError):
            for text in requires(one.name) or []:
                of = Requirement(text)
                if of.marker is None or any(of.marker.evaluate({"extra": e}) for e in {"", *one.extras}):
                    rest.append(of)
    return {name for name, _ in seen}


def absent_modules(files: list[str], others: list[str]) -> list[str]:
    lines = "".join((ROOT / f"requirements/{name}.txt").read_text() for name in files).splitlines()
    asked = [line.partition("#")[0] for line in lines if re.match(r"\w", line)]
    there = needed([*asked, *others]) | {"twinop", "pip"}
    return sorted(
        module for module, of in packages().items() if not there & {canonicalize_name(name) for name in of}
    )


@dataclass
class Reader:
    """Follows a document in `folder`."""

    folder: Path
    server: subprocess.Popen[str] | None = None
    said: dict[str, str] = field(default_factory=dict)  # the output of each block, by its first line
    env: dict[str, str] = field(init=False)
    pip: list[str] = field(default_factory=list)  # what blocks have installed

    def __post_init__(self) -> None:
        for entry in ROOT.iterdir():
            if not entry.name.startswith("custom_relu.onnx"):
                (self.folder / entry.name).symlink_to(entry)
        home = self.folder / "home"
        home.mkdir()
        # .venv is not on the PATH. Spinning threads of torch would slow other tests down.
        path = "/usr/local/bin:/usr/bin:/bin"
        self.env = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", "OMP_WAIT_POLICY": "PASSIVE"}

    def prepare(self, block: Block) -> None:
        """Hides the packages that the page has not installed."""
        if block.language not in ("sh", "python"):
            return
        self.pip += re.findall(r"(?m)^\.venv/bin/pip install .*?'(\S+)'", block.text)
        place = self.folder / "home/site"
        place.mkdir(exist_ok=True)
        text = SITE_CUSTOMIZE.format(absent=absent_modules(block.installed, self.pip))
        (place / "sitecustomize.py").write_text(text)
        self.env["PYTHONPATH"] = str(place)

    def do(self, block: Block) -> None:
        self.prepare(block)
        {"sh": self.shell, "python": self.python, "toml": self.settings, "cpp": self.cpp}[block.language](
            block
        )

    def run(self, block: Block, command: list[str | Path]) -> None:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=280,
        )
        output = done.stdout + done.stderr
        assert done.returncode == 0 and "Traceback" not in output, f"{block.place}:\n{block.text}\n{output}"
        assert '{"error"' not in done.stdout, f"{block.place}: {done.stdout}"  # curl exits with 0
        self.said[block.first_line] = done.stdout

    def shell(self, block: Block) -> None:
        *lines, last = block.text.splitlines()
        shell = ["bash", "--noprofile", "--norc", "-euo", "pipefail", "-c"]
        if "twinop serve " not in last:
            self.run(block, [*shell, block.text])
            return
        if lines:
            self.run(block, [*shell, "\n".join(lines)])
        self.stop()
        self.server = subprocess.Popen(
            [*shell, last],
            cwd=self.folder,
            env=self.env,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.server.poll() is None:
            with (
                suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{PORTS[0]}/v2/health/ready") as answer,
            ):
                if answer.status == 200:
                    return
            time.sleep(0.1)
        self.stop()
        assert self.server.stderr is not None
        pytest.fail(f"{block.place}: {last}: not ready\n{self.server.stderr.read()[-3000:]}")

    def python(self, block: Block) -> None:
        name = re.match(r"# ([\w/]+\.py)$", block.first_line)
        path = self.folder / (name[1] if name else "block.py")
        path.write_text(block.text)
        self.run(block, [".venv/bin/python", path])

    def settings(self, block: Block) -> None:
        path = self.folder / "block.toml"
        path.write_text(block.text)
        settings = pytest.importorskip(
            "twinop.deploy.service.settings", reason="needs twinop[serve]"
        ).read_settings(path, {})
        for name in settings.models:
            settings.for_model(name)

    def cpp(self, block: Block) -> None:
        """Compiles a whole file. An excerpt names its file and must have lines of it, in order."""
        if name := re.match(r"// (\S+)$", block.first_line):
            lines = iter((ROOT / name[1]).read_text().splitlines())
            missing = [line for line in block.text.splitlines()[1:] if line and line not in lines]
            assert not missing, f"{block.place}: not in {name[1]}, in this order: {missing[0]}"
            return
        path = self.folder / "block.cpp"
        path.write_text(block.text)
        commands = json.loads((ROOT / "build/compile_commands.json").read_text())
        [command] = [entry["command"] for entry in commands if entry["file"].endswith("ort_customop/op.cpp")]
        compiler, *options = shlex.split(command)
        include = options[options.index("-isystem") + 1]
        self.env["PATH"] = os.environ["PATH"]
        self.run(block, [compiler, "-std=c++17", "-fsyntax-only", "-isystem", include, path])

    def stop(self) -> None:
        if self.server is not None and self.server.poll() is None:
            os.killpg(self.server.pid, signal.SIGTERM)
            try:
                self.server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.server.pid, signal.SIGKILL)


@contextmanager
def ports() -> Iterator[None]:
    """Reserves the ports that the documents name for one document at a time."""
    with Path(tempfile.gettempdir(), f"twinop-test-docs-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for port in PORTS:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    pytest.skip(f"another program listens on port {port}, which the documents use")
        yield


def follow(reader: Reader, document: str) -> None:
    blocks = [block for block in blocks_of(document) if block.language != "text" and block.reason is None]
    with ports() if any("twinop serve " in block.text for block in blocks) else nullcontext():
        try:
            for block in blocks:
                reader.do(block)
        finally:
            reader.stop()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "document",
    [pytest.param(name, marks=pytest.mark.slow) if name in SERVERS else name for name in DOCUMENTS],
)
def test_blocks(document: str, tmp_path: Path) -> None:
    if not (ROOT / ".venv/bin/twinop").exists():
        pytest.skip("no .venv: ./build.sh has not run")
    reader = Reader(tmp_path)
    follow(reader, document)
    if document == "README.md" and shutil.which("nvidia-smi") is None:
        [shown] = [block.text for block in blocks_of(document) if "Custom nodes against torch" in block.text]
        [said] = [text for first, text in reader.said.items() if first.startswith(".venv/bin/twinop export ")]
        assert (drawn := [line for line in shown.splitlines() if line[0] in "╭│╰┏┃┡└"])
        assert [line for line in drawn if line not in said] == []
