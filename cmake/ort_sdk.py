#!/usr/bin/env python3
"""Find the ONNX Runtime headers that the custom-op library is compiled against.

    python3 cmake/ort_sdk.py      # prints the include directory on stdout, one line per step on stderr

Only headers are needed: a custom-op library gets every function through `OrtApiBase` at run time, and
headers of any release from 1.18 serve every runtime. The standard library is all this file uses, so it runs
before anything is installed. Steps, the first that succeeds wins:

1. ORT_ROOT: a folder or a .tgz, in the release's layout, the source tree's or Debian's. Set and unusable is
   an error, never a reason to go on.
2. The cache: TWINOP_CACHE, else $XDG_CACHE_HOME/twinop, else ~/.cache/twinop.
3. The release tarball, its SHA-256 checked. TWINOP_ORT_VERSION chooses another release and then needs
   TWINOP_ORT_SHA256; TWINOP_ORT_URL names a mirror (the folder that holds v<version>/<file>).
4. Debian's libonnxruntime-dev: downloaded and unpacked, not installed (ort_sdk_fetch.py).
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import platform
import re
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from ort_sdk_fetch import Unavailable, debian_package, download, say

VERSION = "1.23.2"
PINNED_SHA256 = {
    "onnxruntime-linux-x64-gpu-1.23.2.tgz": "2083e361072a79ce16a90dcd5f5cb3ab92574a82a3ce0ac01e5cfa3158176f53"
}
RELEASES = "https://github.com/microsoft/onnxruntime/releases/download"
MINIMUM_API = 18
HEADER = "onnxruntime_c_api.h"
LAYOUTS = (  # where HEADER lies below a root
    "include",  # release tarball
    "include/onnxruntime",  # Debian, installed (ORT_ROOT=/usr), and `cmake --install`
    "include/onnxruntime/core/session",  # source tree
    "usr/include/onnxruntime",  # Debian, unpacked
    ".",  # the include folder itself
)
LIBRARIES = ("lib", "lib64", "lib/*-linux-gnu", "usr/lib/*-linux-gnu")
ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
NAME_MACHINES = {"x64": "x86_64", "x86_64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}


class SdkError(Exception):
    """Nothing to go on with: the message says what was wrong, what was expected and what to do."""


# ---- headers in a folder ----


def find_headers(root: Path) -> Path | None:
    """The folder below `root` that holds the C API header, in any of the known layouts."""
    return next((root / layout for layout in LAYOUTS if (root / layout / HEADER).is_file()), None)


def api_version(include: Path) -> int:
    text = (include / HEADER).read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^\s*#\s*define\s+ORT_API_VERSION\s+(\d+)", text, re.MULTILINE)
    return int(found.group(1)) if found else 0


def checked(include: Path, where: str) -> Path:
    """`include` if its headers are new enough; SdkError otherwise."""
    api = api_version(include)
    if api < MINIMUM_API:
        have = f"declare API {api} (release 1.{api})" if api else "declare no ORT_API_VERSION"
        raise SdkError(
            f"{where}: the headers {have}; twinop needs API {MINIMUM_API} "
            f"(release 1.{MINIMUM_API}) or later. Use release {VERSION}, or unset ORT_ROOT and it is fetched."
        )
    return include


def elf_machine(head: bytes) -> str | None:
    """The architecture an ELF file's first 20 bytes name; None when it is no ELF file."""
    if len(head) < 20 or head[:4] != b"\x7fELF":
        return None
    number = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
    return ELF_MACHINES.get(number, f"ELF machine {number}")


def check_machine(where: str, name: str, libraries: set[str], machine: str) -> None:
    """Refuse an SDK of another architecture: its libraries tell, or its name where it has none."""
    tokens = [NAME_MACHINES[token] for token in re.split(r"[-.]", name) if token in NAME_MACHINES]
    found = libraries or set(tokens)
    if found and machine not in found:
        raise SdkError(
            f"{where} is ONNX Runtime for {', '.join(sorted(found))}, but this machine is {machine}. "
            f"Point ORT_ROOT at the release for {machine}, or unset it."
        )


# ---- ORT_ROOT ----


