"""A change of a written file is found without that its layer is compared in all ways.

The layers of a decoder are of one kind, of which one layer is compared in all ways. The others run in a
stream, and their bytes are compared: that finds each of these mutations.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import onnx_ir as ir
import pytest
from decoder_graphs import Sizes, write
from mutations import MUTATIONS, Mutated

from twinop.optimize import decoders, optimize_folder, segments, verifier
from twinop.optimize.equivalence import NotEquivalent
from twinop.optimize.load import load

SIZES = Sizes(width=256, inner=256, vocab=512, context=64, table=512)
LAYERS, CHANGED = 4, 1
MOST_BYTES = 600 << 10  # of a layer in fp16
BYTES = {
    "one scale or weight off", "two layers exchanged", "one row of q, k and v exchanged", "one norm's gain",
    "one norm's eps", "one row of the embedding", "one column of the head",
}  # fmt: skip

Optimised = Callable[[str], tuple[Path, Callable[[Path], None]]]


@pytest.fixture(scope="module")
def optimised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Optimised]:
    """Returns a decoder's optimised file, and what compares all segments of a file with the original's."""
    made = dict[str, tuple[Path, Callable[[Path], None]]]()
    run = verifier.Verifier._run_segments

    def optimise(precision: str) -> tuple[Path, Callable[[Path], None]]:
        if precision not in made:
            folder, kept = tmp_path_factory.mktemp(precision), list[tuple[verifier.Verifier, ir.Model]]()

            def remember(
                self: verifier.Verifier,
                parts: Sequence[segments.Segment],
                original: ir.Model,
                written: ir.Model,
            ) -> None:
                kept.append((self, original))
                run(self, parts, original, written)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(verifier.Verifier, "_run_segments", remember)
                source = write(folder / "old", SIZES, precision, LAYERS)
                report = optimize_folder(source, folder / "new", device="cuda")
            assert report.fused["attention over a cache"] == LAYERS and not report.reverted
            [(used, original)] = kept

            def verify(path: Path) -> None:
                decoders.make_runnable(written := load(path))
                parts = verifier.cut(original, written)
                verifier.check_weights(original, written, parts)
                run(used, parts, original, written)

            made[precision] = folder / "new/model.onnx", verify
        return made[precision]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifier, "cut", partial(segments.cut, most_bytes=MOST_BYTES))
        yield optimise


@pytest.mark.parametrize("precision", ["float16", "int4"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_found(name: str, precision: str, optimised: Optimised, tmp_path: Path) -> None:
    path, verify = optimised(precision)
    model = Mutated(path)
    MUTATIONS[name](model, CHANGED)
    model.save(tmp_path / "model.onnx")
    with pytest.raises(NotEquivalent) as found:
        verify(tmp_path / "model.onnx")
    assert str(found.value).startswith("differs in ") or name not in BYTES, found.value


@pytest.mark.parametrize("precision", ["float16", "int4"])
def test_the_same_file_passes(precision: str, optimised: Optimised, tmp_path: Path) -> None:
    path, verify = optimised(precision)
    Mutated(path).save(tmp_path / "model.onnx")
    verify(tmp_path / "model.onnx")
