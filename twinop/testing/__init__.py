"""`twinop test`: what every op of any library is tested for, derived from its record and its function body.

`matrix/` has the tests. The module of an op's function body may help where nothing can be derived:

    def samples(op, dtype, size):
        '''Calls to test the op with: inputs and attributes by name. None: derive them from the record.'''
        return [{"a": torch.randn(size, 3), "b": torch.randn(3, size), "tile": 8}]

    def reference(op):
        '''Another bound on errors than the rounding errors of the op's body (`references.Reference`).'''
        return Reference(ulps=ulps(4))

Inputs are cast to the dtypes of each test. `size` is a number such as 0, 1, 7 or 257.
"""
