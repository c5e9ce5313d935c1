"""Optimises a folder of onnxruntime-genai, the one that `og.Model` opens.

The decoder's model is optimised. Everything else goes along as it is, but for genai_config.json, whose
session options of the decoder get the library. genai takes one library, in the folder: where a model needs
several, a small one is compiled that registers them.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import onnx
from onnx import external_data_helper

from twinop import deploy
from twinop.deploy.choose_library import library_paths
from twinop.deploy.custom_nodes import tensors
from twinop.deploy.pack.options import MANIFEST
from twinop.errors import ExportError, LibraryError
from twinop.library import read_library

from .load import read_proto
from .optimizer import chosen_device, optimize
from .report import OptimizeReport

CONFIG = "genai_config.json"
_LIBRARY = "custom_ops_library"
_DECODER = ".model.decoder"
_KINDS = {
    "": dict, ".search": dict, ".model": dict, _DECODER: dict, f"{_DECODER}.filename": str,
    f"{_DECODER}.session_options": dict, f"{_DECODER}.session_options.{_LIBRARY}": str,
    f"{_DECODER}.session_options.provider_options": list,
}  # fmt: skip
_TEXTS: dict[type, str] = {dict: "an object", str: "a text", list: "a list"}
_JOINED = "libtwinop_genai.so"
_JOINS = """#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
typedef void* (*Register)(void*, const void*);
typedef struct { void* (*create_status)(int, const char*); } Api; /* the first function of OrtApi */
typedef struct { const Api* (*get_api)(unsigned); } Base;
void* RegisterCustomOps(void* options, const void* base) {
  static const char* const names[] = {NAMES, 0};
  char path[4096];
  Dl_info self;
  dladdr((void*)&RegisterCustomOps, &self);
  const char* slash = strrchr(self.dli_fname, '/');
  const int length = slash != 0 ? (int)(slash - self.dli_fname) + 1 : 0;
  for (int i = 0; names[i] != 0; ++i) {
    snprintf(path, sizeof path, "%.*s%s", length, self.dli_fname, names[i]);
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    Register add = library != 0 ? (Register)dlsym(library, "RegisterCustomOps") : 0;
    if (add == 0) return ((const Base*)base)->get_api(1)->create_status(1, dlerror());
    void* status = add(options, base);
    if (status != 0) return status;
  }
  return 0;
}
"""


def optimize_folder(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    device: str | None = None,
    library: deploy.Libraries = None,
    **options: Any,
) -> OptimizeReport:
    """Optimises a folder of onnxruntime-genai, and writes another one, whole or not at all.

    Args:
        source: the folder with genai_config.json.
        target: the folder to write; it may not exist, or is empty.
        device: what the decoder runs on, "cuda" or "cpu"; by default "cuda" where genai_config.json names it,
            else what this machine has. The other one's provider options are removed.
        library: as in `optimize`. A library that genai_config.json names already is used, too.
        options: of `optimize`.

    Raises:
        ExportError: the folder is not genai's, the target exists, or the decoder cannot be optimised, or is
            already.
    """
    source, target = Path(source), Path(target).resolve()
    chosen = chosen_device(device)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(f"{target}: exists already. Name a new folder, or an empty one")
    if target.is_relative_to(source.resolve()):
        raise ExportError(f"{target}: is in the folder that it is made of. Name one outside {source}")
    config = _read(source / CONFIG)
    decoder = _decoder(source, config)
    model = source / decoder["filename"]
    settings = decoder.setdefault("session_options", {})
    entries = [each for each in settings.get("provider_options", []) if "cuda" in map(str.lower, each)]
    device = "cuda" if device is None and (entries or options.get("invariant")) else chosen
    own = [*library_paths(library), *_named_library(source, settings)]
    proto = read_proto(model)
    _require_no_ops_of_cuda(model, proto)
    data = _data_of(model, proto)
    of_others = _data_of_others(source, model)
    if data & of_others:  # whose new data has another name
        decoder["filename"] = str(Path(decoder["filename"]).with_suffix(".twinop.onnx"))
    left_out = {model, *(data - of_others), source / CONFIG, source / MANIFEST}

    def ignored(place: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(place, name) in left_out]

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".twinop-genai-", dir=target.parent) as scratch:
            folder = Path(scratch) / "new"
            shutil.copytree(source, folder, ignore=ignored, copy_function=shutil.copyfile)
            (folder / decoder["filename"]).parent.mkdir(parents=True, exist_ok=True)
            search = config.get("search", {})  # with several beams genai's caches grow
            shares = bool(search.get("past_present_share_buffer") and search.get("num_beams", 1) == 1)
            options |= {"shared_caches": shares, "device": device, "library": own or None}
            report = optimize(model, folder / decoder["filename"], **options)
            settings.pop(_LIBRARY, None)
            if report.libraries:
                settings[_LIBRARY] = _place_libraries(report.libraries, folder)
            entries = entries or [{"cuda": {"enable_cuda_graph": "0"}}]
            settings["provider_options"] = entries if device == "cuda" else []
            (folder / CONFIG).write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")
            if target.exists():
                target.rmdir()
            folder.rename(target)
    except shutil.Error as error:  # of files, such as a link to nothing
        reason = error.args[0][0][-1]
        raise ExportError(f"{source}: cannot be copied to {target}: {reason}. Mend or remove that") from error
    except OSError as error:
        raise ExportError(f"{target}: cannot be written: {error}. Name another folder") from error
    report.path = target / decoder["filename"]
    return report


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ExportError(
            f"{path}: no such file. Expected the folder that onnxruntime-genai's builder wrote. `twinop "
            "optimize` also takes one .onnx file"
        ) from error
    except (OSError, ValueError) as error:
        raise ExportError(f"{path}: cannot be read: {error}. Build the folder again") from error


def _decoder(folder: Path, config: Any) -> dict[str, Any]:
    """Returns the decoder's part of a genai_config.json.

    Raises:
        ExportError: there is none, or an entry of another kind.
    """
    for entry, kind in _KINDS.items():
        *parents, name = entry.split(".")
        place = reduce(lambda found, each: found.get(each, {}), parents, {"": config})
        if not isinstance(found := place.get(name, kind()), kind):
            raise ExportError(
                f"{folder / CONFIG}: {entry[1:] or 'it'} is {json.dumps(found)[:40]}; expected "
                f"{_TEXTS[kind]}. Build the folder again"
            )
    decoder: dict[str, Any] = config.get("model", {}).get("decoder", {})
    for each in decoder.get("session_options", {}).get("provider_options", []):
        if not isinstance(each, dict):
            raise ExportError(
                f"{folder / CONFIG}: provider_options has {json.dumps(each)[:40]}; expected objects with a "
                "provider's name each. Build the folder again"
            )
    if not decoder.get("filename") or decoder.get("pipeline"):
        raise ExportError(
            f"{folder / CONFIG}: has no model.decoder.filename; twinop optimises decoders of one model"
        )
    file = folder / decoder["filename"]
    if not file.resolve().parent.is_relative_to(folder.resolve()) and not file.is_symlink():
        raise ExportError(f"{folder / CONFIG}: its decoder {file} is not in the folder. Put it there")
    return decoder


def _named_library(folder: Path, settings: dict[str, Any]) -> list[Path]:
    """Returns the library that the session options name already, if there is one.

    Raises:
        ExportError: it is not twinop's, so its ops would be lost or cannot be compared.
    """
    if not settings.get(_LIBRARY):
        return []
    path = folder / settings[_LIBRARY]
    try:
        read_library(path)
    except LibraryError as error:
        raise ExportError(
            f"{folder / CONFIG}: names {settings[_LIBRARY]} as {_LIBRARY} already, and genai takes one. "
            f"twinop joins libraries that `twinop build` made, and this is none: {error}"
        ) from error
    return [path]


def _require_no_ops_of_cuda(model: Path, proto: onnx.ModelProto) -> None:
    ops = {"CustomAttentionCached", "CustomLinearQ", "CustomLinearQSwiglu"}
    if found := ops.intersection(node.op_type for node in proto.graph.node):
        raise ExportError(
            f"{model}: has {', '.join(sorted(found))}: twinop has optimised it for cuda already. Give the "
            "folder that onnxruntime-genai's builder wrote"
        )


def _data_of(model: Path, proto: onnx.ModelProto) -> set[Path]:
    """Returns the files of a model's external data."""
    found = filter(external_data_helper.uses_external_data, tensors(proto))
    return {model.parent / external_data_helper.ExternalDataInfo(tensor).location for tensor in found}


