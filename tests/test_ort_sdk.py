"""cmake/ort_sdk.py: where the ONNX Runtime headers come from. A local HTTP server stands in for the release
site and shell scripts for apt-get and dpkg: no test here uses the network."""

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import ort_sdk
import ort_sdk_fetch
import pytest
from ort_sdk import SdkError, find_headers, resolve

NAME = "onnxruntime-linux-x64-gpu-1.23.2.tgz"
FLAT = "include/onnxruntime_c_api.h"
CODES = {"x86_64": 62, "aarch64": 183}


def header(api: int = 23) -> bytes:
    return f"#pragma once\n#define ORT_API_VERSION {api}\n".encode()


def elf(machine: str, size: int = 64) -> bytes:
    head = (
        b"\x7fELF\x02\x01\x01" + bytes(9) + (3).to_bytes(2, "little") + CODES[machine].to_bytes(2, "little")
    )
    return head + os.urandom(size)  # does not compress: the tarball has some length


def files(machine: str = "x86_64", api: int = 23, size: int = 400_000) -> dict[str, bytes]:
    return {
        FLAT: header(api),
        "include/onnxruntime_cxx_api.h": b"",
        "lib/libonnxruntime.so.1": elf(machine, size),
    }


def tarball(path: Path, members: dict[str, bytes], top: str = "onnxruntime-linux-x64-gpu-1.23.2/") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(top + name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo(top + "lib/libonnxruntime.so")
        link.type, link.linkname = tarfile.SYMTYPE, "libonnxruntime.so.1"
        tar.addfile(link)
    return path


def folder(root: Path, members: dict[str, bytes]) -> Path:
    for name, data in members.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    root.mkdir(parents=True, exist_ok=True)
    return root


@pytest.fixture(autouse=True)
def machine_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy, no apt, nothing pinned but what a test pins."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path / "no programs"))
    monkeypatch.setattr(ort_sdk_fetch, "APT_ETC", tmp_path / "etc apt")
    monkeypatch.setattr(ort_sdk_fetch, "TIMEOUT", 0.5)


class Site:
    """A release site that serves one file, well or badly."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.ranges: list[str | None] = []
        self.paths: list[str] = []
        self.honours_range = True
        self.cut: list[int] = []  # for each request: close after so many bytes
        self.status = 200
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.paths.append(self.path)
                asked = self.headers.get("Range")
                site.ranges.append(asked)
                start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and site.honours_range else 0
                body = site.content[start:]
                if site.status != 200:
                    self.send_error(site.status)
                    return
                if start and not body:
                    self.send_error(416)
                    return
                self.send_response(206 if start else 200)
                if start:
                    self.send_header(
                        "Content-Range", f"bytes {start}-{len(site.content) - 1}/{len(site.content)}"
                    )
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: site.cut.pop(0)] if site.cut else body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/mirror"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    content = tarball(tmp_path / "site" / NAME, files()).read_bytes()
    monkeypatch.setitem(ort_sdk.PINNED_SHA256, NAME, hashlib.sha256(content).hexdigest())
    site = Site(content)
    yield site
    site.close()


@pytest.fixture
def find(tmp_path: Path) -> Callable[..., Path]:
    """resolve() with a cache of its own; keyword arguments are environment variables."""

    def call(machine: str = "x86_64", **env: object) -> Path:
        base = {"TWINOP_CACHE": tmp_path / "the cache", "TWINOP_ORT_URL": "http://127.0.0.1:9"}
        return resolve({name: str(value) for name, value in (base | env).items()}, machine)

    return call


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != "lock")


# ---- ORT_ROOT ----


@pytest.mark.parametrize(
    "inner",
    [
        "include",
        "include/onnxruntime",
        "include/onnxruntime/core/session",
        "usr/include/onnxruntime",
        ".",
    ],
)
def test_root_folder_layouts(tmp_path, find, inner, capsys):
    root = folder(tmp_path / "an ort", {f"{inner}/onnxruntime_c_api.h": header()})
    assert find(ORT_ROOT=root) == root / inner
    assert capsys.readouterr().err == f"ORT SDK: ORT_ROOT={root}: API 23, {root / inner}\n"


@pytest.mark.parametrize("top", ["onnxruntime-linux-x64-gpu-1.23.2/", "./onnxruntime-x/", ""])
@pytest.mark.parametrize("suffix", [".tgz", ".tar.gz"])
def test_root_tarball(tmp_path, find, top, suffix):
    file = tarball(tmp_path / "down loads" / f"ort{suffix}", files(), top)
    include = find(ORT_ROOT=file)
    assert (include / "onnxruntime_c_api.h").read_bytes() == header()
    assert not list((tmp_path / "the cache").rglob("*.so*"))  # headers only
    before = (include / "onnxruntime_c_api.h").stat().st_mtime_ns
    assert find(ORT_ROOT=file) == include
    assert (include / "onnxruntime_c_api.h").stat().st_mtime_ns == before  # not unpacked twice
    tarball(file, files(api=24), top)
    assert ort_sdk.api_version(find(ORT_ROOT=file)) == 24  # new content under the old name is seen


def test_root_tarball_member_outside(tmp_path, find):
    members = {FLAT: header(), "include/../../../evil.h": b"", "../include/evil.h": b""}
    find(ORT_ROOT=tarball(tmp_path / "ort.tgz", members))
    assert not list(tmp_path.rglob("evil.h"))


def test_root_relative_and_home(tmp_path, find, monkeypatch):
    folder(tmp_path / "ort", {FLAT: header()})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find(ORT_ROOT="ort") == find(ORT_ROOT="~/ort") == tmp_path / "ort/include"


def test_root_is_checked_before_anything_else(tmp_path, find, site):
    with pytest.raises(SdkError, match=r"ORT_ROOT=/no/such does not exist.*unset ORT_ROOT"):
        find(ORT_ROOT="/no/such", TWINOP_ORT_URL=site.url)
    assert not site.paths


def test_root_empty(tmp_path, find):
    with pytest.raises(SdkError, match=r"is an empty folder\. Expected one of include/onnxruntime_c_api\.h"):
        find(ORT_ROOT=folder(tmp_path / "ort", {}))


def test_root_without_headers(tmp_path, find):
    with pytest.raises(SdkError, match=r"holds no onnxruntime_c_api\.h\. Expected one of include/"):
        find(ORT_ROOT=folder(tmp_path / "ort", {"lib/libonnxruntime.so": elf("x86_64")}))


@pytest.mark.parametrize("inner", ["lib/python3.11/site-packages", "elsewhere"])
@pytest.mark.parametrize("root", ["", "onnxruntime"])
def test_root_is_a_wheel(tmp_path, find, inner, root):
    folder(tmp_path / inner / "onnxruntime", {"capi/onnxruntime_pybind11_state.so": b""})
    with pytest.raises(SdkError, match=r"wheels ship no C headers\. Unset ORT_ROOT .* release\.") as error:
        find(ORT_ROOT=tmp_path / inner / root)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("lib", ["lib", "usr/lib/aarch64-linux-gnu"])
def test_root_folder_of_another_machine(tmp_path, find, lib):
    root = folder(tmp_path / "ort", {FLAT: header(), f"{lib}/libonnxruntime.so.1": elf("aarch64")})
    with pytest.raises(SdkError, match=r"is ONNX Runtime for aarch64, but this machine is x86_64"):
        find(ORT_ROOT=root)
    assert find(machine="aarch64", ORT_ROOT=root) == root / "include"


def test_root_tarball_of_another_machine(tmp_path, find):
    by_library = tarball(tmp_path / "ort.tgz", files("aarch64"))
    by_name = tarball(tmp_path / "onnxruntime-linux-aarch64-1.23.2.tgz", {FLAT: header()})
    for file in (by_library, by_name):
        with pytest.raises(SdkError, match=r"is ONNX Runtime for aarch64, but this machine is x86_64"):
            find(ORT_ROOT=file)
        find(machine="aarch64", ORT_ROOT=file)


def test_root_of_two_machines(tmp_path, find):
    libraries = {f"lib/{machine}-linux-gnu/libonnxruntime.so": elf(machine) for machine in CODES}
    root = folder(tmp_path / "usr", {"include/onnxruntime/onnxruntime_c_api.h": header(), **libraries})
    assert find(ORT_ROOT=root) == find(machine="aarch64", ORT_ROOT=root) == root / "include/onnxruntime"


@pytest.mark.parametrize(
    "make", [lambda path: folder(path, files(api=17)), lambda path: tarball(path, files(api=17))]
)
def test_root_too_old(tmp_path, find, make):
    with pytest.raises(SdkError, match=r"the headers declare API 17 \(release 1\.17\); twinop needs API 18"):
        find(ORT_ROOT=make(tmp_path / "ort.tgz"))


def test_root_oldest_supported(tmp_path, find):
    find(ORT_ROOT=folder(tmp_path / "ort", files(api=18)))


def test_root_header_without_version(tmp_path, find):
    with pytest.raises(SdkError, match="declare no ORT_API_VERSION"):
        find(ORT_ROOT=folder(tmp_path / "ort", {FLAT: b"// nothing\n"}))


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"PK\3\4 a zip", lambda data: b""]
)
def test_root_file_is_no_complete_tarball(tmp_path, find, damage):
    file = tarball(tmp_path / "ort.tgz", files())
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(SdkError, match=r"cannot be read as a tarball .*Download it again"):
        find(ORT_ROOT=file)
    assert leftovers(tmp_path / "the cache") == []


def test_root_tarball_without_headers(tmp_path, find):
    with pytest.raises(
        SdkError, match=r"holds no include/onnxruntime_c_api\.h.*such as onnxruntime-linux-x64"
    ):
        find(ORT_ROOT=tarball(tmp_path / "ort.tgz", {"lib/libonnxruntime.so.1": elf("x86_64")}))
    assert leftovers(tmp_path / "the cache") == []


# ---- the cache ----


def test_cache_folder(tmp_path):
    home, xdg, own = tmp_path / "home", tmp_path / "xdg", tmp_path / "own"
    env = {"HOME": str(home)}
    assert ort_sdk.cache_folder(env) == home / ".cache/twinop"
    assert ort_sdk.cache_folder(env := env | {"XDG_CACHE_HOME": str(xdg)}) == xdg / "twinop"
    assert ort_sdk.cache_folder(env | {"TWINOP_CACHE": str(own)}) == own


def test_cache_not_writable(tmp_path, find):
    (tmp_path / "file").write_text("")
    with pytest.raises(SdkError, match=r"cache folder .*/file/x cannot be written .*Set TWINOP_CACHE"):
        find(TWINOP_CACHE=tmp_path / "file/x")


def test_cache_damaged_is_made_again(tmp_path, find, site):
    include = find(TWINOP_ORT_URL=site.url)
    (include / "onnxruntime_c_api.h").unlink()
    assert find(TWINOP_ORT_URL=site.url) == include
    assert find_headers(include) and len(site.paths) == 2


# ---- the release ----


def test_release_then_cache(tmp_path, find, site, capsys):
    include = find(TWINOP_ORT_URL=site.url + "/")
    assert (include / "onnxruntime_c_api.h").read_bytes() == header()
    assert site.paths == [f"/mirror/v1.23.2/{NAME}"]
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "ORT SDK: ORT_ROOT: not set",
        f"ORT SDK: cache: nothing in {tmp_path / 'the cache'}",
        f"ORT SDK: release: downloading {site.url}/v1.23.2/{NAME}, 0.4 MB",
    ]
    assert " of 0.4 MB" in lines[3] and lines[-1] == f"ORT SDK: release: API 23, {include}"
    assert leftovers(tmp_path / "the cache") == ["ort-1.23.2"]
    assert find(TWINOP_ORT_URL=site.url) == include
    assert len(site.paths) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"ORT SDK: cache: API 23, {include}"


def test_release_resumes_within_a_run(find, site):
    site.cut = [100_000, 50_000]
    find(TWINOP_ORT_URL=site.url)
    assert site.ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_release_resumes_in_the_next_run(tmp_path, find, site):
    site.cut = [100_000, 0]
    with pytest.raises(SdkError, match=r"truncated at 100000 bytes, kept so that the next run goes on"):
        find(TWINOP_ORT_URL=site.url)
    assert not (tmp_path / "the cache/ort-1.23.2").exists()
    find(TWINOP_ORT_URL=site.url)
    assert site.ranges[-1] == "bytes=100000-"


def test_release_starts_again_without_ranges(tmp_path, find, site):
    folder(tmp_path / "the cache", {f"{NAME}.part": b"x" * 1000})
    site.honours_range = False
    find(TWINOP_ORT_URL=site.url)
    assert site.ranges == ["bytes=1000-"]


def test_release_complete_part_is_used(tmp_path, find, site):
    folder(tmp_path / "the cache", {f"{NAME}.part": site.content})
    find(TWINOP_ORT_URL=site.url)  # the server answers 416
    assert len(site.paths) == 1


def test_release_truncated_is_refused(tmp_path, find, site):
    site.content = site.content[:-1000]  # a shorter file, announced as such
    with pytest.raises(
        SdkError, match=r"refused and removed: its SHA-256 is [0-9a-f]{64}, expected [0-9a-f]{64}"
    ):
        find(TWINOP_ORT_URL=site.url)
    assert leftovers(tmp_path / "the cache") == []


def test_release_tampered_is_refused(tmp_path, find, site):
    evil = tarball(tmp_path / "evil.tgz", files() | {FLAT: header() + b"// evil\n"})
    site.content = evil.read_bytes()
    with pytest.raises(SdkError, match="refused and removed: its SHA-256 is"):
        find(TWINOP_ORT_URL=site.url)
    assert leftovers(tmp_path / "the cache") == []


def test_release_missing(find, site):
    site.status = 404
    with pytest.raises(SdkError, match=rf"{NAME}: the server answered 404"):
        find(TWINOP_ORT_URL=site.url)


def test_release_site_that_never_answers(find):
    silent = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # accepts, and says nothing
    with pytest.raises(SdkError, match="timed out"):
        find(TWINOP_ORT_URL=f"http://127.0.0.1:{silent.server_port}")
    silent.server_close()


@pytest.mark.parametrize(
    ("version", "machine", "name"),
    [
        ("1.23.2", "x86_64", NAME),
        ("1.27.9", "x86_64", "onnxruntime-linux-x64-gpu-1.27.9.tgz"),
        ("1.28.0", "x86_64", "onnxruntime-linux-x64-gpu_cuda13-1.28.0.tgz"),
        ("1.31.1", "aarch64", "onnxruntime-linux-aarch64-1.31.1.tgz"),
    ],
)
def test_release_name(version, machine, name):
    assert ort_sdk.release_name(version, machine) == name


@pytest.mark.parametrize("version", ["1.17.3", "latest", "1.23", "../1.23.2"])
def test_version_refused(find, version):
    with pytest.raises(SdkError, match=r"TWINOP_ORT_VERSION=.*expected a release such as 1\.23\.2"):
        find(TWINOP_ORT_VERSION=version)


def test_other_version_needs_its_sha256(find, site):
    with pytest.raises(
        SdkError, match=r"knows no SHA-256 for onnxruntime-linux-x64-gpu_cuda13-1\.31\.1\.tgz; set TWINOP"
    ):
        find(TWINOP_ORT_VERSION="1.31.1", TWINOP_ORT_URL=site.url)
    assert not site.paths
    sha256 = hashlib.sha256(site.content).hexdigest().upper()
    include = find(TWINOP_ORT_VERSION="1.31.1", TWINOP_ORT_SHA256=sha256, TWINOP_ORT_URL=site.url)
    assert include.parent.name == "ort-1.31.1"


def test_other_version_never_becomes_another(find, site, tmp_path):
    find(TWINOP_ORT_URL=site.url)  # 1.23.2 lies in the cache
    with pytest.raises(
        SdkError, match=r"libonnxruntime-dev: not tried, TWINOP_ORT_VERSION asks for 1\.24\.4"
    ):
        find(TWINOP_ORT_VERSION="1.24.4", TWINOP_ORT_SHA256="0" * 64)


def test_sha256_malformed(find):
    with pytest.raises(SdkError, match=r"TWINOP_ORT_SHA256=abc: expected 64 hexadecimal digits"):
        find(TWINOP_ORT_SHA256="abc")


def test_aarch64_needs_the_sha256_and_says_so(find, site):
    with pytest.raises(
        SdkError, match=r"release: twinop knows no SHA-256 for onnxruntime-linux-aarch64-1\.23\.2\.tgz"
    ):
        find(machine="aarch64", TWINOP_ORT_URL=site.url)
    assert not site.paths


# ---- Debian ----

SOURCES = """\
Types: deb
# a comment inside the stanza
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/some.gpg
"""
SECURITY = (
    "Types: deb\nURIs: http://mirror.example/debian-security\nSuites: bookworm-security\nComponents: main\n"
)


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for apt-get and dpkg that write what they are given to the returned log."""
    programs, log = tmp_path / "some programs", tmp_path / "apt.log"
    scripts = {
        "apt-get": f"""[ -e '{tmp_path}/fail' ] && {{ echo "E: no route" >&2; exit 100; }}
            [ "$4" = update ] && cat "$3" *.list >>'{log}'
            [ "$4" = download ] && : >"$5_1.2_amd64.deb"; exit 0""",
        "dpkg": """mkdir -p "$3/usr/include/onnxruntime/core" && cd "$3/usr/include/onnxruntime" || exit 1
            echo "#define ORT_API_VERSION 21" >onnxruntime_c_api.h; : >core/other.h""",
    }
    folder(programs, {name: f"#!/bin/sh\n{script}\n".encode() for name, script in scripts.items()})
    for name in scripts:
        (programs / name).chmod(0o755)
    folder(ort_sdk_fetch.APT_ETC, {"sources.list.d/debian.sources": SOURCES.encode()})
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return log


def test_debian_after_the_release(tmp_path, find, apt, capsys):
    include = find()
    assert (include / "core/other.h").is_file() and ort_sdk.api_version(include) == 21
    lines = capsys.readouterr().err.splitlines()
    assert "release: http://127.0.0.1:9/v1.23.2" in lines[2] and "refused" in lines[2]
    assert lines[3] == "ORT SDK: Debian: libonnxruntime-dev of trixie from http://mirror.example/debian"
    assert lines[4] == f"ORT SDK: Debian's libonnxruntime-dev: API 21, {include}"
    log = apt.read_text()
    assert "deb [signed-by=/usr/share/keyrings/some.gpg] http://mirror.example/debian trixie main\n" in log
    for setting in ("sourcelist", "sourceparts", "State::Lists", "Cache"):
        assert f"{setting} " in log  # nothing of the machine's own apt state is written
    apt.unlink()
    assert find() == include
    assert not apt.exists()


def test_debian_after_a_refused_release(find, apt, site, capsys):
    site.content = site.content[:-1] + b"!"
    assert ort_sdk.api_version(find(TWINOP_ORT_URL=site.url)) == 21
    assert f"release: {NAME} refused and removed" in capsys.readouterr().err


def test_debian_not_reached(tmp_path, find, apt):
    (tmp_path / "fail").touch()
    with pytest.raises(SdkError, match=r"libonnxruntime-dev: apt-get update: E: no route"):
        find()


def test_debian_without_mirror(find, apt):
    (ort_sdk_fetch.APT_ETC / "sources.list.d/debian.sources").unlink()
    with pytest.raises(SdkError, match=r"no Debian mirror in .*sources\.list"):
        find()


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"sources.list.d/debian.sources": SECURITY + "\n" + SOURCES}, "http://mirror.example/debian"),
        (
            {"sources.list": "deb http://a.example/debian/ bookworm main contrib\n"},
            "http://a.example/debian/",
        ),
        ({"sources.list": "# deb http://a.example/debian bookworm main\n"}, None),
        ({"sources.list": "deb-src http://a.example/debian bookworm main\n"}, None),
        ({"sources.list": "deb cdrom:[Debian]/ bookworm main\n"}, None),
        ({"sources.list": "deb http://a.example/ubuntu noble main universe\n"}, None),
        ({"sources.list.d/x.sources": SOURCES + "Enabled: no\n"}, None),
        (
            {
                "sources.list.d/a.list": "deb [arch=amd64] https://b.example/debian/12/prod bookworm main\n",
                "sources.list.d/b.list": "deb http://a.example/debian stable main\n",
            },
            "http://a.example/debian",
        ),
        (
            {"sources.list.d/a.list": "deb https://b.example/remote bookworm main # ours\n"},
            "https://b.example/remote",
        ),
    ],
)
def test_debian_mirror(tmp_path, sources, expected):
    etc = folder(tmp_path / "etc", {name: text.encode() for name, text in sources.items()})
    mirror = ort_sdk_fetch.debian_mirror(etc)
    assert (mirror and mirror[0]) == expected


