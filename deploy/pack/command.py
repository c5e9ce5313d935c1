"""Defines the command `twinop pack`."""

import inspect
from typing import Any

from twinop.cli.console import clear_errors, err, out, print_note, progress_bar

from .options import Options


def main(**given: Any) -> None:
    """Pack a model and its custom-op library for deployment.

    Writes a repository of models for twinop serve: the model, its data, its
    libraries, and settings with their checksums. With --triton it writes one for
    Triton. The model is opened once with its library, so that a model that does
    not load here is refused. The folder is written whole or not at all. With
    --genai it optimises a folder of onnxruntime-genai, and puts the library into
    it. examples/serving has a Dockerfile and manifests for Kubernetes.

    Examples:

        twinop pack custom_relu.onnx -o repo/

        twinop pack model.onnx -o repo/ --name ranker --version 3
        --max-batch-size 64 --gpu

        twinop pack model.onnx -o triton/ --triton

        twinop pack --genai genai_model/ -o fast/ --device cuda
    """
    with clear_errors():
        # Imported late, because --help needs no ONNX Runtime.
        from .packing import MODELS_IN_CONTAINER, TRITON_IMAGE, pack, pack_genai

        options = Options(**given)
        if options.genai:
            with progress_bar("loading") as progress:
                report = pack_genai(options, progress)
            out.print(str(report), soft_wrap=True)
            return
        packed = pack(options)
    output = options.output
    archs = f" (code for compute capability {packed.cuda_archs})" if packed.cuda_archs else ""
    place = f"a GPU{archs}" if packed.gpu else "the CPU"
    nodes = ", ".join(packed.custom_nodes) or "none, so no library is needed"
    lines = [f"{output}: {packed.name}, version {options.version}, for {place}; custom nodes: {nodes}"]
    for each, there, digest in zip(
        packed.libraries, packed.library_paths, packed.library_sha256, strict=True
    ):
        lines.append(f"library {each.path}, in the container {there}, SHA-256 {digest}")
    out.print("\n".join(lines), soft_wrap=True)
    if packed.note:
        print_note(packed.note)
    command = f"twinop serve {output}/models --allow-model-libraries"
    if options.triton:
        mount = f"-v {output.resolve()}/models:{MODELS_IN_CONTAINER}:ro"
        gpus = "--gpus all " if packed.gpu else ""
        ports = " ".join(f"-p 127.0.0.1:{port}:{port}" for port in (8000, 8001, 8002))
        server = f"{TRITON_IMAGE} tritonserver --model-repository={MODELS_IN_CONTAINER}"
        command = f"docker run --rm {gpus}-e ORT_DISABLE_TELEMETRY=1 {ports} {mount} {server}"
    err.print(command, soft_wrap=True)


main.__signature__ = inspect.signature(Options)  # type: ignore[attr-defined]