def from_root(value: str, cache: Path, machine: str) -> Path:
    root, where = Path(value).expanduser().absolute(), f"ORT_ROOT={value}"
    if not root.exists():
        raise SdkError(
            f"{where} does not exist. Expected an unpacked ONNX Runtime release or its .tgz; "
            "correct the path, or unset ORT_ROOT and the headers are fetched."
        )
    if root.is_file():
        return from_tarball(root, cache, where, machine)
    found = find_headers(root)
    if found is None:
        wheel = any((root / inner).is_dir() for inner in ("capi", "onnxruntime/capi"))
        if wheel or {"site-packages", "dist-packages"} & set(root.parts):
            raise SdkError(
                f"{where} is a Python package: the onnxruntime wheels ship no C headers. Unset ORT_ROOT (the "
                f"headers are fetched), or point it at an unpacked onnxruntime-linux-*-{VERSION} release."
            )
        what = f"holds no {HEADER}" if any(root.iterdir()) else "is an empty folder"
        raise SdkError(
            f"{where} {what}. Expected one of {', '.join(f'{layout}/{HEADER}' for layout in LAYOUTS[:-1])} "
            "below it; correct the path, or unset ORT_ROOT and the headers are fetched."
        )
    heads = (
        file.open("rb").read(20)
        for folder in LIBRARIES
        for file in root.glob(f"{folder}/libonnxruntime*.so*")
        if file.is_file()
    )
    check_machine(where, root.name, {arch for head in heads if (arch := elf_machine(head))}, machine)
    return checked(found, where)


def from_tarball(file: Path, cache: Path, where: str, machine: str) -> Path:
    with file.open("rb") as stream:  # by content: another file under the same name is another entry
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    target = cache / f"ort-{digest[:16]}"
    if found := find_headers(target):
        return checked(found, where)
    try:
        return unpack(file, target, where, machine)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        why = str(error).splitlines()[0].rstrip(":")
        raise SdkError(
            f"{where} cannot be read as a tarball ({why}): expected a complete onnxruntime-linux-*.tgz. "
            "Download it again, or unset ORT_ROOT and the headers are fetched."
        ) from error


# ---- the cache ----


def cache_folder(env: Mapping[str, str]) -> Path:
    if chosen := env.get("TWINOP_CACHE"):
        folder = Path(chosen).expanduser().absolute()
    else:
        folder = (
            Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME") or "~").expanduser() / ".cache") / "twinop"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SdkError(
            f"the cache folder {folder} cannot be written ({error.strerror}). "
            "Set TWINOP_CACHE to a folder that you may write."
        ) from error
    return folder


