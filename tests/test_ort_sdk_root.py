"""cmake/ort_sdk.py with ORT_ROOT: the folders and tarballs it takes, and what it says of all others."""

import subprocess
import sys
from pathlib import Path

import ort_sdk
import pytest
from ort_sdk import SdkError
from ort_sdk_files import CODES, FLAT, elf, files, folder, header, leftovers, tarball
from ort_sdk_fixtures import find_fixture, machine_without_network, site_fixture  # noqa: F401  (fixtures)


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
