"""cmake/OrtHeaders.cmake: where it finds ONNX Runtime's headers, and its messages when it does not.

A local HTTP server stands in for the release site, and shell scripts for apt-get and dpkg. Nothing here uses
the network.
"""

import hashlib
import io
import os
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "cmake/OrtHeaders.cmake"
HEADER = "include/onnxruntime_c_api.h"
RELEASE = "v1.23.2/onnxruntime-linux-x64-gpu-1.23.2.tgz"
Find = Callable[..., Path]


def header(api: int = 23) -> bytes:
    return f"#pragma once\n#define ORT_API_VERSION {api}\n".encode()


def folder(root: Path, files: dict[str, bytes]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def tarball(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


class Refused(Exception):
    pass


@pytest.fixture
def find(tmp_path: Path) -> Find:
    """Runs the script with a cache of its own; keyword arguments are environment variables."""

    def call(sha256: str = "0" * 64, **env: object) -> Path:
        own = {"TWINOP_CACHE": tmp_path / "the cache", "TWINOP_ORT_URL": "http://127.0.0.1:9"}
        inherited = {name: value for name, value in os.environ.items() if "ORT_" not in name}
        done = subprocess.run(
            ["cmake", f"-DTWINOP_APT_ETC={tmp_path}/etc", f"-DTWINOP_ORT_SHA256={sha256}", "-P", str(SCRIPT)],
            env=inherited | {name: str(value) for name, value in (own | env).items()},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise Refused(" ".join(done.stderr.split()))
        return Path(done.stdout.splitlines()[-1])

    return call


@pytest.mark.parametrize(
    "inner",
    ["include", "include/onnxruntime/core/session", "usr/include/onnxruntime", "."],
)
def test_folder_layouts(inner: str, tmp_path: Path, find: Find) -> None:
    root = folder(tmp_path / "an ort", {f"{inner}/onnxruntime_c_api.h": header()})
    assert find(ORT_ROOT=root) == root / inner


@pytest.mark.parametrize("top", ["./onnxruntime-linux-x64-gpu-1.23.2/", ""])
def test_tarballs(top: str, tmp_path: Path, find: Find) -> None:
    files = {f"{top}{HEADER}": header(), f"{top}include/other.h": b"", f"{top}lib/libonnxruntime.so.1": b"x"}
    file = tarball(tmp_path / "down loads/ort.tgz", files)
    include = find(ORT_ROOT=file)
    assert (include / "onnxruntime_c_api.h").read_bytes() == header() and (include / "other.h").exists()
    assert not list((tmp_path / "the cache").rglob("*.so*"))
    tarball(file, {f"{top}{HEADER}": header(24)})  # the script notices new content under the old name
    assert (find(ORT_ROOT=file) / "onnxruntime_c_api.h").read_bytes() == header(24)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"capi/x.so": b""}, r"has no onnxruntime_c_api\.h.* Expected include/onnxruntime_c_api\.h in it"),
        ({HEADER: header(17)}, r"declare API '17'; twinop needs API 18 \(release 1\.18\) or later"),
        ({HEADER: b"// nothing\n"}, r"declare API ''; twinop needs API 18"),
    ],
)
def test_folders_of_no_use(files: dict[str, bytes], message: str, tmp_path: Path, find: Find) -> None:
    with pytest.raises(Refused, match=message):
        find(ORT_ROOT=folder(tmp_path / "ort", files))
    with pytest.raises(Refused, match=r"ORT_ROOT=/no/such does not exist.*or unset ORT_ROOT"):
        find(ORT_ROOT="/no/such")


class Site(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """Returns arguments of `find` for a release on a local server, and the file that it serves."""
    file = tarball(tmp_path / "site" / RELEASE, {f"ort/{HEADER}": header(31)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *a: Site(*a, directory=str(tmp_path / "site")))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    yield {"TWINOP_ORT_URL": f"http://127.0.0.1:{server.server_port}", "sha256": sha256}, file
    server.shutdown()
    server.server_close()


def test_the_release_then_the_cache(site: tuple[dict[str, str], Path], tmp_path: Path, find: Find) -> None:
    arguments, file = site
    include = find(**arguments)
    assert include == tmp_path / "the cache/ort-1.23.2/include"
    file.unlink()
    assert find(**arguments) == include
    assert sorted(path.name for path in (tmp_path / "the cache").iterdir()) == ["lock", "ort-1.23.2"]
    (include / "onnxruntime_c_api.h").unlink()  # a damaged cache is not trusted
    with pytest.raises(Refused, match=r"No ONNX Runtime headers found.*response code said error"):
        find(**arguments)


def test_a_release_of_another_checksum(site: tuple[dict[str, str], Path], tmp_path: Path, find: Find) -> None:
    arguments, file = site
    tarball(file, {f"ort/{HEADER}": header() + b"// evil\n"})
    with pytest.raises(Refused, match=r"refused and removed: its SHA-256 is [0-9a-f]{64}, expected"):
        find(**arguments)
    assert [path.name for path in (tmp_path / "the cache").iterdir()] == ["lock"]


@pytest.fixture
def apt(tmp_path: Path) -> str:
    """Returns a PATH with stand-ins for apt-get, which records its sources, and for dpkg."""
    scripts = {
        "apt-get": f"""[ -e '{tmp_path}/fail' ] && {{ echo "E: no route" >&2; exit 100; }}
            [ "$4" = update ] && cat sources.list >'{tmp_path}/log'
            [ "$4" = download ] && : >"$5_1.2_amd64.deb"; exit 0""",
        "dpkg": """mkdir -p "$3/usr/include/onnxruntime" &&
            echo "#define ORT_API_VERSION 21" >"$3/usr/include/onnxruntime/onnxruntime_c_api.h" """,
    }
    programs = folder(
        tmp_path / "programs", {name: f"#!/bin/sh\n{text}\n".encode() for name, text in scripts.items()}
    )
    for name in scripts:
        (programs / name).chmod(0o755)
    return f"{programs}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "sources.list",
            "# deb http://other.example/debian x main\ndeb http://mirror.example/debian trixie main\n",
        ),
        (
            "sources.list.d/debian.sources",
            "Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm\n",
        ),
    ],
)
def test_debians_package_from_a_mirror(file: str, text: str, tmp_path: Path, find: Find, apt: str) -> None:
    folder(tmp_path / "etc", {file: text.encode()})
    assert find(PATH=apt) == tmp_path / "the cache/ort-debian/include"
    assert (tmp_path / "log").read_text().endswith("http://mirror.example/debian trixie main\n")
    assert sorted(path.name for path in (tmp_path / "the cache").iterdir()) == ["lock", "ort-debian"]


def test_without_any_way_the_message_lists_them(tmp_path: Path, find: Find, apt: str) -> None:
    with pytest.raises(Refused, match=r"headers found.*no apt-get with a Debian mirror.*set ORT_ROOT"):
        find(PATH=apt)
    folder(tmp_path / "etc", {"sources.list": b"deb https://mirror.example/debian/ trixie main\n"})
    (tmp_path / "fail").touch()
    with pytest.raises(Refused, match=r"could not fetch it from https://mirror\.example/debian/: E: no"):
        find(PATH=apt)
