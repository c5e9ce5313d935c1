"""The op append_kv, and an attention that is trained without it and then generates with a cache."""

import twinop

library_path = twinop.library_beside(__file__)


@twinop.op
def append_kv(op, k_cache, v_cache, k, v, cos, sin, position):
    """Its meaning in ONNX's standard operators, which write into nothing: it returns the new caches."""
    sizes = op.Shape(k)
    batch = op.Range(0, op.Gather(sizes, 0), 1)
    rows = op.Add(op.Unsqueeze(position, 1), op.Unsqueeze(op.Range(0, op.Gather(sizes, 1), 1), 0))
    places = [op.Expand(op.Unsqueeze(batch, 1), op.Shape(rows)), rows]
    index = op.Concat(*(op.Unsqueeze(place, 2) for place in places), axis=2)
    c, s = (op.CastLike(op.Unsqueeze(op.Gather(table, rows), 2), k) for table in (cos, sin))
    a, b = op.Split(k, axis=-1, num_outputs=2, _outputs=2)
    turned = op.Concat(op.Sub(op.Mul(a, c), op.Mul(b, s)), op.Add(op.Mul(b, c), op.Mul(a, s)), axis=-1)
    return op.ScatterND(k_cache, index, turned), op.ScatterND(v_cache, index, v)


def reference(op):
    """A pair is a sum of two products, which may cancel: errors are those of the products."""
    import torch

    from twinop.testing.references import Reference, ulps

    def magnitude(k_cache, v_cache, k, v, cos, sin, position):
        largest = max(float(each.abs().max()) if each.numel() else 0.0 for each in (k, k_cache))
        return torch.full_like(k_cache, max(largest, 1.0)), v_cache.abs().clamp(min=1.0)

    return Reference(ulps=ulps(4, half=1), magnitude=magnitude)


def samples(op, dtype, size):
    import torch

    kind, calls = getattr(torch, dtype), []
    for batch, new, heads in ((1, 1, 1), (2, 1, 3), (3, 4, 2), (2, 0, 1), (1, 8, 1)):
        rows, head = 8, max(size // 8 * 2, 2)
        cache = torch.randn(2, batch, rows, heads, head).to(kind)
        k, v = torch.randn(2, batch, new, heads, head).to(kind)
        cos, sin = tables(rows, head)
        position = torch.randint(0, rows - new + 1, (batch,))
        names = ("k_cache", "v_cache", "k", "v", "cos", "sin", "position")
        calls.append(dict(zip(names, (*cache, k, v, cos, sin, position), strict=True)))
    return calls


def tables(rows, head, base=10_000.0):
    """Cosine and sine of each position's angle for each pair of a head."""
    import torch

    angles = torch.arange(rows)[:, None] * base ** (-torch.arange(0, head, 2) / head)
    return angles.cos(), angles.sin()
