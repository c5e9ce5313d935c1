"""cmake/ort_sdk.py without ORT_ROOT: the cache, the release (a local HTTP server stands in for its site) and
Debian's package (shell scripts stand in for apt-get and dpkg): no test here uses the network."""

import hashlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import ort_sdk
import ort_sdk_fetch
import pytest
from ort_sdk import SdkError, find_headers
from ort_sdk_files import FLAT, NAME, files, folder, header, leftovers, tarball
from ort_sdk_fixtures import find_fixture, machine_without_network, site_fixture  # noqa: F401  (fixtures)

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


# ---- everything failed ----


def test_everything_failed(find):
    with pytest.raises(SdkError) as error:
        find()
    text = str(error.value)
    for part in ("no ONNX Runtime headers found", "cache: nothing in", f"release: http://127.0.0.1:9/v1.23.2/{NAME}:",
                 "Debian's libonnxruntime-dev: not tried, this machine has no apt-get",
                 f"ORT_ROOT=/path/to/{NAME}", "ORT_ROOT=/usr"):  # fmt: skip
        assert part in text