@contextmanager
def filling(target: Path) -> Iterator[Path]:
    """A temporary folder that becomes `target` in one rename when the body succeeds."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        yield new
        shutil.rmtree(target, ignore_errors=True)  # there but without headers: damaged
        new.rename(target)


def unpack(file: Path, target: Path, where: str, machine: str) -> Path:
    """Write the headers of a release tarball, and nothing else of it, to `target`/include."""
    libraries: set[str] = set()
    with filling(target) as new, tarfile.open(file, "r:*") as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts
            if not member.isfile() or not (data := tar.extractfile(member)):
                continue  # links and devices are never needed
            if parts[-1].startswith("libonnxruntime") and ".so" in parts[-1]:
                libraries |= {arch} if (arch := elf_machine(data.read(20))) else set()
            elif parts[-1].endswith((".h", ".hpp")) and "include" in parts[:3] and ".." not in parts:
                out = new / "include" / Path(*parts[parts.index("include") + 1 :])
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_bytes(data.read())
        check_machine(where, file.name, libraries, machine)
        if (found := find_headers(new)) is None:
            raise SdkError(
                f"{where} holds no include/{HEADER}. Expected a release tarball such as "
                f"onnxruntime-linux-x64-gpu-{VERSION}.tgz."
            )
        inner = checked(found, where).relative_to(new)
    return target / inner


def from_cache(cache: Path, version: str, any_version: bool) -> Path:
    for name in (f"ort-{version}", *(["ort-debian"] if any_version else [])):
        if found := find_headers(cache / name):
            return checked(found, str(found))
    raise Unavailable(f"nothing in {cache}")


# ---- the release tarball ----


def release_name(version: str, machine: str) -> str:
    numbers = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", version)
    if not numbers or tuple(map(int, numbers.groups())) < (1, MINIMUM_API, 0):
        raise SdkError(
            f"TWINOP_ORT_VERSION={version}: expected a release such as {VERSION}, 1.{MINIMUM_API}.0 or later."
        )
    if machine != "x86_64":
        return f"onnxruntime-linux-{machine}-{version}.tgz"
    gpu = "gpu" if tuple(map(int, numbers.groups())) < (1, 28, 0) else "gpu_cuda13"
    return f"onnxruntime-linux-x64-{gpu}-{version}.tgz"


def release_sha256(name: str, env: Mapping[str, str]) -> str:
    sha256 = env.get("TWINOP_ORT_SHA256", "").lower() or PINNED_SHA256.get(name)
    if sha256 and not re.fullmatch("[0-9a-f]{64}", sha256):
        raise SdkError(
            f"TWINOP_ORT_SHA256={sha256}: expected 64 hexadecimal digits, as `sha256sum {name}` prints."
        )
    if sha256:
        return sha256
    message = f"twinop knows no SHA-256 for {name}; set TWINOP_ORT_SHA256 to the one its publisher gives"
    if env.get("TWINOP_ORT_VERSION"):
        raise SdkError(
            f"TWINOP_ORT_VERSION={env['TWINOP_ORT_VERSION']}: {message}, or unset TWINOP_ORT_VERSION."
        )
    raise Unavailable(message)


def from_release(cache: Path, version: str, url: str, sha256: str, machine: str) -> Path:
    name = url.rpartition("/")[2]
    part = cache / f"{name}.part"
    download(url, part)
    with part.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha256").hexdigest()
    if actual != sha256:
        part.unlink()  # never resumed, never unpacked
        raise Unavailable(f"{name} refused and removed: its SHA-256 is {actual}, expected {sha256}")
    found = unpack(part, cache / f"ort-{version}", name, machine)
    part.unlink()
    return found


# ---- Debian ----


def from_debian(cache: Path) -> Path:
    target = cache / "ort-debian"
    with tempfile.TemporaryDirectory(prefix="twinop-apt-") as temporary:
        if (found := find_headers(debian_package(Path(temporary)))) is None:
            raise Unavailable(f"the package holds no {HEADER}")
        with filling(target) as new:
            shutil.copytree(found, new / "include")
    return checked(target / "include", "Debian's libonnxruntime-dev")


# ---- all of it ----


def resolve(env: Mapping[str, str], machine: str | None = None) -> Path:
    """The include directory. Raises SdkError with one message that says what to do."""
    machine = (
        NAME_MACHINES.get(platform.machine().lower(), platform.machine()) if machine is None else machine
    )
    cache = cache_folder(env)
    if root := env.get("ORT_ROOT"):
        found = from_root(root, cache, machine)
        say(f"ORT_ROOT={root}: API {api_version(found)}, {found}")
        return found
    say("ORT_ROOT: not set")
    wanted = env.get("TWINOP_ORT_VERSION", "")
    version = wanted or VERSION
    name = release_name(version, machine)
    url = f"{env.get('TWINOP_ORT_URL', RELEASES).rstrip('/')}/v{version}/{name}"

    def debian() -> Path:
        if wanted:
            raise Unavailable(f"not tried, TWINOP_ORT_VERSION asks for {wanted}")
        return from_debian(cache)

    steps: dict[str, Callable[[], Path]] = {
        "cache": lambda: from_cache(cache, version, any_version=not wanted),
        "release": lambda: from_release(cache, version, url, release_sha256(name, env), machine),
        "Debian's libonnxruntime-dev": debian,
    }
    failures = []
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds, one download
        for step, run in steps.items():
            try:
                found = run()
            except Unavailable as why:
                failures.append(f"{step}: {why}")
                say(failures[-1])
            else:
                say(f"{step}: API {api_version(found)}, {found}")
                return found
    raise SdkError(
        "no ONNX Runtime headers found. Tried:\n  "
        + "\n  ".join(failures)
        + f"\nWhat to do: run again with network access; or download {url} on another machine and set "
        f"ORT_ROOT=/path/to/{name}; or install libonnxruntime-dev (Debian 13 or later) and set ORT_ROOT=/usr."
    )


def main() -> int:
    try:
        print(resolve(os.environ))
    except (SdkError, OSError) as error:  # OSError: a full disk, an unreadable folder
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
