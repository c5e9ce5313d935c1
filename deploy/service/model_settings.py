"""The settings of a model: how it is loaded and run."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from .newer_python import StrEnum
from .runtime_options import Value


class Section(BaseModel):
    """A section of twinop.toml, whose values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Provider(StrEnum):
    """What runs a model."""

    AUTO = "auto"  # CUDA if it works, else the CPU; the log and the metadata say which and why
    CPU = "cpu"
    CUDA = "cuda"


def _as_several(value: Any) -> Any:
    return (value,) if isinstance(value, str | Path) else value


def _as_provider(value: Any) -> Any:
    if value not in [*Provider] and not str(value).endswith("ExecutionProvider"):
        raise ValueError(
            "expected 'auto', 'cpu' or 'cuda', or a plugin's name such as OpenVINOExecutionProvider"
        )
    return value


_MOST = 2**31 - 1
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")]


class ModelSettings(Section):
    """How to load and run one model."""

    library: Annotated[tuple[Path, ...], BeforeValidator(_as_several)] = Field(
        (),
        description="a custom-op library, one for each domain; by default from build/, if twinop build "
        "put it there, or from an installed package",
    )
    library_sha256: Annotated[tuple[_Sha256, ...], BeforeValidator(_as_several)] = Field(
        (), description="use libraries only if they have this SHA-256, or one of these"
    )
    provider: Annotated[str, BeforeValidator(_as_provider)] = Field(
        Provider.AUTO,
        description="auto (CUDA if it works), cpu, cuda, or a plugin that is installed, such as "
        "OpenVINOExecutionProvider",
    )
    session: dict[str, Value] = Field(
        default_factory=dict,
        description="options of ONNX Runtime's sessions, such as graph_optimization_level, under its names",
    )
    provider_options: dict[Literal["cuda", "tensorrt"], dict[str, Value]] = Field(
        default_factory=dict,
        description="tables cuda and tensorrt with options of these providers, under ONNX Runtime's names",
    )
    allow_fallback: bool = Field(False, description="run function bodies if the library cannot be used")
    max_batch_size: int = Field(
        0, ge=0, le=_MOST, description="most rows in one batch; 0 never batches requests"
    )
    max_queue_delay_us: int = Field(
        0, ge=0, le=_MOST, description="how long an idle instance waits for more rows"
    )
    max_queue: int = Field(
        256, gt=0, le=_MOST, description="requests that may wait; further ones are refused with 429"
    )
    instances: int = Field(
        1, ge=1, le=64, description="concurrent runs; on CUDA each has its own session and stream"
    )
    run_timeout_seconds: float | None = Field(
        None,
        gt=0,
        description="end a run that takes longer; if it goes on for 5 s, end the server with code 70",
    )
    intra_op_threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="ONNX Runtime's threads for a run on the CPU; 0: one per core of the quota, the "
        "most that a model's own folder gets",
    )
    run_on_event_loop: bool = Field(
        False,
        description="run custom ops, too, on the event loop's thread if that takes less than 50 us; one that "
        "hangs stops the server",
    )
    versions: (
        Annotated[str, StringConstraints(pattern=r"^(all|latest(:[1-9][0-9]*)?)$")]
        | Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(min_length=1)]
    ) = Field("latest", description="the versions to serve: latest, latest:<count>, all, or a list")
    warm_up: dict[str, tuple[Annotated[int, Field(ge=0)], ...]] = Field(
        default_factory=dict,
        description="the shapes of the inputs for the first run; by default dynamic sizes are 1",
    )
    compare_rows: bool = Field(
        True,
        description="compare the rows of a batch with single runs at the load, and join no requests if they "
        "differ",
    )
    compare_bodies: bool = Field(
        True, description="compare the kernels with the model's function bodies before serving it"
    )
    allow_empty: bool = Field(False, description="accept inputs with a dimension of size 0")

    @model_validator(mode="after")
    def _fits(self) -> "ModelSettings":
        if self.max_queue_delay_us and not self.max_batch_size:
            raise ValueError("max_queue_delay_us needs max_batch_size: without it requests are never batched")
        if self.provider_options and self.provider == Provider.CPU:
            raise ValueError("provider_options need provider cuda or auto, not cpu")
        if self.run_on_event_loop and self.run_timeout_seconds is not None:
            raise ValueError(
                "run_on_event_loop and run_timeout_seconds exclude each other: a run on the event loop's "
                "thread cannot be watched"
            )
        return self
