"""For the tests of cmake/ort_sdk.py: folders and tarballs laid out as ONNX Runtime's releases are."""

import io
import os
import tarfile
from pathlib import Path

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


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != "lock")
