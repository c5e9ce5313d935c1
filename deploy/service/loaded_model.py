"""A version of a model that is ready to run, and how clients see it."""

from dataclasses import dataclass
from typing import Any

from ..plugins import taken_text
from ..tensor_specs import Spec
from .datatypes import datatype_of
from .instance import Instance, without_paths
from .model_settings import ModelSettings


@dataclass
class LoadedModel:
    """A version that is ready to run.

    Attributes:
        session: the first one; its inputs are those that clients may send.
        instances: each runs one batch at a time.
        fallback: why function bodies run instead of the libraries, or None.
        custom_nodes: the ops that the libraries' kernels run, such as "CustomRelu x3".
        body_nodes: the ops that function bodies run.
        difference: how far kernels and function bodies differ in the first run; None if not compared.
        steady: the run time depends on the shapes of the inputs alone, not on their values.
        rows_independent: requests may share a run: each row of the outputs depends on the same row of the
            inputs alone.
        refused: why the first run at guessed sizes failed, or "".
        note: what a user should know about how it runs, or "".
    """

    name: str
    version: int
    settings: ModelSettings
    session: Any  # a Session, until `close`
    instances: list[Instance]
    fallback: str | None
    custom_nodes: tuple[str, ...]
    body_nodes: tuple[str, ...]
    difference: str | None = None
    load_seconds: float = 0.0
    steady: bool = False
    rows_independent: bool = True
    refused: str = ""
    note: str = ""

    def summary(self) -> str:
        """Return what runs the model, and what was checked of it, in a line."""
        parts = [f"runs on {self.session.device} ({self.session.reason})"]
        if self.session.taken:
            parts.append(taken_text(self.session.taken))
        if self.session.libraries:
            paths = ", ".join(str(library.path) for library in self.session.libraries)
            parts.append(f"{', '.join(self.custom_nodes)} from {paths}")
            parts.append(f"SHA-256 {', '.join(self.session.checksums)}")
            parts.append(f"difference from the function bodies: {self.difference or 'not compared'}")
        if self.body_nodes:
            parts.append(f"on function bodies: {', '.join(self.body_nodes)}")
        return "; ".join([*parts, *filter(None, [self.note])])

    def describe(self) -> dict[str, Any]:
        """Return the inputs and outputs as the protocol lists them, and `parameters`: how the model runs."""
        parameters: dict[str, str | int | float] = {
            "device": self.session.device,
            "device_reason": without_paths(self.session.reason),
            "custom_nodes": ", ".join(self.custom_nodes),
            "function_body_nodes": ", ".join(self.body_nodes),
            "fallback": without_paths(self.fallback or ""),
            "difference_from_function_bodies": self.difference or "",
            "max_batch_size": self.settings.max_batch_size,
            "instances": self.settings.instances,
            "load_seconds": round(self.load_seconds, 3),
        }
        if libraries := self.session.libraries:
            parameters["library"] = ", ".join(library.path.name for library in libraries)
            parameters["library_version"] = ", ".join(library.version for library in libraries)
            parameters["library_sha256"] = ", ".join(self.session.checksums)
        return {
            "inputs": [_described(spec) for spec in self.session.inputs.values()],
            "outputs": [_described(spec) for spec in self.session.outputs.values()],
            "parameters": parameters,
        }

    def close(self) -> None:
        """Free the sessions. ONNX Runtime writes its profiles."""
        self.session = None
        for instance in self.instances:
            instance.close()


def _described(spec: Spec) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else -1 for size in spec.shape or (-1,)]
    return {
        "name": spec.name,
        "datatype": datatype_of(spec.numpy_dtype),
        "shape": shape if spec.shape != () else [],
    }
