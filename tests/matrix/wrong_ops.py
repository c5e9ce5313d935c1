"""Function bodies of tests/ops/wrong_ops.h, as a project has them. That of `squared` does not fit."""

from twinop.export import body


@body(domain="wrong_ops")
def shift(op, x):
    return op.Add(x, 1.0)


@body(domain="wrong_ops")
def twice(op, x):
    return op.Add(x, x)


@body(domain="wrong_ops")
def squared(op, x, y):
    return op.Mul(x, y)
