"""Compares every constant of a written file with the source, by NumPy code that knows no rewrite.

A constant of a segment's result must be what constants of the same segment of the original are, one after
the other: their numbers in the result's dtype, the transpose of a matrix, rows or columns where the original
itself splits, or these times a norm's gain or a batch norm's scale. Samples of the numbers show which it may
be; then all numbers are compared, a tile at a time.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, compress
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from twinop.model.weights import same
from twinop.system.progress import Progress, silent

from .equivalence import NotEquivalent
from .segments import Segment, extract
from .weight_pool import Constant, Pool, cast, constants, eps_of, is_float, norm_eps, pool_of, to_array

_TILE, _PADDING = 512, 32  # padding keeps the lines of a tile apart in the cache
_SAMPLES, _LIKE, _MOST = 64, 1 / 32, 0.5  # most of a sample that differs little: what is searched
_SHORT = 32  # elements: fewer are alike by chance
_REPEATED = 1 << 16  # bytes of one number again and again

Lines = tuple["_Piece", np.ndarray]  # what the original has, and what the result has in its place


class _Differs(Exception):
    """A constant is one of the original's but for some of its numbers; the text says where."""


@dataclass(frozen=True)
class _Piece:
    """Lines of a constant of the original, perhaps times numbers that broadcast."""

    source: Constant
    axis: int
    start: int
    of: int  # lines that the constant has
    lines: np.ndarray
    factor: np.ndarray | None = None
    slack: float | None = None  # as that of a constant

    def expected(self, rows: Any, columns: Any, dtype: np.dtype) -> np.ndarray:
        """Computes some of the numbers."""
        found = cast(_apart(self.lines[rows, columns]), dtype)
        if self.factor is None:
            return found
        factor = np.broadcast_to(self.factor, self.lines.shape)[rows, columns]
        return np.asarray((found.astype(np.float32) if found.itemsize < 4 else found) * factor).astype(dtype)

    def likeness(self, found: np.ndarray) -> float:
        """Returns the share of a sample that is alike; zeros only count where there is nothing else."""
        rows, columns = _sample(found.shape)
        expected, given = self.expected(rows, columns, found.dtype), found[rows, columns]
        is_alike = _near(expected, given, _LIKE) if is_float(found) else expected == given
        counts = (expected != 0) | (given != 0)
        return float(is_alike[counts].mean() if counts.any() else is_alike.mean())

    def first_difference(self, found: np.ndarray) -> int | None:
        """Returns the first of its lines that differs, or None."""
        count, width = found.shape
        is_plain = self.lines.flags.c_contiguous and found.flags.c_contiguous
        step, across = (max(_TILE * _TILE // width, 1), width) if is_plain else (_TILE, _TILE)
        for i in range(0, count, step):
            wrong = np.zeros(min(step, count - i), bool)
            for j in range(0, width, across):
                place, bits = (slice(i, i + step), slice(j, j + across)), f"u{found.itemsize}"
                expected, given = self.expected(*place, found.dtype), found[place]
                if self.slack is None:
                    agrees = expected.view(bits) == given.view(bits)
                else:
                    agrees = _near(expected, given, 2 * float(ml_dtypes.finfo(found.dtype).eps), self.slack)
                wrong |= ~agrees.all(1)
            if wrong.any():
                return i + int(wrong.argmax())
        return None


def check_weights(
    source: ir.Model, written: ir.Model, segments: Sequence[Segment], progress: Progress = silent
) -> list[str]:
    """Compares all constants of a result, read again, with those in the original's file, segment by segment.

    Returns the names of those that the original computes in a way that is not known here. Where there are
    such, also those of the original's weights in the same segment that no other constant holds.

    Raises:
        NotEquivalent: a constant of the result has other numbers than the original's, or one is missing. Or a
            norm has another eps, which shows in no result: it is far smaller than what it is added to.
    """
    originals = [extract(source, each.original) for each in segments]
    parts = [extract(written, each.result) for each in segments]
    pools, results = [*map(pool_of, originals)], [*map(constants, parts)]
    eps = [*map(eps_of, originals)]
    total, done = sum(each.nbytes for found in results for each in found.values()), 0
    unexplained, known = list[str](), dict[int, list[_Piece]]()
    for index, (segment, found) in enumerate(zip(segments, results, strict=True)):
        if others := norm_eps(parts[index]).difference(*eps[max(index - 1, 0) : index + 2]):
            raise NotEquivalent(f"differs in {segment.name}: the original has no eps of {min(others):g}")
        pool = pools[index].with_rows(pools[max(index - 1, 0) : index + 2])
        keys, foreign = {each.key for each in pool.constants}, pools[:index] + pools[index + 1 :]
        missing, held = list[str](), list[_Piece]()
        for value, tensor in found.items():
            progress("checking the weights", done, total)
            done += tensor.nbytes
            pieces = known.get(id(tensor))
            if pieces is None or not keys.issuperset(each.source.key for each in pieces):
                try:
                    pieces = _check(to_array(tensor), pool, foreign)
                except _Differs as reason:
                    raise NotEquivalent(f"differs in {segment.name}: {value.name} {reason}") from None
            if pieces is not None:
                known[id(tensor)] = pieces
            missing += [str(value.name)] if pieces is None else []
            held += pieces or []
        required = [each for each in pools[index].constants if each.is_required]
        unused = [each.name for each in required if not _is_held(each, held)]
        if unused and not missing:
            raise NotEquivalent(f"differs in {segment.name}: it lacks {unused[0]}, or a part of it")
        unexplained += [*missing, *unused]
    return [*dict.fromkeys(unexplained)]


def check_quantized(source: ir.Model, written: ir.Model, sources: Mapping[str, tuple[str, bool]]) -> None:
    """Compares all constants of a file in 8 bits with those of the file in 16 bits that it was made of;
    NotEquivalent: one differs. `sources`: of the output of each matmul in 8 bits its weight, and whether e4m3
    has the transpose."""
    before = {str(value.name): tensor for value, tensor in constants(source).items()}
    after = {str(value.name): tensor for value, tensor in constants(written).items()}
    checked = set[str]()
    for node in written.graph:  # not by constant: matmuls may share one, such as the scales of w and of -w
        weight, is_turned = sources.get(str(node.outputs[0].name), ("", False))
        if not weight:
            continue
        place = 2 if node.op_type == "CustomLinearFp8" else 1
        name, of_rows = (str(each.name) for each in node.inputs[place : place + 2] if each is not None)
        matrix = to_array(before[weight])
        if not _is_e4m3(to_array(after[name]), to_array(after[of_rows]), matrix.T if is_turned else matrix):
            raise NotEquivalent(f"differs: {name} is not what the file in 16 bits has")
        checked |= {name, of_rows} - before.keys()
    for name in after.keys() - checked:  # the others: as they were, or the bias of a matmul that had none
        is_equal = same(before[name], after[name]) if name in before else not to_array(after[name]).any()
        if not is_equal:
            raise NotEquivalent(f"differs: {name} is not what the file in 16 bits has")


def _is_e4m3(found: np.ndarray, scales: np.ndarray, matrix: np.ndarray) -> bool:
    """Whether rows in e4m3, times their scales, are nearest to those of a matrix; of two the even ones."""
    rows, is_equal = max(_TILE * _TILE // matrix.shape[1], 1), True
    for start in range(0, len(matrix), rows):
        part = np.ascontiguousarray(_apart(matrix[start : start + rows])).astype(np.float32)
        sizes = np.abs(part)
        given = np.fmax(sizes.max(1), np.float32(2.0**-60)) / np.float32(448)
        sizes = np.minimum(sizes * (np.float32(1) / given)[:, None], np.float32(448))
        bits = sizes.view(np.uint32)  # 8 bits of exponent, 3 that e4m3 has, 20 others
        normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3)
        code = np.where(sizes < 2.0**-6, np.rint(sizes * 2.0**9), normal).astype(np.uint8)
        code |= np.signbit(part).astype(np.uint8) << 7
        is_equal &= np.array_equal(scales[start : start + rows], given)
        is_equal &= np.array_equal(found[start : start + rows].view(np.uint8), code)
    return is_equal


def _check(found: np.ndarray, pool: Pool, foreign: Sequence[Pool]) -> list[_Piece] | None:
    """Returns what of the original a constant is, or None; raises _Differs if it is almost that."""
    if found.size < 2 or found.dtype.kind == "b" or (found.dtype.kind in "iu" and found.itemsize > 1):
        return []  # it counts by value where kinds of segments are told apart
    differs = None
    for is_turned in (False, True) if found.ndim == 2 else (False,):
        try:
            if (pieces := _explain(found, pool, is_turned)) is not None:
                return pieces
        except _Differs as reason:
            differs = differs or reason
    if found.nbytes <= _REPEATED and (found == found.flat[0]).all():
        return []  # such as the gain of a norm that had none
    if differs is not None:
        raise differs
    others = Pool([each for pool in foreign for each in pool.constants], [])
    if (elsewhere := _explain(found, others, False)) is not None:
        raise _Differs(f"is {elsewhere[0].source.name}, which belongs to another part of the original")
    if found.ndim == 1 and found.size >= _SHORT:
        odd = np.flatnonzero(found != np.sort(found)[found.size // 2])
        if odd.size < _LIKE * found.size:  # such as a bias where there was none
            raise _Differs(f"is the same number again and again, but for element {odd[0]}")
    return None


def _explain(found: np.ndarray, pool: Pool, is_turned: bool) -> list[_Piece] | None:
    """Returns the pieces of the original that follow each other along the first or, turned, the last axis."""
    at, pieces, different = 0, list[_Piece](), ""
    while at < found.size:
        for piece, lines in _candidates(found, at, is_turned, pool):
            row = piece.first_difference(lines)
            if row is None:
                pieces.append(piece)
                at += lines.size
                break
            is_computed = found.ndim == 1 and found.itemsize > 2
            if is_computed and replace(piece, slack=0.0).first_difference(lines) is None:
                return None  # numbers in fp32 that were computed in another order
            if lines.size >= _SHORT:
                different = different or f"differs from {piece.source.name} in line {row}"
        else:
            zeros = _zeros(found, at, pool)
            if not zeros and (different or any(len(each.lines) == each.of for each in pieces)):
                raise _Differs(different or f"holds nothing of the original from element {at} on")
            if not zeros:
                return None
            at += zeros
    return pieces


def _candidates(found: np.ndarray, at: int, is_turned: bool, pool: Pool) -> Iterator[Lines]:
    """Yields what may stand at an element of a constant, with the lines there; the largest first."""
    yield from _copies(found, at, is_turned, pool)
    whole = [each for each in pool.constants if each.array.size == found.size and not at]
    others = [each for each in pool.constants if each.array.size != found.size or at]
    for group in (whole, others):
        for is_scaled in (False, True) if is_float(found) else (False,):
            pieces = [piece for each in group for piece in _pieces(found.dtype, each)]
            placed = [(each, _lines(found, at, is_turned, each.lines.shape)) for each in pieces]
            pairs: Iterable[Lines] = ((piece, lines) for piece, lines in placed if lines is not None)
            if is_scaled:
                pairs = chain.from_iterable(_scaled(*each, pool) for each in pairs)
            scored = [(piece.likeness(lines), piece, lines) for piece, lines in pairs]
            scored.sort(key=lambda each: (-each[2].size, -each[0]))
            yield from ((piece, lines) for score, piece, lines in scored if score >= _MOST)


def _copies(found: np.ndarray, at: int, is_turned: bool, pool: Pool) -> Iterator[Lines]:
    """Yields the pieces that agree in a sample of their numbers: most are, and need no search among all."""
    if found.dtype not in pool.samples:
        pool.samples[found.dtype] = _samples(pool, found.dtype)
    for shape, pieces in pool.samples[found.dtype].items():
        lines = _lines(found, at, is_turned, shape)
        if lines is not None:
            yield from ((piece, lines) for piece in pieces.get(lines[_sample(shape)].tobytes(), ()))


def _samples(pool: Pool, dtype: np.dtype) -> dict[tuple[int, int], dict[bytes, list[_Piece]]]:
    """Returns all pieces in a dtype by their shapes, the largest first, and by a sample of their numbers."""
    found = defaultdict[tuple[int, int], dict[bytes, list[_Piece]]](lambda: defaultdict(list))
    for source in pool.constants:
        for piece in _pieces(dtype, source):
            shape = (len(piece.lines), piece.lines.shape[1])
            found[shape][piece.expected(*_sample(shape), dtype).tobytes()].append(piece)
    return {shape: found[shape] for shape in sorted(found, key=prod, reverse=True)}


def _pieces(dtype: np.dtype, source: Constant) -> Iterator[_Piece]:
    """Yields the pieces of a constant of the original that a constant of a dtype may hold."""
    is_wanted = source.array.dtype.kind in "fV" if dtype.kind in "fV" else dtype == source.array.dtype
    for axis, view in source.views() if is_wanted else ():
        for start, stop in source.spans(len(view)):
            yield _Piece(source, axis, start, len(view), view[start:stop], slack=source.slack)


def _lines(found: np.ndarray, at: int, is_turned: bool, shape: tuple[int, int]) -> np.ndarray | None:
    """Returns the lines of a constant that begin at an element, if it has room for so many there."""
    (count, width), size = shape, prod(shape)
    if (is_turned and found.shape[0] != width) or not min(_SHORT, found.size) <= size <= found.size - at:
        return None
    return found.T[at // width :][:count] if is_turned else found.reshape(-1)[at : at + size].reshape(shape)


def _scaled(piece: _Piece, lines: np.ndarray, pool: Pool) -> Iterator[Lines]:
    """Yields a piece times the rows of numbers that it may have been multiplied by."""
    rows, columns = _sample(lines.shape)
    before, after = (each.astype(np.float64) for each in (piece.lines[rows, columns], lines[rows, columns]))
    counts = before != 0
    for size, at in ((lines.shape[1], columns), (len(piece.lines), rows)):
        if size == 1 or not counts.any() or not (factors := pool.factors(size, lines.dtype)):
            continue
        scaled = before * np.array([row[at] for row, _ in factors])
        alike = _near(scaled, after, _LIKE)[:, counts].mean(1) >= _MOST
        for row, slack in compress(factors, alike):
            yield replace(piece, factor=row if at is columns else row[:, None], slack=slack), lines


def _zeros(found: np.ndarray, at: int, pool: Pool) -> int:
    """Returns how many zeros stand for biases that are not there: up to where another may start."""
    if found.ndim != 1 or found[at]:
        return 0
    rest = np.flatnonzero(found[at:])
    if not rest.size:
        return found.size - at
    leading = [np.flatnonzero(each.array) for each in pool.constants if each.array.ndim == 1]
    starts = {int(rest[0] - each[0]) for each in leading if each.size and each[0] < rest[0]}
    return min(starts, default=0)


def _is_held(source: Constant, pieces: Sequence[_Piece]) -> bool:
    """Whether pieces together are a constant, or hold one that is equal to it."""
    for axis, view in source.views():
        own = [each for each in pieces if each.axis == axis and each.source.key == source.key]
        unread = [span for span in source.unread if source.unread[-1][1] == len(view)]
        spans, end = [(each.start, each.start + len(each.lines)) for each in own], 0
        for start, stop in sorted([*spans, *unread]):
            end = max(end, stop) if start <= end else end
        if own and end == len(view):
            return True
    alike = {each.source for each in pieces if each.source.array.shape == source.array.shape}
    lines = next(source.views())[1]
    others = [each for each in alike if each.key != source.key and each.array.dtype == source.array.dtype]
    whole = (_Piece(each, 0, 0, len(lines), next(each.views())[1]) for each in others)
    return any(each.first_difference(lines) is None for each in whole)


@cache
def _sample(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, shape[0], _SAMPLES), rng.integers(0, shape[1], _SAMPLES)


def _near(a: np.ndarray, b: np.ndarray, relative: float, absolute: float = 0.0) -> np.ndarray:
    wide, given = a.astype(np.float64), b.astype(np.float64)
    return np.asarray((wide == given) | (np.abs(wide - given) <= relative * np.abs(wide) + absolute))


def _apart(tile: np.ndarray) -> np.ndarray:
    """Returns a tile; of a transposed matrix a copy whose lines are not a power of two apart."""
    if tile.ndim < 2 or tile.strides[-1] <= tile.itemsize:
        return tile
    copied = np.empty((tile.shape[1], tile.shape[0] + _PADDING), tile.dtype)[:, : tile.shape[0]]
    copied[:] = tile.T
    return copied.T
