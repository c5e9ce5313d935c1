"""Inputs that are mutated at random, and what every reader does with them: one message, soon."""

import random
import re
import resource
import time
from collections.abc import Callable, Sequence

import pytest

from twinop.errors import TwinopError

counts = pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.slow)])
TOKENS = re.compile(rb'"[^"\n]*"|[\w.+-]+|[^\s\w]')
WORDS = (
    *(
        b"null",
        b"true",
        b"-1",
        b"0",
        b"2.5",
        b"1e308",
        b"1e999",
        b"nan",
        b"9223372036854775808",
        b"9" * 5000,
        b"\n",
    ),
    *(
        b'""',
        b'"x"',
        b'"../x"',
        b'"\\u0000"',
        b'"\\ud800"',
        b'"' + b"x" * 7_000 + b'"',
        b"\xff",
        b"\0",
        b"[]",
        b"{}",
    ),
    *(
        b"[" * 20_000,
        b"[" * 300 + b"]" * 300,
        b"{a=" * 5000,
        b"{" * 300 + b"}" * 300,
        b"a." * 5000,
        b"[1, [2]]",
        b"=",
    ),
)


def mutated(data: bytes, chance: random.Random, words: Sequence[bytes] = ()) -> bytes:
    """Changes some bytes, and at times cuts, repeats or swaps a part; of a text also its words."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        place, count = chance.randrange(max(len(found), 1)), chance.choice((1, 1, 4, 64))
        how = chance.randrange(8 if words else 4)
        if how == 0:
            found[place : place + count] = chance.randbytes(count)
        elif how == 1:
            found[place : place + count] = b"\xff" * count
        elif how == 2:
            del found[place : place + count]
        elif how == 3:
            found[place:place] = found[place : place + count]
        elif tokens := [*TOKENS.finditer(found)][:1000]:
            token, other = chance.choice(tokens), chance.choice(tokens)
            found[slice(*token.span())] = chance.choice((chance.choice(words), other[0]))
    return bytes(found) or b"x"


def survive(count: int, read: Callable[[random.Random], None], *errors: type[Exception]) -> None:
    """Reads mutated inputs: an error of ours or a result, in 5 s and 200 MB."""
    expected: tuple[type[Exception], ...] = (TwinopError, *errors)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(count):
        begin = time.process_time()
        try:
            read(random.Random(seed))
        except expected:
            pass
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error!s:.500}") from error
        assert time.process_time() - begin < 5, f"seed {seed}"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