def _data_of_others(folder: Path, model: Path) -> set[Path]:
    """Returns the files of external data that a folder's other models read, such as those of embeddings."""
    found = set[Path]()
    for path in folder.rglob("*.onnx"):
        if path != model and path.is_file():
            with suppress(ExportError):  # genai may never open it
                found |= _data_of(path, read_proto(path))
    return found


def _place_libraries(libraries: Sequence[Path], folder: Path) -> str:
    """Copies libraries into the folder, and returns the name of the one that registers all of them."""
    names = [path.name for path in libraries]
    if len({*names, _JOINED}) <= len(names):
        raise ExportError(f"{', '.join(map(str, libraries))}: have one name. Rename one (twinop build -o)")
    for path in libraries:
        shutil.copyfile(path, folder / path.name)
    if len(names) == 1:
        return names[0]
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    text = _JOINS.replace("NAMES", ", ".join(map(json.dumps, names)))
    command = [compiler or "cc", "-shared", "-fPIC", "-O1", "-w", "-x", "c", "-", "-o", str(folder / _JOINED)]
    try:
        done = subprocess.run([*command, "-ldl"], input=text, capture_output=True, text=True)
    except OSError as error:
        raise ExportError(
            f"genai takes one library, and the model needs {', '.join(names)}. A small one that registers "
            f"them has to be compiled, and {command[0]} cannot be run: {error.strerror}. Install a C "
            "compiler, or name one with CC"
        ) from error
    if done.returncode:
        raise ExportError(f"{command[0]} fails: {done.stderr.strip()[-500:]}")
    return _JOINED
