"""Judges packages of ops, libraries and a model. Each check is a function from facts to findings."""

from collections.abc import Iterator
from itertools import groupby

from twinop.built import changed_since
from twinop.find import package_key
from twinop.library import Library, in_use

from ..check_nodes import misfits
from ..cuda import has_code_for
from .facts import Environment, Gpu
from .finding import Finding, Level, error, from_message, ok, old_driver, one_line, warning

_BUILD = "build the library again"


def check_packages(facts: Environment) -> Iterator[Finding]:
    for domain, group in groupby(facts.packages, lambda package: package.domain):
        packages = list(group)
        names = " and ".join(f"{package.name} {package.version}" for package in packages)
        if len(packages) > 1:
            yield error(
                "packages",
                f"{names} both have ops of the domain {domain}",
                f"pip uninstall {packages[-1].name}, or name the library to use with --library",
            )
        else:
            yield ok("packages", f"{names} has ops of the domain {domain}")


def check_libraries(facts: Environment) -> Iterator[Finding]:
    for message in facts.broken:
        level: Level = "error" if facts.named and message.startswith(str(facts.named)) else "warning"
        yield from_message(level, "library", message, "copy or build it again, or remove it")
    wanted = [library for library in facts.libraries if library.path == facts.named] + _chosen(facts)
    nodes = {node.node_type for node in facts.model.nodes} if facts.model is not None else set()
    for library in facts.libraries:
        fits_torch_only = library.domain in _domains(facts) and not library.exports_ort
        if facts.model is not None and library not in wanted and not fits_torch_only:
            continue
        level = "error" if library in wanted else "warning"
        dtypes = {
            dtype
            for record in library.records.values()
            for each in record.combinations
            for dtype in each.values()
        }
        count = len(library.by_onnx_name)
        yield ok(
            "library",
            f"{library.path}: domain {library.domain} {library.domain_version}, twinop {library.version}, "
            f"{count} op{'s' * (count != 1)} for {', '.join(sorted(dtypes))}, GPU code for "
            f"{library.cuda_archs or 'none'}",
        )
        if said := changed_since(library.path):
            yield from_message("warning", "library", said, _BUILD)
        if facts.model is not None and library.path == facts.named and not in_use([library], nodes):
            cure = f"leave it out, or name the library of {', '.join(sorted(_domains(facts))) or 'its nodes'}"
            yield warning("library", f"{library.path}: no node of {facts.model.name} uses it", cure)
        if not library.exports_ort:
            yield Finding(
                level,
                "library",
                f"{library.path} does not export RegisterCustomOps: ONNX Runtime cannot load it",
                "link libtwinop_ort.a into it: twinop build does so",
            )
        for gpu in dict.fromkeys(facts.gpus):
            yield from _library_and_gpu(level, library, gpu)
        if library.cuda_archs not in ("", "none"):
            yield from old_driver(facts, library.path.name, library.cuda_version, f"{_BUILD} with CUDA {{}}")


def _library_and_gpu(level: Level, library: Library, gpu: Gpu) -> Iterator[Finding]:
    cure = f"{_BUILD} with twinop build --archs {gpu.capability}"
    if library.cuda_archs in ("", "none"):
        yield warning("library", f"{library.path} was built without CUDA: its ops run on the CPU", cure)
    elif not has_code_for(library.cuda_archs, gpu.capability):
        yield Finding(
            level,
            "library",
            f"{library.path} has GPU code for {library.cuda_archs}, and {gpu.name} is "
            f"compute_{gpu.capability}: no kernel image is available for execution on the device",
            cure,
        )


def check_model(facts: Environment) -> Iterator[Finding]:
    if facts.model_problem:
        yield from_message("error", "model", facts.model_problem, "export it again")
    if facts.model is not None:
        imports = facts.model.proto.opset_import
        opsets = ", ".join(dict.fromkeys(f"{each.domain or 'ai.onnx'} {each.version}" for each in imports))
        nodes = sorted({f"{node.domain}::{node.op_type}" for node in facts.model.nodes})
        yield ok("model", f"{facts.model.name}: {opsets}; custom nodes: {', '.join(nodes) or 'none'}")


def check_opsets(facts: Environment) -> Iterator[Finding]:
    if facts.model is None or facts.runtime is None or not facts.runtime.model_problem:
        return
    yield error(
        "model",
        f"onnxruntime {facts.runtime.version} does not run its opsets (format "
        f"{facts.model.proto.ir_version}): "
        f"{one_line(facts.runtime.model_problem)}",
        "export it again with --opset 20, or pip install -U a newer onnxruntime",
    )


def check_nodes(facts: Environment) -> Iterator[Finding]:
    if facts.model is None:
        return
    chosen = _chosen(facts)
    for domain in _domains(facts) - {library.domain for library in chosen}:
        ops = {node.node_type for node in facts.model.nodes if node.domain == domain}
        names = ", ".join(sorted(name for _, name in ops))
        package = facts.model.metadata.get(package_key(domain))
        install = f"pip install {package}" if package else "install the package that has it"
        cure = f"{install}, build it (twinop build), or name its library"
        if ops <= facts.model.bodies:
            text = f"no library of the domain {domain}: {names} runs on function bodies, which is slower"
            yield warning("model", text, cure)
        else:
            yield error("model", f"no library of the domain {domain}, which has {names}", cure)
    for library in chosen:
        used = {node.node_type for node in facts.model.nodes if node.domain == library.domain}
        lacking = {op for _, op in used & facts.model.bodies} - library.by_onnx_name.keys()
        if lacking:
            names = ", ".join(sorted(lacking))
            text = f"{library.path} does not have {names}: function bodies run, which is slower"
            yield warning("model", text, "name a library that has it, or build it (twinop build)")
    without_body = (node for node in facts.model.nodes if node.node_type not in facts.model.bodies)
    if inside := [node for node in without_body if " in function " in node.label]:
        text = f"{inside[0].label}: ONNX Runtime infers few types in functions, and may refuse the model"
        yield warning("model", text, "twinop.export.attach_bodies puts such functions into the graph")
    problems = misfits(facts.model, chosen)
    for problem in problems:
        yield from_message("error", "model", problem, "export the model again, or use a library that has it")
    for library in chosen:
        if not problems:
            yield ok("model", f"its nodes of {library.domain} fit {library.path}")


def _domains(facts: Environment) -> set[str]:
    return {node.domain for node in facts.model.nodes} if facts.model is not None else set()


def _chosen(facts: Environment) -> list[Library]:
    """Returns for each domain of the model the named library, or the first that has most of the ops."""
    found = []
    for domain in sorted(_domains(facts)):
        assert facts.model is not None
        ops = {node.op_type for node in facts.model.nodes if node.domain == domain}
        usable = [each for each in facts.libraries if each.domain == domain and each.exports_ort]
        named = [each for each in usable if each.path == facts.named]
        if usable:
            found.append(max(named or usable, key=lambda each: len(ops & each.by_onnx_name.keys())))
    return found
