"""Runs every block of README.md, CONTRIBUTING.md and docs/ as it stands, as a reader does after ./build.sh.

Each document is read from top to bottom in a folder that looks like the checkout; every block gets a new
shell. A server that a block starts runs until the next one. A block that is not run has a comment above it,
`<!-- not run: reason -->`. Blocks of `text` are output and pictures: nobody types them.

Python finds only what the page has installed above a block (`./build.sh serve`, `pip install`)
and what that needs.
"""

import fcntl
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from slow_cases import often

ROOT = Path(__file__).resolve().parents[2]
GUIDES = "adding-|from-a-"  # the blocks of these pages are parts of an op: other tests apply them
# these take 10 to 40 s each
SERVERS = {"README.md", "docs/serving.md", "docs/existing-service.md", "docs/trust.md"}
SITE = {"index.md"}  # written for an installation: test_pages.py
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name not in SITE)
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *(f"docs/{x}" for x in PAGES if not re.match(GUIDES, x)))
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
    found = []
    for match in _FENCE.finditer(content):
        place = f"{document}:{content[: match.start('text')].count(chr(10))}"
        found.append(Block(place, *match.group("language", "text", "reason", "file")))
    assert 2 * len(found) == len(re.findall("^```", content, re.MULTILINE)), f"{document}: an open fence"
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


# A server that a block starts runs until the next one, or the end.
PROLOGUE = f"""
set -euo pipefail
server=
stop() {{ if [ "$server" ]; then kill -- "-$server"; wait "$server" || true; fi; server=; }}
trap stop EXIT
ready() {{
  for _ in {{1..1200}}; do
    kill -0 "$server"
    if curl -sf http://127.0.0.1:{PORTS[0]}/v2/health/ready >/dev/null; then return; fi
    sleep 0.1
  done
  return 1
}}
"""


def checkout(folder: Path) -> dict[str, str]:
    """Makes a folder that looks like the checkout; returns an environment without .venv on the PATH."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith("custom_relu.onnx"):
            (folder / entry.name).symlink_to(entry)
    (site := folder / "home/site").mkdir(parents=True)
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(folder / "home"), "LANG": "C.UTF-8"}
    # Spinning threads of torch would slow other tests down.
    return env | {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(site)}


def program(blocks: list[Block]) -> str:
    """Returns blocks as one program of bash. Each has its own shell, and only what is installed above it."""
    parts, installed = [PROLOGUE], list[str]()
    for block in blocks:
        installed += re.findall(r"(?m)^\.venv/bin/pip install .*?'(\S+)'", block.text)
        hidden = SITE_CUSTOMIZE.format(absent=absent_modules(block.installed, installed))
        parts += [f"cat >home/site/sitecustomize.py <<'END'{hidden}END", f"echo '{block.place}' >&2"]
        if block.language == "python":
            found = re.match(r"# ([\w/]+\.py)$", block.first_line)
            name = found[1] if found else "block.py"
            parts += [f"cat >{name} <<'END'\n{block.text}END", f".venv/bin/python {name}"]
            continue
        *lines, last = block.text.splitlines()
        if "twinop serve " in last:
            parts.append("(\n" + "\n".join(lines) + "\ntrue)")
            parts.append(f"stop\nset -m\n{last} &\nserver=$!\nset +m\nready")
        else:
            parts.append(f"(\n{block.text})")
    return "\n".join(parts)


def check_settings(block: Block, folder: Path) -> None:
    (path := folder / "block.toml").write_text(block.text)
    module = pytest.importorskip("twinop.deploy.service.settings", reason="needs twinop[serve]")
    settings = module.read_settings(path, {})
    for name in settings.models:
        settings.for_model(name)


def check_cpp(block: Block, folder: Path) -> None:
    """Compiles a whole file. An excerpt names its file and must have lines of it, in order."""
    if name := re.match(r"// (\S+)$", block.first_line):
        lines = iter((ROOT / name[1]).read_text().splitlines())
        missing = [line for line in block.text.splitlines()[1:] if line and line not in lines]
        assert not missing, f"{block.place}: not in {name[1]}, in this order: {missing[0]}"
        return
    (path := folder / "block.cpp").write_text(block.text)
    commands = json.loads((ROOT / "build/compile_commands.json").read_text())
    [command] = [entry["command"] for entry in commands if entry["file"].endswith("ort_customop/op.cpp")]
    compiler, *options = shlex.split(command)
    include = options[options.index("-isystem") + 1]
    subprocess.run([compiler, "-std=c++17", "-fsyntax-only", "-isystem", include, path], check=True)


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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("document", often(DOCUMENTS, *{*DOCUMENTS} - SERVERS))
def test_blocks(document: str, tmp_path: Path) -> None:
    if not (ROOT / ".venv/bin/twinop").exists():
        pytest.skip("no .venv: ./build.sh has not run")
    env, blocks = checkout(tmp_path), [block for block in blocks_of(document) if block.reason is None]
    for block in blocks:
        if check := {"toml": check_settings, "cpp": check_cpp}.get(block.language):
            check(block, tmp_path)
    text = program([block for block in blocks if block.language in ("sh", "python")])
    with ports() if "\nset -m\n" in text else nullcontext():
        command, nothing = ["bash", "--noprofile", "--norc", "-c", text], subprocess.DEVNULL
        done = subprocess.run(command, cwd=tmp_path, env=env, stdin=nothing, capture_output=True, text=True)
    said = done.stdout[-5000:] + done.stderr[-5000:]
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr, said
    assert '{"error"' not in done.stdout, said  # curl exits with 0
    if document == "README.md" and shutil.which("nvidia-smi") is None:
        [shown] = [block.text for block in blocks if "Custom nodes against torch" in block.text]
        assert (drawn := [line for line in shown.splitlines() if line[0] in "╭│╰┏┃┡└"])
        assert [line for line in drawn if line not in done.stdout] == []
