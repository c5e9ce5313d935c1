"""Compares forms of a model, or of a part of it, with the original: in fp32, and in 16 bits."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import inf

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from twinop.deploy.ort_runs import NotRunnable, has_wrong_types
from twinop.errors import ExportError, TwinopError, option
from twinop.model.weights import narrow
from twinop.record.tolerance import MAX_USABLE_ERROR

from . import decoders, equivalence
from .inputs import hides_end
from .segments import Part
from .sliced import run_any as run
from .source import Form, Source
from .widen import round_results

DEFECT = "this is a defect of twinop, please report it"
UNKNOWN = f"it may be rounding, or ONNX Runtime {ort.__version__}; otherwise {DEFECT}"


@dataclass
class Comparison:
    """An original in fp32, inputs for it, and what it computes for them."""

    source: Source
    model: ir.Model  # the original, or an extracted part of it
    original: Form  # the same as it runs
    reference: equivalence.Reference
    part: Part | None = None  # which part it is; None for the whole
    last: Form | None = None  # the form that ran last

    def __post_init__(self) -> None:
        self.noise, self.library = cache(self._noise), self.source.user_ops.libraries or None

    def _noise(self, chosen: tuple[int, ...]) -> equivalence.Errors:
        nudged = self.source.form(equivalence.nudge_weights(self.model.clone()))
        return equivalence.noise(nudged.what, self.library, self.reference.some(chosen))

    def check(self, result: Form, dtype: str = "float32") -> float:
        """Returns the error of a form that computes in fp32; `dtype`: the coarsest one of its inputs and
        outputs. NotEquivalent: it fails, or the error is too large."""
        assert not self.is_forgotten
        self.last = result
        # Else a rewrite is the cause; no file in 16 bits has this form.
        may_skip = bool(self.reference.note) or self.source.dtype is not ir.DataType.FLOAT
        try:
            cases = self._narrowed(result, self.reference.cases)
            answer = run(result.what, self.library, cases, may_skip=may_skip)
        except NotRunnable as reason:
            raise equivalence.NotEquivalent(f"cannot be run on the CPU: {reason}") from reason
        except TwinopError as failure:
            raise equivalence.NotEquivalent(f"fails: {failure}") from failure
        self.note = answer.note
        self.source.registered = answer.libraries or self.source.registered
        return self.reference.check(self.reference.errors(answer.outputs), self.noise, dtype)

    def forget(self) -> None:
        """Frees the inputs and outputs; `is_forgotten` then."""
        self.reference = replace(self.reference, cases=[], outputs=[], edge=[])

    @property
    def is_forgotten(self) -> bool:
        return not self.reference.cases

    def check_16_bits(self, result: Form, plain: ir.Model | None, plain_form: Form | None) -> float | None:
        """Compares a form in 16 bits, and the original in 16 bits, with the original in fp32.

        Args:
            plain, plain_form: the original in 16 bits, and as it runs; None where it is not known.

        Returns the error; None where it does not run, with `note`. The original has its own in `own_error`.

        Raises:
            ExportError: the original has no usable result in 16 bits, or a value no known dtype.
            NotEquivalent: the error is too large, or the form fails and the original in 16 bits does not.
        """
        report, self.note = self.source.report, ""
        self.own_error: float | None = None
        # The result of a row of which a mask hides everything is the mean of all values only if the mask's
        # lowest number absorbs every score, as in fp32. The comparison in fp32 has these cases. A window may
        # have nothing but new tokens that are hidden.
        ends = (0, -1) if decoders.is_decoder(self.model) else (0,)
        reference = self.reference.without(lambda case: hides_end(case, ends))
        if not reference.typical:
            self.note = "compared in its fp32 form: all inputs have a mask that hides the first or last token"
            return None
        reference = equivalence.with_ids(self.original.what, self.model, self.library, reference)
        for note in reference.skipped:
            report.add_note(note)
        try:
            errors, note = self._errors_in(result, reference)
            self.note = f"the new file: {note}" if note else ""
        except NotRunnable as refused:
            self.note = f"compared in its fp32 form: {refused}, so the CPU does not run the file"
            return None
        except TwinopError as failure:
            self.note = self._note_on(failure, plain_form, reference)
            return None
        is_sure = self.source.options.dtype is None and not reference.beyond_rounding(errors, report.dtype)
        noise = self._noise_in_16_bits(plain, plain_form, reference, not is_sure)
        self._require_fitting(noise, reference)
        reference.check(errors, lambda chosen: [noise[index] for index in chosen], report.dtype)
        return reference.largest(errors)

    def _note_on(
        self, failure: TwinopError, plain_form: Form | None, reference: equivalence.Reference
    ) -> str:
        """Returns the note on a form in 16 bits that fails as the original in 16 bits does."""
        text = str(failure).splitlines()[0]
        if has_wrong_types(failure):
            reason = text.rpartition("Type Error: ")[2].rstrip(".")
            raise ExportError(
                f"{option('dtype', self.source.report.dtype)}: the dtypes of some values are not known, so "
                f"they could not be converted ({reason}). Leave out {option('dtype')}, or declare these "
                "values (value_info)"
            ) from failure
        with suppress(NotRunnable, TwinopError):
            if plain_form is not None:
                self._errors_in(plain_form, reference)
                raise equivalence.NotEquivalent(f"fails: {text}")
        return f"compared in its fp32 form: {text}"

    def _noise_in_16_bits(
        self, plain: ir.Model | None, form: Form | None, reference: equivalence.Reference, rounds: bool
    ) -> equivalence.Errors:
        """Returns the errors of the original in 16 bits; if it does not run, or `rounds`, also with rounded
        results: ONNX Runtime's CPU computes much in fp32. Edge cases that overflow inside have infinity."""
        runs = list[equivalence.Errors]()
        for is_rounded in (False, True):
            if runs and not rounds:
                break
            try:
                if plain is None or form is None:
                    raise NotRunnable("unknown")
                what = self.source.form(round_results(plain.clone())) if is_rounded else form
                errors, _ = self._errors_in(what, reference, not is_rounded)
            except (NotRunnable, TwinopError):
                continue
            if not is_rounded or reference.largest(errors) <= MAX_USABLE_ERROR:
                runs.append(errors)
        if not runs:
            known = [0.0] * reference.typical + [inf] * len(reference.edge)
            return [[error] * len(row) for error, row in zip(known, reference.outputs, strict=True)]
        largest = [*map(reference.largest, runs)]
        self.own_error = max((each for each in largest if each <= MAX_USABLE_ERROR), default=largest[0])
        if rounds and equivalence.has_steps(self.model):
            return self._noise_of_steps(runs, reference)
        return equivalence.largest_of(runs)

    def _noise_of_steps(
        self, runs: list[equivalence.Errors], reference: equivalence.Reference
    ) -> equivalence.Errors:
        """Returns the noise of an original that rounds to a few numbers itself, of each case that of all: 16
        bits move few numbers to the next one, in some cases none, and those by much."""
        by = float(ml_dtypes.finfo(self.source.dtype.numpy()).eps) / 2
        nudged = self.source.form(equivalence.nudge_weights(self.model.clone(), by))
        runs = [*runs, equivalence.noise(nudged.what, self.library, reference, by)]
        noise = np.array(equivalence.largest_of(runs))
        most = np.where(noise == inf, 0, np.minimum(noise, MAX_USABLE_ERROR)).max(0)
        found: equivalence.Errors = np.where(noise == inf, inf, most).tolist()
        return found

    def _require_fitting(self, noise: equivalence.Errors, reference: equivalence.Reference) -> None:
        """Raises ExportError if the original has no usable result in 16 bits, also for some ids only."""
        own, where, typical = self.own_error or 0.0, "", reference.typical
        is_asked = self.source.options.dtype is not None
        if own <= MAX_USABLE_ERROR and self.own_error is not None and is_asked:
            for name, row in zip(reference.edge, noise[typical:], strict=True):
                if name.startswith(equivalence.IDS) and max(row, default=0.0) > own:
                    own, where = max(row), f" for {name}"
        if own > MAX_USABLE_ERROR:
            raise ExportError(
                f"the original in {self.source.report.dtype} has a relative error of {own:.1e}{where}: its "
                "values exceed the range or precision of the dtype. Keep float32, or try the other 16-bit one"
            )

    def _narrowed(self, form: Form, cases: Sequence[Mapping[str, np.ndarray]]) -> list[equivalence.Case]:
        """Returns inputs in the dtypes of a form."""
        kinds = form.dtypes
        return [
            {n: narrow(a, kinds[n]) if a.dtype == np.float32 and n in kinds else a for n, a in case.items()}
            for case in cases
        ]

    def _errors_in(
        self, form: Form, reference: equivalence.Reference, optimize: bool = True
    ) -> tuple[equivalence.Errors, str]:
        """Returns the errors of a form in 16 bits, infinite for edge cases that it does not run, and the note
        on its run."""
        may_skip = optimize and bool(self.reference.note)  # as the original in fp32
        cases, required = self._narrowed(form, reference.cases), reference.typical
        options = {"optimize": optimize, "may_skip": may_skip}
        answer = run(form.what, self.library, cases, required=required, **options)
        return reference.errors(answer.outputs, self.source.dtype), answer.note
