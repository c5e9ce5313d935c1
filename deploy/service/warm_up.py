"""Run a model before it is served: warm it up, and compare its kernels with its function bodies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from twinop.record.tolerance import MAX_USABLE_ERROR, accepted, described_error, difference, nudged, scale_of

from ..errors import ModelError
from ..tensor_specs import Spec, named_sizes
from .errors import ServiceError
from .instance import Instance, LoadedModel
from .settings import ModelSettings, SettingsError


@dataclass(frozen=True)
class WarmupInputs:
    """Inputs for a first run. If `guessed`, some sizes are unknown and may not fit the model."""

    feeds: dict[str, np.ndarray]
    guessed: bool

    @property
    def shapes(self) -> str:
        """The inputs' names and shapes, for messages."""
        return ", ".join(f"{name} {list(array.shape)}" for name, array in self.feeds.items()) or "no inputs"


def make_warmup_inputs(
    inputs: Mapping[str, Spec], required: Sequence[Spec], settings: ModelSettings
) -> WarmupInputs | None:
    """Make inputs of the shapes in `settings.warm_up`, and otherwise of the model's with 1 for dynamic sizes.

    None if the rank of an input is unknown. SettingsError: warm_up does not fit the model.
    """
    shapes = settings.warm_up
    for name, shape in shapes.items():
        if name not in inputs:
            raise SettingsError(f"warm_up names {name!r}; the model's inputs: {', '.join(inputs)}")
        if not inputs[name].accepts(shape):
            raise SettingsError(f"warm_up: {inputs[name].mismatch(inputs[name].dtype, shape)}")
    sizes = named_sizes(inputs, shapes)
    random = np.random.default_rng(0)
    feeds, guessed = {}, False
    for spec in inputs.values():
        if spec.name in shapes:
            feeds[spec.name] = spec.random(shapes[spec.name], random)
        elif spec in required:
            if (smallest := spec.sized(sizes, 1)) is None:
                return None
            guessed |= any(not isinstance(size, int) and size not in sizes for size in spec.shape or ())
            feeds[spec.name] = spec.random(smallest, random)
    return WarmupInputs(feeds, guessed)


def warm_up(
    model: str, loaded: LoadedModel, instances: Sequence[Instance], warmup: WarmupInputs
) -> dict[str, np.ndarray] | str:
    """Run each instance, also at the largest batch size, to allocate its memory; return the outputs.

    ModelError: a run fails. At guessed sizes, which need not be the model's, the message is returned.
    """
    found: dict[str, np.ndarray] = {}
    outputs, most, runs = list(loaded.session.outputs), loaded.settings.max_batch_size, [[warmup.feeds]]
    if most and warmup.feeds:
        runs.append([{name: np.repeat(array[:1], most, 0) for name, array in warmup.feeds.items()}])
    for parts in runs:
        for instance in instances:
            try:
                result = instance.run(parts, outputs)
            except ServiceError as error:
                shapes = warmup.shapes if not found else f"{most} rows"
                said = f"{model}: its first run, at {shapes}, failed: {error}"
                if warmup.guessed and not found:
                    return said
                raise ModelError(said) from error
            found = found or result
    return found


def joined_differently(instance: Instance, warmup: WarmupInputs, outputs: Sequence[str], device: str) -> str:
    """Run two rows together and each alone. Return how the answers differ, or "" if they do not."""
    rows = [{name: array[:1] for name, array in warmup.feeds.items()}]
    rows.append({name: np.flip(array) for name, array in rows[0].items()})
    try:
        alone = [instance.run([feeds], outputs) for feeds in rows]
    except ServiceError:  # one row is not among the sizes that the model takes
        return ""
    try:
        together = instance.run(rows, outputs)
    except ServiceError as error:
        return f"two rows at once fail: {error}"
    for name, value in together.items():
        expected = [each[name] for each in alone]
        if value.shape[:1] != (2,) or any(each.shape != (1, *value.shape[1:]) for each in expected):
            return f"output {name} has shape {list(value.shape)} for two rows"
        reference = np.concatenate(expected)

        def noise(name: str = name, reference: np.ndarray = reference) -> float:
            near = [instance.run([_nudged(feeds, device)], [name])[name] for feeds in rows]
            error = difference(reference, np.concatenate(near))
            # Rows of mere rounding errors show nothing: they are not joined.
            return error if error <= MAX_USABLE_ERROR else 0.0

        if said := _apart(reference, value, device, noise)[2]:
            return f"output {name} differs: {said}"
    return ""


def compared(
    model: str, warmup: WarmupInputs, found: Mapping[str, np.ndarray], bodies: Instance, device: str
) -> str:
    """Return how far kernels and bodies differ, in words; ModelError: too far; ServiceError: no body runs."""
    expected = bodies.run([warmup.feeds], list(found))
    worst, limit = 0.0, 0.0
    for name, value in found.items():

        def noise(name: str = name) -> float:
            return difference(expected[name], bodies.run([_nudged(warmup.feeds, device)], [name])[name])

        apart, allowed, said = _apart(expected[name], value, device, noise)
        if said:
            raise ModelError(
                f"{model}: the library's kernels and the model's function bodies disagree in output {name} "
                f"(at {warmup.shapes}): {said}. The library is damaged, or not the one that the "
                "model was exported with; compare_bodies=false serves the model anyway"
            )
        if apart >= worst:
            worst, limit = apart, allowed
    return f"{worst:.1e} of the largest value, accepted {limit:.0e}" if worst else "none"


def _apart(
    expected: np.ndarray, value: np.ndarray, device: str, noise: Callable[[], float]
) -> tuple[float, float, str]:
    """Return the difference, the accepted one, and what is wrong, or "".

    On CUDA, fp32 matrix products use TF32, which has the 10-bit mantissa of fp16. `noise` is called if the
    difference is not that of rounding: it returns that of `nudged` inputs.
    """
    dtype = "float16" if device != "cpu" and value.dtype == np.float32 else value.dtype.name
    apart, limit = difference(expected, value), accepted(dtype)
    if not apart <= limit:
        limit = accepted(dtype, noise(), scale_of(expected) or 1.0)
    return apart, limit, "" if apart <= limit else described_error(expected, apart, limit)


def _nudged(feeds: Mapping[str, np.ndarray], device: str) -> dict[str, np.ndarray]:
    tf32 = 0.0 if device == "cpu" else 2.0**-10
    return {name: nudged(array, tf32 if array.dtype == np.float32 else 0.0) for name, array in feeds.items()}
