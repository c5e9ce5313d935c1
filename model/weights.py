"""Weights that stay in their files: `Stored` lies in a file, `Recipe` is computed from other weights.

Neither holds numbers. `read` gives a window of a tensor, and `strips` gives all of it in pieces of a few
megabytes: a transpose, a join or a cast of a weight of any size takes no more memory than that. The writer
(`files.py`) and the statistics here read weights so; what runs a model calls `numpy`. Tensors of up to
`LARGE` bytes are values: the makers compute them at once.
"""

import hashlib
import math
import operator
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from typing import cast as typed

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

LARGE = 1 << 16  # bytes
_STRIP = 16 << 20  # bytes
_COLUMNS = 16  # of a transposed matrix are copied at once: 3 times as fast
_SAMPLE = 64  # elements
_FLOATS_16 = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_ELEMENTWISE = {"Add": operator.add, "Div": operator.truediv, "Mul": operator.mul, "Sub": operator.sub}

Tensors = Sequence[ir.TensorProtocol]
Sources = Sequence[ir.TensorProtocol | None]
Window = Sequence[tuple[int, int]]  # where a part of a tensor starts and stops, for each axis


class _Lazy:
    """What `Stored` and `Recipe` have in common: nothing is cached, and they are cheap to pickle."""

    def __init__(self, dtype: ir.DataType, shape: Sequence[int], name: str | None) -> None:
        self.dtype, self._shape = dtype, tuple(shape)
        self.shape: ir.ShapeProtocol = ir.Shape(self._shape, frozen=True)
        self.name, self.doc_string, self.raw = name, typed(str | None, None), typed(Any, None)
        self.size = math.prod(self._shape)
        self.nbytes = -(-self.size * dtype.bitwidth // 8)
        self.metadata_props: MutableMapping[str, str] = {}
        self.meta: MutableMapping[str, Any] = {}

    def numpy(self) -> np.ndarray:
        """Computes all of it."""
        whole, start = np.empty(self.size, self.dtype.numpy()), 0
        for strip in strips(self):
            whole[start : start + strip.size] = strip.reshape(-1)
            start += strip.size
        return whole.reshape(self._shape)

    def tobytes(self) -> bytes:
        return b"".join(map(bytes, pieces(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.numpy().__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # the CPU

    def __repr__(self) -> str:
        return f"{type(self).__name__}<{self.dtype},{self.shape}>"


class Stored(_Lazy):
    """A tensor in a file, which is mapped into memory while it is read."""

    def __init__(
        self, path: Path, offset: int, dtype: ir.DataType, shape: Sequence[int], name: str | None = None
    ) -> None:
        super().__init__(dtype, shape, name)
        self.path, self.offset = path, offset

    def numpy(self) -> np.ndarray:
        return super().numpy() if self.dtype.bitwidth < 8 else self._map(self.dtype.numpy(), self._shape)

    def read(self, window: Window) -> np.ndarray:
        if self.dtype.bitwidth >= 8:
            return self.numpy()[_slices(window)]
        count = 8 // self.dtype.bitwidth
        if not self._shape or self._shape[-1] % count:
            return _by_range(self._shape, window, self._unpacked)
        *rows, (start, stop) = window  # whole bytes have a row: columns are read alone
        columns = slice(start // count, -(-stop // count))
        there = self._map(np.dtype(np.uint8), (*self._shape[:-1], self._shape[-1] // count))
        place = *_slices(rows), columns
        some = np.array(there[place], order="C")
        shape = [*some.shape[:-1], some.shape[-1] * count]
        values = ir.PackedTensor(some.reshape(-1), self.dtype, shape=shape).numpy()
        return values[..., start % count : start % count + stop - start]

    def bytes(self) -> np.ndarray:
        return self._map(np.dtype(np.uint8), (self.nbytes,))

    def _map(self, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        if not math.prod(shape):
            return np.empty(shape, dtype)
        return np.asarray(np.memmap(self.path, dtype, "r", self.offset, shape))

    def _unpacked(self, start: int, stop: int) -> np.ndarray:
        bits, first = self.dtype.bitwidth, start - start % 8
        some = self.bytes()[first * bits // 8 : -(-stop * bits // 8)]
        count = some.size * 8 // bits
        padded = ir.PackedTensor(np.array(some), self.dtype, shape=[count]).numpy()
        return padded[start - first : stop - first]


class Held(Stored):
    """A tensor in memory that is read as those in files are: nothing is copied."""

    def __init__(self, tensor: ir.TensorProtocol) -> None:
        is_packed = tensor.dtype.bitwidth < 8
        array = np.frombuffer(tensor.tobytes(), np.uint8) if is_packed else tensor.numpy()
        self.array = np.ascontiguousarray(array)
        super().__init__(Path(), self.array.ctypes.data, tensor.dtype, sizes(tensor), tensor.name)

    def _map(self, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        return self.array.reshape(-1).view(dtype).reshape(shape)


class Recipe(_Lazy):
    """A tensor that is computed from others: `operation` with its parameters, which are hashable."""

    def __init__(
        self,
        operation: str,
        sources: Tensors,
        parameters: tuple[Any, ...],
        dtype: ir.DataType,
        shape: Sequence[int],
    ) -> None:
        super().__init__(dtype, shape, None)
        self.operation, self.sources, self.parameters = operation, tuple(sources), parameters

    def read(self, window: Window) -> np.ndarray:
        return _READ[self.operation](self, window)


def is_large(tensor: ir.TensorProtocol) -> bool:
    return tensor.nbytes > LARGE


def is_held(tensor: ir.TensorProtocol) -> bool:
    """Whether a tensor, or one that it is computed from, is in the memory of this process alone."""
    if isinstance(tensor, Recipe):
        return any(map(is_held, tensor.sources))
    return isinstance(tensor, Held) or not isinstance(tensor, Stored | ir.ExternalTensor)


# ------------------------------------------------------------------------------------ makers


def cast(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.TensorProtocol:
    """Converts a tensor, or the sources of a transpose and the like: then both find each other. Numbers are
    clipped as `narrow` does; 16 bits that were widened are what they were."""
    if tensor.dtype is dtype:
        return tensor
    if isinstance(tensor, Recipe) and tensor.operation in _MOVES:
        sources = [cast(each, dtype) for each in tensor.sources]
        return Recipe(tensor.operation, sources, tensor.parameters, dtype, tensor._shape)
    if isinstance(tensor, Recipe) and tensor.operation == "cast" and tensor.dtype is ir.DataType.FLOAT:
        [source] = tensor.sources
        if source.dtype is dtype and dtype in _FLOATS_16:
            return source
    return _made("cast", [tensor], (), dtype, sizes(tensor))


def transpose(tensor: ir.TensorProtocol, permutation: Sequence[int] = (1, 0)) -> ir.TensorProtocol:
    order = tuple(permutation)
    if isinstance(tensor, Recipe) and tensor.operation == "transpose":
        [before] = tensor.parameters
        tensor, order = tensor.sources[0], tuple(before[axis] for axis in order)
    if order == tuple(range(len(order))):
        return tensor
    shape = sizes(tensor)
    return _made("transpose", [tensor], (order,), tensor.dtype, [shape[axis] for axis in order])


def join(tensors: Tensors, axis: int = 0) -> ir.TensorProtocol:
    """Concatenates tensors."""
    first, shape = tensors[0], [*sizes(tensors[0])]
    axis %= len(shape)
    shape[axis] = sum(sizes(each)[axis] for each in tensors)
    return first if len(tensors) == 1 else _made("join", tensors, (axis,), first.dtype, shape)


def part(tensor: ir.TensorProtocol, axis: int, start: int, stop: int) -> ir.TensorProtocol:
    """Returns what lies between two indices along an axis."""
    shape = [*sizes(tensor)]
    axis %= len(shape)
    if (start, stop) == (0, shape[axis]):
        return tensor
    shape[axis] = stop - start
    return _made("part", [tensor], (axis, start, stop), tensor.dtype, shape)


def reshape(tensor: ir.TensorProtocol, shape: Sequence[int]) -> ir.TensorProtocol:
    """Gives a tensor another shape of known sizes."""
    if tuple(shape) == sizes(tensor):
        return tensor
    if isinstance(tensor, Recipe) and tensor.operation == "reshape":
        return reshape(tensor.sources[0], shape)
    return _made("reshape", [tensor], (), tensor.dtype, shape)


def packed(tensor: ir.TensorProtocol, shape: Sequence[int]) -> ir.TensorProtocol:
    """Puts integers [N, K] of 4 or 8 bits into bytes, each row [N, ...] on its own, as MatMulNBits has them.
    Those with a sign lose it: half of their range is added."""
    return _made("packed", [tensor], (), ir.DataType.UINT8, shape)


def dequantized(parts: Tensors, axis: int, block: int) -> ir.TensorProtocol:
    """Computes DequantizeLinear of integers, their scales and any zero points, in blocks along an axis."""
    return _made("dequantized", parts, (axis, block), parts[1].dtype, sizes(parts[0]))


def row_scales(matrix: ir.TensorProtocol) -> ir.TensorProtocol:
    """Returns the scale in e4m3 of each row, in fp32, as the op quantize_rows computes it."""
    largest = row_maxima(matrix, 0).astype(np.float32)
    return ir.tensor(np.maximum(largest, np.float32(2.0**-60)) / np.float32(448))


def quantized(matrix: ir.TensorProtocol, scales: ir.TensorProtocol) -> ir.TensorProtocol:
    """Divides the rows of a matrix by their scales, and rounds them to e4m3, which ends at 448."""
    return _made("quantized", [matrix, scales], (), ir.DataType.FLOAT8E4M3FN, sizes(matrix))


def elementwise(op_type: str, a: ir.TensorProtocol, b: ir.TensorProtocol) -> ir.TensorProtocol:
    """Adds, subtracts, multiplies or divides two tensors, which broadcast."""
    return _made(op_type, [a, b], (), a.dtype, np.broadcast_shapes(sizes(a), sizes(b)))


def node(
    node: ir.Node, sources: Sources, opset: int, dtype: ir.DataType, shape: Sequence[int]
) -> ir.TensorProtocol:
    """Computes the only output of a standard operator without subgraphs; absent inputs are None."""
    given = [each for each in sources if each is not None]
    if node.op_type in _ELEMENTWISE and dtype.is_floating_point() and not node.domain:
        return elementwise(node.op_type, *given)
    names = ["" if each is None else f"x{index}" for index, each in enumerate(sources)]
    proto = onnx.helper.make_node(node.op_type, names, ["y"])
    proto.attribute.extend(ir.to_proto(each) for each in node.attributes.values())
    return _made("node", given, (proto.SerializeToString(deterministic=True), opset), dtype, shape)


def _made(
    operation: str, sources: Tensors, parameters: tuple[Any, ...], dtype: ir.DataType, shape: Sequence[int]
) -> ir.TensorProtocol:
    recipe = Recipe(operation, sources, parameters, dtype, shape)
    if is_large(recipe):
        return recipe
    return ir.tensor(np.array(recipe.read(_all(recipe._shape)), order="C"), dtype=dtype)


# ------------------------------------------------------------------------------------ reading


def sizes(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    """Returns the shape of a tensor."""
    return tensor._shape if isinstance(tensor, _Lazy) else tuple(tensor.shape.numpy())


def read(tensor: ir.TensorProtocol, window: Window) -> np.ndarray:
    """Computes a part of a tensor, and no more than it needs."""
    return tensor.read(window) if isinstance(tensor, Stored | Recipe) else tensor.numpy()[_slices(window)]


def strips(tensor: ir.TensorProtocol) -> Iterator[np.ndarray]:
    """Yields the numbers of a tensor in order, in arrays in C order of a few megabytes."""
    tensor = _settled(tensor)
    shape, size = sizes(tensor), max(tensor.dtype.bitwidth // 8, 1)
    for window in _windows(shape, max(_STRIP // size, 1)):
        yield in_c_order(read(tensor, window))


def pieces(tensor: ir.TensorProtocol) -> Iterator[memoryview]:
    """Yields the bytes of a tensor as files have them, a few megabytes at a time."""
    if isinstance(tensor, Stored):
        whole = tensor.bytes()
        yield from (whole[start : start + _STRIP].data for start in range(0, whole.size, _STRIP))
    elif tensor.dtype.bitwidth >= 8:
        yield from (strip.reshape(-1).view(np.uint8).data for strip in strips(tensor))
    elif isinstance(tensor, Recipe):
        settled = _settled(tensor)
        for start in range(0, tensor.size, _STRIP):
            some = _flat(settled, start, min(start + _STRIP, tensor.size))
            yield memoryview(ir.tensor(some, dtype=tensor.dtype).tobytes())
    else:
        yield memoryview(tensor.tobytes())


def in_c_order(array: np.ndarray) -> np.ndarray:
    """Returns an array in C order. A transposed matrix is copied in strips."""
    if np.ndim(array) != 2 or array.flags.c_contiguous:
        return np.asarray(array, order="C")
    copied = np.empty(array.shape, array.dtype)
    for start in range(0, array.shape[1], _COLUMNS):
        copied[:, start : start + _COLUMNS] = array[:, start : start + _COLUMNS]
    return copied


def _all(shape: Sequence[int]) -> list[tuple[int, int]]:
    return [(0, size) for size in shape]


def _slices(window: Window) -> tuple[slice, ...]:
    return tuple(slice(*each) for each in window)


def _windows(shape: Sequence[int], most: int) -> Iterator[list[tuple[int, int]]]:
    """Yields windows of at most so many elements that follow each other in C order."""
    inner = math.prod(shape[1:])
    if not shape or 0 in shape:
        yield _all(shape)
    elif inner > most:
        for index in range(shape[0]):
            yield from ([(index, index + 1), *rest] for rest in _windows(shape[1:], most))
    else:
        for start in range(0, shape[0], most // inner):
            yield [(start, min(start + most // inner, shape[0])), *_all(shape[1:])]


def _by_range(shape: Sequence[int], window: Window, flat: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """Computes a window with what computes the elements between two indices in C order."""
    if not shape:
        return flat(0, 1).reshape(())
    axis = next((axis for axis, (start, stop) in enumerate(window) if stop - start != 1), len(shape) - 1)
    inner = [math.prod(shape[each + 1 :]) for each in range(axis + 1)]
    begin = sum(start * size for (start, _), size in zip(window, inner, strict=False))
    count = window[axis][1] - window[axis][0]
    array = flat(begin, begin + count * inner[-1]).reshape(*[1] * axis, count, *shape[axis + 1 :])
    return array[(slice(None),) * (axis + 1) + _slices(window[axis + 1 :])]


def _flat(tensor: ir.TensorProtocol, start: int, stop: int) -> np.ndarray:
    """Computes the elements between two indices in C order."""
    shape = sizes(tensor)
    window = _all(shape)
    for axis in range(len(shape)):
        inner = math.prod(shape[axis + 1 :])
        first, last = start // inner, -(-stop // inner)
        window[axis] = first, last
        start, stop = start - first * inner, stop - first * inner
        if last - first != 1:
            break
    return read(tensor, window).reshape(-1)[start:stop]


def _settled(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Returns a recipe without operators that compute all or nothing: those are computed now, once."""
    if isinstance(tensor, Stored | ir.Tensor):
        return tensor
    if not isinstance(tensor, Recipe):  # one of protobuf, which copies its bytes for each window
        return ir.tensor(tensor.numpy(), dtype=tensor.dtype)
    if tensor.operation == "node":
        return ir.tensor(_read_node(tensor, _all(tensor._shape)), dtype=tensor.dtype)
    sources = [_settled(each) for each in tensor.sources]
    return Recipe(tensor.operation, sources, tensor.parameters, tensor.dtype, tensor._shape)


def _read_cast(recipe: Recipe, window: Window) -> np.ndarray:
    return narrow(read(recipe.sources[0], window), recipe.dtype)


def _read_transpose(recipe: Recipe, window: Window) -> np.ndarray:
    [order] = recipe.parameters
    there = [window[order.index(axis)] for axis in range(len(order))]
    return read(recipe.sources[0], there).transpose(order)


def _read_part(recipe: Recipe, window: Window) -> np.ndarray:
    axis, begin, _ = recipe.parameters
    there = [*window]
    there[axis] = window[axis][0] + begin, window[axis][1] + begin
    return read(recipe.sources[0], there)


def _read_join(recipe: Recipe, window: Window) -> np.ndarray:
    [axis], (start, stop) = recipe.parameters, window[recipe.parameters[0]]
    found, end = [], 0
    for source in recipe.sources:
        begin, end = end, end + sizes(source)[axis]
        if begin < stop and start < end:
            there = [*window]
            there[axis] = max(start, begin) - begin, min(stop, end) - begin
            found.append(read(source, there))
    return found[0] if len(found) == 1 else np.concatenate(found, axis)


def _read_reshape(recipe: Recipe, window: Window) -> np.ndarray:
    source = recipe.sources[0]
    return _by_range(recipe._shape, window, lambda start, stop: _flat(source, start, stop))


def _read_elementwise(recipe: Recipe, window: Window) -> np.ndarray:
    found = []
    for source in recipe.sources:
        shape = sizes(source)
        own = window[len(window) - len(shape) :]
        found.append(read(source, [(0, 1) if n == 1 else each for n, each in zip(shape, own, strict=True)]))
    return np.asarray(_ELEMENTWISE[recipe.operation](*found), recipe.dtype.numpy())


def _read_packed(recipe: Recipe, window: Window) -> np.ndarray:
    [source] = recipe.sources
    bits = source.dtype.bitwidth
    integers = read(source, [window[0], (0, sizes(source)[1])])
    values = in_c_order(integers.astype(np.int8)).view(np.uint8) & (2**bits - 1)
    values ^= 2 ** (bits - 1) if source.dtype.is_signed() else 0
    if bits == 4:
        values = np.pad(values, ((0, 0), (0, values.shape[1] % 2)))
        values = values[:, 0::2] | values[:, 1::2] << 4
    place = slice(None), *_slices(window[1:])
    return values.reshape(-1, *recipe._shape[1:])[place]


def _read_dequantized(recipe: Recipe, window: Window) -> np.ndarray:
    axis, block = recipe.parameters
    (start, stop), blocks = window[axis], [*window]
    blocks[axis] = start // block, -(-stop // block)
    found = read(recipe.sources[0], window).astype(np.float32)
    of_block = np.arange(start, stop) // block - blocks[axis][0]
    scales, *zeros = (
        read(each, blocks).astype(np.float32).take(of_block, axis) for each in recipe.sources[1:]
    )
    for each in zeros:
        found -= each
    return narrow(found * scales, recipe.dtype)


def _read_quantized(recipe: Recipe, window: Window) -> np.ndarray:
    matrix, scales = recipe.sources
    factors = np.float32(1) / read(scales, window[:1])[:, None]
    bits = (read(matrix, window).astype(np.float32) * factors).view(np.uint32)
    return _rounded_to_e4m3().take((bits >> 16).astype(np.uint16) | ((bits & 0xFFFF) != 0))


@cache
def _rounded_to_e4m3() -> np.ndarray:
    """Returns e4m3 of the upper half of a number's bits in fp32, whose last bit is set if the rest is not 0:
    enough to round to 4 bits, in a fifth of the time of ml_dtypes."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(ir.DataType.BFLOAT16.numpy())
    with np.errstate(invalid="ignore"):  # NaN is among them
        return halves.astype(ir.DataType.FLOAT8E4M3FN.numpy())


def _read_node(recipe: Recipe, window: Window) -> np.ndarray:
    serialized, opset = recipe.parameters
    proto = onnx.NodeProto.FromString(serialized)
    names = [name for name in proto.input if name]
    info, pairs = onnx.helper.make_tensor_value_info, [*zip(names, recipe.sources, strict=True)]
    known = [info(name, int(each.dtype), sizes(each)) for name, each in pairs]
    result = info("y", int(recipe.dtype), recipe._shape)
    graph = onnx.helper.make_graph([proto], "constant", known, [result])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    given = {name: each.numpy() for name, each in pairs}
    [found] = typed(list[np.ndarray], ReferenceEvaluator(model).run(None, given))
    return found.reshape(recipe._shape)[_slices(window)]


_MOVES: dict[str, Callable[[Recipe, Window], np.ndarray]] = {
    "join": _read_join, "part": _read_part, "reshape": _read_reshape, "transpose": _read_transpose,
}  # fmt: skip
_READ = {
    **_MOVES, **dict.fromkeys(_ELEMENTWISE, _read_elementwise),
    "cast": _read_cast, "dequantized": _read_dequantized, "node": _read_node,
    "packed": _read_packed, "quantized": _read_quantized,
}  # fmt: skip


# ------------------------------------------------------------------------------------ numbers


def clip(value: Any, dtype: ir.DataType) -> Any:
    """Limits the finite numbers of an array to those of a dtype, where it has some of them, as beside the
    lowest number of a mask; values of other kinds stay."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        return value
    limit = float(dtype.max)
    if not (np.abs(value) <= limit).any():
        return value
    return np.where(np.isfinite(value), np.clip(value, -limit, limit), value)


def narrow(array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """Converts numbers. Finite ones stay finite, such as the lowest one of a mask."""
    with np.errstate(over="ignore"):
        narrowed = np.asarray(array).astype(dtype.numpy())
    if array.dtype.kind == "f" and dtype in _FLOATS_16:
        lost = ~np.isfinite(narrowed)
        if lost.any():
            lost &= np.isfinite(array)
            narrowed[lost] = np.copysign(float(dtype.max), array[lost].astype(np.float64))
    return narrowed


def largest(tensor: ir.TensorProtocol) -> float:
    """Returns the largest magnitude, 0 of nothing."""
    return max(float(_maximum(each.reshape(-1)) if each.size else 0) for each in strips(tensor))


def _maximum(array: np.ndarray) -> np.ndarray:
    """Returns the largest magnitudes along the last axis; NaN is the largest one. Floats of 16 bits are
    compared as integers, whose order is the same: NumPy takes a hundredth of the time."""
    if array.itemsize == 2 and array.dtype.kind not in "iu":
        return (array.view(np.uint16) & 0x7FFF).max(-1).view(array.dtype)
    ends = array.max(-1), array.min(-1)
    high, low = ends if array.dtype.kind == "f" else [each.astype(np.float64) for each in ends]
    return np.maximum(high, -low)


def fits(tensor: ir.TensorProtocol, dtype: ir.DataType) -> bool:
    """Whether a dtype has all numbers of a tensor in fp32, those beyond its largest one apart."""
    return all(
        np.array_equal(narrow(each, dtype).astype(np.float32), clip(each, dtype), equal_nan=True)
        for each in strips(tensor)
    )


def row_norms(table: ir.TensorProtocol, axis: int) -> np.ndarray:
    """Returns the length of each row of a table along an axis."""
    return _of_rows(table, axis, lambda rows: np.linalg.norm(rows.astype(np.float32, copy=False), axis=1))


def row_maxima(table: ir.TensorProtocol, axis: int) -> np.ndarray:
    """Returns the largest magnitude of each row of a table along an axis."""
    return _of_rows(table, axis, _maximum)


def _of_rows(table: ir.TensorProtocol, axis: int, compute: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    table, shape = _settled(table), sizes(table)
    step = max(_STRIP * shape[axis] // max(table.nbytes, 1), 1)
    found = []
    for start in range(0, shape[axis], step):
        window = _all(shape)
        window[axis] = start, min(start + step, shape[axis])
        rows = np.moveaxis(read(table, window), axis, 0)
        found.append(compute(rows.reshape(len(rows), -1)))
    return np.concatenate(found)


def key(tensor: ir.TensorProtocol) -> tuple[object, ...]:
    """Returns what a tensor is computed from: tensors of one key are equal."""
    form = tensor.dtype, sizes(tensor)
    if isinstance(tensor, Stored):
        return *form, tensor.path, tensor.offset
    if isinstance(tensor, Recipe):
        return *form, tensor.operation, tensor.parameters, *map(key, tensor.sources)
    return *form, hashlib.sha256(tensor.tobytes()).digest()


def sample(tensor: ir.TensorProtocol) -> bytes:
    """Returns some bytes from both ends, which equal tensors share; none of operators without windows."""
    if isinstance(tensor, Recipe) and _settles(tensor):
        return b""
    shape = sizes(tensor)
    ends = ([(0, min(n, _SAMPLE)) for n in shape[-1:]], [(max(n - _SAMPLE, 0), n) for n in shape[-1:]])
    rows = ([(0, 1)] * len(shape[:-1]), [(n - 1, n) for n in shape[:-1]])
    found = [read(tensor, [*row, *end]) for row, end in zip(rows, ends, strict=True)]
    return b"".join(np.ascontiguousarray(each).tobytes() for each in found)


def _settles(tensor: ir.TensorProtocol) -> bool:
    return isinstance(tensor, Recipe) and (tensor.operation == "node" or any(map(_settles, tensor.sources)))


def same(a: ir.TensorProtocol, b: ir.TensorProtocol) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if (a.dtype, sizes(a)) != (b.dtype, sizes(b)):
        return False
    if a is b or (is_large(a) and key(a) == key(b)):
        return True
    if sample(a) != sample(b) and not (_settles(a) or _settles(b)):
        return False
    pairs = zip(strips(a), strips(b), strict=True)
    return all(np.array_equal(x.reshape(-1).view(np.uint8), y.reshape(-1).view(np.uint8)) for x, y in pairs)
