"""Optimises a folder of onnxruntime-genai, the one that `og.Model` opens.

The decoder's model is optimised. Everything else goes along as it is, but for genai_config.json, whose
session options of the decoder get the library. genai takes one library, in the folder: where a model needs
several, a small one is compiled that registers them.
"""

import errno
import glob
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import onnx
from onnx import external_data_helper

from twinop import deploy
from twinop.deploy.choose_library import library_paths, refused
from twinop.deploy.custom_nodes import tensors
from twinop.errors import ExportError, LibraryError
from twinop.libraries.library import find_library, read_library
from twinop.record.op_spec import DOMAIN
from twinop.system.publish import MANIFEST, replace_folder, work_folder
from twinop.system.regular_file import read_regular

from .load import read_proto
from .optimizer import chosen_device, optimize
from .report import OptimizeReport
from .source import FLOAT8

CONFIG = "genai_config.json"
REPORT = "twinop-report.json"
_ADAPTER = re.compile(r"lora_[ab]\b|lora_[ab](?=[._/])", re.IGNORECASE)  # as peft names its matrices
_MOST_BYTES = 1 << 20  # of that file
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
    allow_model_libraries: bool = False,
    **options: Any,
) -> OptimizeReport:
    """Optimises a folder of onnxruntime-genai, and writes another one, whole or not at all.

    Args:
        source: the folder with genai_config.json.
        target: the folder to write; it may not exist, or is empty.
        device: what the decoder runs on, "cuda" or "cpu"; by default "cuda" where genai_config.json names it,
            else what this machine has. The other one's provider options are removed.
        library: as in `optimize`.
        allow_model_libraries: whether to load the library of the folder that genai_config.json names.
        options: of `optimize`.

    Raises:
        ExportError: the folder is not genai's, the target exists, or the decoder cannot be optimised (again).
    """
    source, target = Path(source), Path(target).resolve()
    chosen = chosen_device(device)
    config = _read(source / CONFIG)
    files = _files(source, target)
    decoder = _decoder(source, config)
    model = source / decoder["filename"]
    settings = decoder.setdefault("session_options", {})
    entries = [each for each in settings.get("provider_options", []) if "cuda" in map(str.lower, each)]
    is_cuda = entries or options.get("invariant") or options.get("dtype") == FLOAT8
    device = "cuda" if device is None and is_cuda else chosen
    own = [*library_paths(library), *_named_library(source, settings, library, allow_model_libraries)]
    search = {"num_beams": 1} | config.get("search", {})  # with several genai's caches grow
    options |= {"device": device, "library": own or None, "allow_model_libraries": allow_model_libraries}
    options["shared_caches"] = search["num_beams"] == 1 and bool(search.get("past_present_share_buffer"))
    left_out = _left_out(source, files, decoder)
    if options.get("dry_run"):
        return optimize(model, target / decoder["filename"], **options)
    entries = entries or [{"cuda": {"enable_cuda_graph": "0"}}]
    settings["provider_options"] = entries if device == "cuda" else []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with work_folder(target.parent) as scratch:
            (folder := scratch / "new").mkdir()
            _copy(source, folder, [each for each in files if source / each not in left_out])
            written = folder / decoder["filename"]
            written.parent.mkdir(parents=True, exist_ok=True)
            report = optimize(model, written, **options)
            for file in (written, *written.parent.glob(f"{glob.escape(written.stem)}.*.data")):
                shutil.copymode(model, file)
            _finish(source, folder, files, config, report)
            replace_folder(folder, target)
    except OSError as error:
        raise ExportError(f"{target}: cannot be written: {error}. Name another folder") from error
    report.path = target / decoder["filename"]
    return report


def _left_out(source: Path, files: Sequence[Path], decoder: dict[str, Any]) -> set[Path]:
    """Returns the files that are written anew, and renames the decoder's if others read its data;
    ExportError: the decoder has ops of CUDA, or adapters."""
    model = source / decoder["filename"]
    proto = read_proto(model)
    _require_no_ops_of_cuda(model, proto)
    _require_no_adapters(source, files, proto)
    data = _data_of(model, proto)
    of_others = _data_of_others(source, model)
    if data & of_others:  # whose new data has another name
        decoder["filename"] = str(Path(decoder["filename"]).with_suffix(".twinop.onnx"))
    return {model, *(data - of_others), *(source / each for each in (CONFIG, MANIFEST, REPORT))}


def _finish(source: Path, folder: Path, files: Sequence[Path], config: Any, report: OptimizeReport) -> None:
    """Places libraries, writes genai_config.json and the report, and gives folders their permissions."""
    settings = config["model"]["decoder"]["session_options"]
    settings.pop(_LIBRARY, None)
    if report.libraries:
        settings[_LIBRARY] = _place_libraries(report.libraries, folder)
    for name, text in ((CONFIG, json.dumps(config, indent=4)), (REPORT, report.to_json())):
        (folder / name).write_text(f"{text}\n", encoding="utf-8")
        shutil.copymode(source / CONFIG, folder / name)
    for each in reversed(files):  # in the end, because a folder may be read-only
        if (folder / each).is_dir() and not (folder / each).is_symlink():
            (folder / each).chmod(stat.S_IMODE((source / each).stat().st_mode) | stat.S_IRWXU)


