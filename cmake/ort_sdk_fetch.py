"""The network half of ort_sdk.py: a resumable HTTP download, and one Debian package through apt.

Standard library only. Both raise Unavailable when the network, or the machine, cannot give the file.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT = 5.0  # seconds to connect, and of silence; a stalled download reconnects where it stopped
SUITE, PACKAGE = "trixie", "libonnxruntime-dev"  # the first Debian release that has it
SUITES = {
    "stable",
    "oldstable",
    "testing",
    "unstable",
    "sid",
    "bullseye",
    "bookworm",
    "trixie",
    "forky",
    "duke",
}
APT_ETC = Path("/etc/apt")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class Unavailable(Exception):
    """This way gave no headers; the next one is tried."""


def say(line: str) -> None:
    print(f"ORT SDK: {line}", file=sys.stderr, flush=True)


# ---- HTTP ----


def download(url: str, part: Path) -> None:
    """Fetch `url` into `part`, going on after what is there; Unavailable when it stays incomplete."""
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            if _request(url, part, before):
                return
            why = "the connection closed early"
        except urllib.error.HTTPError as error:
            if error.code == 416 and before:  # nothing left to send, or another file: the SHA-256 tells
                return
            raise Unavailable(f"{url}: the server answered {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = str(getattr(error, "reason", error))
        size = part.stat().st_size if part.exists() else 0
        if size <= before:  # retry only as long as it helps
            kept = (
                f"; truncated at {size} bytes, kept so that the next run goes on from there" if size else ""
            )
            raise Unavailable(f"{url}: {why}{kept}")


def _request(url: str, part: Path, start: int) -> bool:
    """One request. True when the end that the server announced was reached."""
    request = urllib.request.Request(url, headers={"User-Agent": "twinop"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(
            f"bytes {start}-"
        )
        done = shown = start if resumed else 0  # a 200 sends the whole file again
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        say(
            f"release: {'going on with' if resumed else 'downloading'} {url}"
            + (f", {_mega(total)}" if total else "")
        )
        step = 1 << 20 if sys.stderr.isatty() else (total or 1 << 28) // 4 + 1
        with part.open("ab" if resumed else "wb") as out:
            while chunk := response.read(1 << 18):
                out.write(chunk)
                done += len(chunk)
                if done - shown >= step:
                    shown = done
                    _progress(done, total)
    return total is None or done >= total


def _mega(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _progress(done: int, total: int | None) -> None:
    line = f"release: {_mega(done)}" + (f" of {_mega(total)}" if total else "")
    if sys.stderr.isatty():
        print(f"ORT SDK: {line}", end="\r", file=sys.stderr, flush=True)
    else:
        say(line)


# ---- Debian ----


def debian_mirror(etc: Path) -> tuple[str, str] | None:
    """The address of the machine's own Debian mirror and the options to use it with, from apt's sources.

    Reads both formats: `deb [options] uri suite components` lines and deb822 stanzas.
    """
    found: list[tuple[str, list[str], list[str], dict[str, str]]] = []  # uri, suites, components, options
    folder = etc / "sources.list.d"
    for file in [etc / "sources.list", *sorted(folder.glob("*.list"))]:
        for line in file.read_text(errors="replace").splitlines() if file.is_file() else []:
            if match := re.match(r"\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#]+)", line):
                options = dict(pair.split("=", 1) for pair in (match[1] or "").split() if "=" in pair)
                found.append((match[2], [match[3]], match[4].split(), options))
    for file in sorted(folder.glob("*.sources")):
        text = "\n".join(
            line for line in file.read_text(errors="replace").splitlines() if not line.startswith("#")
        )
        for stanza in re.split(r"\n\s*\n", text):
            pairs = re.findall(r"^([\w-]+):[ \t]*(.*(?:\n[ \t]+.*)*)", stanza, re.MULTILINE)
            fields = {name.lower(): value.strip() for name, value in pairs}
            if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes").lower() != "no":
                suites, components = fields.get("suites", "").split(), fields.get("components", "").split()
                found += [(uri, suites, components, fields) for uri in fields.get("uris", "").split()]
    # ".../debian" goes first: others use Debian's suite names too (".../debian/12/prod bookworm main").
    found.sort(key=lambda entry: not entry[0].rstrip("/").endswith("/debian"))
    for uri, suites, components, options in found:
        if SUITES & set(suites) and "main" in components and not uri.startswith("cdrom:"):
            trusted = " trusted=yes" if options.get("trusted", "").lower() == "yes" else ""
            keyring = options.get("signed-by", "")
            keyring = (
                keyring if re.fullmatch(r"/[^\s,]+", keyring) else KEYRING if Path(KEYRING).exists() else ""
            )
            return uri, f"[{f'signed-by={keyring}' if keyring else ''}{trusted}] ".replace("[]", "").lstrip()
    return None


def debian_package(work: Path) -> Path:
    """Download Debian's package with apt, unpack it below `work`; nothing is installed, no root needed."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise Unavailable("not tried, this machine has no apt-get")
    mirror = debian_mirror(APT_ETC)
    if mirror is None:
        raise Unavailable(
            f"not tried, no Debian mirror in {APT_ETC}/sources.list or {APT_ETC}/sources.list.d"
        )
    for folder in ("lists/partial", "cache/archives/partial", "parts"):
        (work / folder).mkdir(parents=True)
    (work / "trixie.list").write_text(f"deb {mirror[1]}{mirror[0]} {SUITE} main\n")
    config = work / "apt.conf"
    config.write_text(  # read after the machine's own configuration, which may hold a proxy
        f'Dir::Etc::sourcelist "{work}/trixie.list";\nDir::Etc::sourceparts "{work}/parts";\n'
        f'Dir::State::Lists "{work}/lists";\nDir::Cache "{work}/cache";\n'
        'APT::Sandbox::User "root";\n'  # root stays root: "_apt" may not read a private folder
        'APT::Update::Error-Mode "any";\nAcquire::Languages "none";\nAcquire::Retries "1";\n'
        'Acquire::http::Timeout "10";\nAcquire::https::Timeout "10";\n'
        # Images clean /var/cache/apt in these hooks, which fails without root.
        "#clear APT::Update::Pre-Invoke;\n#clear APT::Update::Post-Invoke;\n"
        "#clear APT::Update::Post-Invoke-Success;\n"
    )
    say(f"Debian: {PACKAGE} of {SUITE} from {mirror[0]}")
    _run(["apt-get", "-qq", "-c", str(config), "update"], work)
    _run(["apt-get", "-qq", "-c", str(config), "download", PACKAGE], work)
    packages = list(work.glob(f"{PACKAGE}_*.deb"))
    if not packages:
        raise Unavailable(f"apt-get download {PACKAGE} left no file")
    _run(["dpkg", "-x", str(packages[0]), str(work / "unpacked")], work)
    return work / "unpacked"


def _run(command: list[str], work: Path) -> None:
    what = " ".join(
        [command[0], *(word for word in command[1:] if word in ("update", "download", "-x", PACKAGE))]
    )
    try:
        done = subprocess.run(
            command,
            check=False,
            cwd=work,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{what} did not end in 300 seconds") from error
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()] or ["no message"]
        raise Unavailable(f"{what}: {next((line for line in lines if line.startswith('E:')), lines[-1])}")