def test_debian_mirror_options(tmp_path):
    line = "deb [arch=amd64 signed-by=/k.gpg trusted=yes] http://a.example/debian bookworm main\n"
    etc = folder(tmp_path / "etc", {"sources.list": line.encode()})
    assert ort_sdk_fetch.debian_mirror(etc) == ("http://a.example/debian", "[signed-by=/k.gpg trusted=yes] ")


# ---- everything failed; the command line ----


def test_everything_failed(find):
    with pytest.raises(SdkError) as error:
        find()
    text = str(error.value)
    for part in ("no ONNX Runtime headers found", "cache: nothing in", f"release: http://127.0.0.1:9/v1.23.2/{NAME}:",
                 "Debian's libonnxruntime-dev: not tried, this machine has no apt-get",
                 f"ORT_ROOT=/path/to/{NAME}", "ORT_ROOT=/usr"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("good", [True, False])
def test_command_line(tmp_path, good):
    root = folder(tmp_path / "a root", files())
    done = subprocess.run(
        [sys.executable, str(Path(ort_sdk.__file__))],
        env={"ORT_ROOT": str(root if good else tmp_path / "none"), "TWINOP_CACHE": str(tmp_path / "c")},
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == (0 if good else 1)
    assert done.stdout == (f"{root}/include\n" if good else "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "ORT SDK: ORT_ROOT=" if good else f"error: ORT_ROOT={tmp_path}/none does not exist."
    )