def _read(path: Path) -> Any:
    try:
        config = json.loads(read_regular(path, _MOST_BYTES))
        json.dumps(config, indent=4)  # it is not too deep to be written
        return config
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ExportError(
            f"{path}: no such file. Expected the folder that onnxruntime-genai's builder wrote. `twinop "
            "optimize` also takes one .onnx file"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ExportError(f"{path}: cannot be read: {error}. Build the folder again") from error


def _files(source: Path, target: Path) -> list[Path]:
    """Returns all files, links and folders of a folder, relative to it. ExportError: a link leads out of the
    folder or to nothing, a file is not a regular one, or the target exists or lies inside."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(f"{target}: exists already. Name a new folder, or an empty one")
    if target.is_relative_to(source.resolve()):
        raise ExportError(f"{target}: lies inside the source folder. Choose one outside {source}")
    found, root = list[Path](), os.path.realpath(source)

    def refuse(error: OSError) -> None:
        raise ExportError(f"{source}: cannot be copied to {target}: {error}. Fix or remove it") from error

    for place, folders, names in os.walk(source, onerror=refuse):
        for each in (Path(place, name) for name in (*folders, *names)):
            found.append(each.relative_to(source))
            kind = each.lstat().st_mode
            if stat.S_ISLNK(kind):
                to = os.readlink(each)
                if os.path.isabs(to) or not Path(os.path.realpath(each)).is_relative_to(root):
                    raise ExportError(
                        f"{each}: a link that leads out of the folder, to {to}. twinop reads and copies what "
                        f"is in the folder: copy it with its files first (cp -rL {source} copy)"
                    )
                if not os.path.exists(each):
                    refuse(FileNotFoundError(errno.ENOENT, "No such file or directory", str(each)))
            elif not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
                refuse(OSError(errno.EINVAL, "a pipe, a socket or a device", str(each)))
    return found


def _copy(source: Path, folder: Path, files: Sequence[Path]) -> None:
    """Copies files as what they are, links as links, with the permissions that they have."""
    for each in files:
        if (source / each).is_symlink():
            (folder / each).symlink_to(os.readlink(source / each))
        elif (source / each).is_dir():
            (folder / each).mkdir()
        else:
            shutil.copy(source / each, folder / each)


def _require_inside(folder: Path, name: str, what: str) -> Path:
    """Returns the file of a name in genai_config.json; ExportError: it is not in the folder."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not name.isprintable():
        raise ExportError(
            f"{folder / CONFIG}: its {what} {json.dumps(name)[:200]} is not in the folder. Copy it there"
        )
    return folder / path


def _decoder(folder: Path, config: Any) -> dict[str, Any]:
    """Returns the decoder's part of a genai_config.json; ExportError: there is none, or an entry of another
    kind."""
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
    _require_inside(folder, decoder["filename"], "decoder")
    return decoder


def _named_library(
    folder: Path, settings: dict[str, Any], library: deploy.Libraries, allow_model_libraries: bool
) -> list[Path]:
    """Returns the library that the session options name already, unless the user names one in its place;
    ExportError: it may not be loaded, or is not twinop's: its ops would be lost or cannot be compared."""
    if not settings.get(_LIBRARY):
        return []
    path = _require_inside(folder, settings[_LIBRARY], "library")
    try:
        domain = read_library(path).domain
    except LibraryError as error:
        raise ExportError(
            f"{folder / CONFIG}: {_LIBRARY} already names {settings[_LIBRARY]}, and genai loads one library. "
            f"twinop can combine only libraries that `twinop build` made, and this one was not: {error}"
        ) from error
    if domain in (read_library(each).domain for each in library_paths(library)):
        return []
    if domain == DOMAIN:  # the one of this installation has its ops
        return [find_library("custom_ops")]
    if not allow_model_libraries:
        raise ExportError(str(refused(path)))
    return [path]


def _require_no_ops_of_cuda(model: Path, proto: onnx.ModelProto) -> None:
    ops = {"CustomAttentionCached", "CustomLinearQ", "CustomLinearQSwiglu", "CustomLinearW8"}
    if found := ops.intersection(node.op_type for node in proto.graph.node):
        raise ExportError(
            f"{model}: has {', '.join(sorted(found))}: twinop has optimised it for cuda already. Give the "
            "folder that onnxruntime-genai's builder wrote"
        )


def _require_no_adapters(folder: Path, files: Sequence[Path], proto: onnx.ModelProto) -> None:
    """Raises ExportError if genai adds LoRA adapters to the weights while it runs."""
    found = [str(each) for each in files if each.suffix == ".onnx_adapter"]
    names = [value.name for value in proto.graph.input]
    found += [f"input {name} of the decoder" for name in names if _ADAPTER.search(name)]
    if found:
        raise ExportError(
            f"{folder}: has LoRA adapters ({found[0]}), which genai adds to the weights while it runs. "
            "twinop fuses matmuls of constant weights: merge the adapter into them (merge_and_unload of "
            "peft), and build the folder again"
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
        (folder / path.name).unlink(missing_ok=True)  # it may be a link to another file
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
            f"genai loads one library, and the model needs {', '.join(names)}. twinop compiles a library "
            f"that registers them, but {command[0]} cannot be run: {error.strerror}. Install a C compiler, "
            "or set CC to one"
        ) from error
    if done.returncode:
        raise ExportError(f"{command[0]} fails: {done.stderr.strip()[-500:]}")
    return _JOINED
