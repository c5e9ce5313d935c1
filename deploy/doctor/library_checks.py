"""Judges packages of ops, libraries and a model. Each check is a function from facts to findings."""

from collections.abc import Iterator
from itertools import groupby

from twinop.libraries.built import changed_since
from twinop.libraries.find import package_key
from twinop.libraries.library import in_use

from ..check_nodes import misfits
from .facts import Environment
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
        asked = facts.model is not None or message.startswith(str(facts.named))
        level: Level = "error" if asked else "warning"
        message = message.replace("(--library ", "(twinop doctor MODEL ")
        yield from_message(level, "library", message, "copy or build it again, or remove it")
    nodes = {node.node_type for node in facts.model.nodes} if facts.model is not None else set()
    for library in facts.libraries:
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
        if facts.model is not None and not in_use([library], nodes):
            text = f"{library.path}: no node of {facts.model.name} uses it"
            yield warning("library", text, "leave it out, or name the library of its nodes")
        if not library.exports_ort:
            yield warning(
                "library",
                f"{library.path} does not export RegisterCustomOps: ONNX Runtime cannot load it",
                "link libtwinop_ort.a into it: twinop build does so",
            )
        if library.cuda_archs not in ("", "none"):
            yield from old_driver(facts, library.path.name, library.cuda_version, f"{_BUILD} with CUDA {{}}")


def check_model(facts: Environment) -> Iterator[Finding]:
    if facts.model_problem:
        yield from_message("error", "model", facts.model_problem, "export it again")
    if facts.model is not None:
        imports = facts.model.proto.opset_import
        opsets = ", ".join(dict.fromkeys(f"{each.domain or 'ai.onnx'} {each.version}" for each in imports))
        nodes = sorted({"::".join(node.node_type) for node in facts.model.nodes})
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
    known = {(library.domain, op) for library in facts.libraries for op in library.by_onnx_name}
    for domain, op in sorted({node.node_type for node in facts.model.nodes} & facts.model.bodies - known):
        package = facts.model.metadata.get(package_key(domain))
        install = f"pip install {package}" if package else "install the package that has it"
        text = f"no library has {domain}::{op}: its function body runs, which is slower"
        yield warning("model", text, f"{install}, build it (twinop build), or name its library")
    without_body = (node for node in facts.model.nodes if node.node_type not in facts.model.bodies)
    if inside := [node for node in without_body if " in function " in node.label]:
        text = f"{inside[0].label}: ONNX Runtime infers few types in functions, and may refuse the model"
        yield warning("model", text, "twinop.export.attach_bodies puts such functions into the graph")
    problems = list(misfits(facts.model, facts.libraries))
    for problem in problems:
        yield from_message("error", "model", problem, "export the model again, or use a library that has it")
    for library in facts.libraries:
        if not problems:
            yield ok("model", f"its nodes of {library.domain} fit {library.path}")
