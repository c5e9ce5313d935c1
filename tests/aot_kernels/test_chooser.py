"""The variant that a launch takes. That these are Triton's own: tests/triton/test_variants.py."""

import struct
from itertools import product

from aot_ops import KERNEL, ONE, InProcess, LibraryOf, cubins, op_of, record
from device_calls import At, Request, run

from twinop.aot_kernels.expression import Expression, attribute, constant, size
from twinop.aot_kernels.plan import POINTER, DeviceOp, Kernel, Launch, Plan, Pointer, Scalar, Variant
from twinop.record.op_spec import Attribute

N = (
    *range(1, 34), 255, 256, 1000, 1008, 2**20, 2**31 - 17, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1,
    2**31 + 16, 2**32 - 1, 2**32, 2**40, 2**40 + 8,
)  # fmt: skip
PLACES = (0, 1, 2, 4, 8, 12, 15, 16)  # behind an aligned address
X, Y, COUNT = range(3)


def _variants() -> tuple[tuple[Variant, ...], list[Kernel]]:
    """One for each combination of what Triton specialises: aligned x, aligned y, and a kind of count."""
    kinds: dict[str, list[tuple[int, str]]] = {
        "i32 D": [(COUNT, "FitsI32"), (COUNT, "DivisibleBy16")],
        "i32": [(COUNT, "FitsI32")],
        "i64 D": [(COUNT, "DivisibleBy16")],
        "i64": [],
    }
    variants: list[Variant] = []
    kernels: list[Kernel] = []
    for x, y, kind in product((True, False), (True, False), kinds):
        aligned = [(i, "DivisibleBy16") for i, wanted in ((X, x), (Y, y)) if wanted]
        bytes_ = {"i32": "8,8,4", "i64": "8,8,8"}[kind[:3]]
        parameters = ((X, POINTER), (Y, POINTER), (COUNT, kind[:3]))
        variants.append(Variant((*aligned, *kinds[kind]), parameters, len(kernels)))
        kernels.append(Kernel(f"k|{bytes_}", "k", cubins({"90": f"x={x} y={y} n={kind}".encode()})))
    return tuple(variants), kernels


def test_the_choice_is_by_addresses_and_numbers(library_of: LibraryOf, in_process: InProcess) -> None:
    variants, kernels = _variants()
    arguments = Pointer("input", 0), Pointer("output", 0), Scalar(size(0, 0), "int")
    launch = Launch((ONE, ONE, ONE), arguments, variants)
    library = library_of(op_of(launch), *kernels)
    cases = [*product(PLACES, (0, 8, 16), N), *product((0, 4), PLACES, N[::4])]
    requests = [Request([At((n,), 4096 + x)], [At((n,), 8192 + y)]) for x, y, n in cases]
    for (x, y, n), outcome in zip(cases, in_process(run, library, requests), strict=True):
        assert outcome.error == ""
        (entry,) = outcome.launches
        kind = ("i32" if n < 2**31 else "i64") + " D" * (n % 16 == 0)
        assert entry["image"] == f"x={x % 16 == 0} y={y % 16 == 0} n={kind}", (x, y, n)
        integer = n.to_bytes(4 if n < 2**31 else 8, "little").hex()
        assert entry["parameters"] == [
            (4096 + x).to_bytes(8, "little").hex(), (8192 + y).to_bytes(8, "little").hex(), integer
        ]  # fmt: skip


NUMBERS = [
    ("i1", 1, struct.pack("<B", 1)),
    ("i8", -128, struct.pack("<b", -128)),
    ("u8", 255, struct.pack("<B", 255)),
    ("i16", -(2**15), struct.pack("<h", -(2**15))),
    ("u16", 2**16 - 1, struct.pack("<H", 2**16 - 1)),
    ("i32", -(2**31), struct.pack("<i", -(2**31))),
    ("u32", 2**32 - 1, struct.pack("<I", 2**32 - 1)),
    ("i64", -(2**63), struct.pack("<q", -(2**63))),
    ("u64", 2**63 - 1, struct.pack("<Q", 2**63 - 1)),
    ("fp16", 0.1, struct.pack("<e", 0.1)),
    ("bf16", 0.1, struct.pack("<f", 0.1)[2:]),
    ("fp32", 0.1, struct.pack("<f", 0.1)),
    ("fp32", 3, struct.pack("<f", 3)),
    ("fp64", 0.1, struct.pack("<d", 0.1)),
]
TOO_LARGE = [
    ("i32", 2**31, "n is 2147483648; the kernel takes an int of 32 bits"),
    ("i1", 2, "n is 2; the kernel takes an int of 1 bits without a sign"),
    ("u8", -1, "n is -1; the kernel takes an int of 8 bits without a sign"),
    ("u64", -1, "n is -1; the kernel takes an int of 63 bits without a sign"),
]


def test_numbers_have_the_parameters_type(library_of: LibraryOf, in_process: InProcess) -> None:
    plans, kernels = [], []
    for case, (type_, value, expected) in enumerate([*NUMBERS, *TOO_LARGE]):
        number = Scalar(constant(value), type_, "n")
        launch = Launch((ONE, ONE, ONE), (number,), (Variant((), ((0, type_),), case),))
        plans.append(Plan(0, (1,), (launch,), (Expression.of("==", attribute(0), case),)))
        kernels.append(Kernel(f"k|{len(expected)}", "k_kernel, k.py:7", cubins({"90": b"cubin"})))
    op = DeviceOp(record(1, (Attribute("case", "int"),)), tuple(plans))
    requests = [Request([At((1,))], attributes=[case]) for case in range(len(plans))]
    outcomes = in_process(run, library_of(op, *kernels), requests)
    for (_, _, expected), outcome in zip(NUMBERS, outcomes, strict=False):
        assert outcome.launches[0]["parameters"] == [expected.hex()]
    for (_, _, message), outcome in zip(TOO_LARGE, outcomes[len(NUMBERS) :], strict=True):
        assert outcome.error == (f"k_kernel, k.py:7: {message}. Call the op with smaller sizes or attributes")
        assert not outcome.launches


def test_the_plan_is_that_of_dtype_ranks_and_guards(library_of: LibraryOf, in_process: InProcess) -> None:
    def plan(combination: int, rank: int | None, case: int, *guards: Expression) -> Plan:
        launch = Launch((constant(case), ONE, ONE), (), (Variant((), (), 0),))
        return Plan(combination, (1, rank), (launch,), guards)

    small = Expression.of("<", size(0, 0), 10)
    flag = (Attribute("n", "int"),)
    odd = Expression.of("Modulo", attribute(0), 2)
    plans = (
        plan(0, 1, 1, small), plan(0, 1, 2, odd), plan(0, 2, 3), plan(0, None, 4), plan(1, 1, 5),
    )  # fmt: skip
    op = DeviceOp(record(2, flag), plans)
    small_x, large_x, half = At((3,)), At((30,)), At((3,), dtype="float16")
    cases = [
        (Request([small_x, small_x], attributes=[0]), 1),
        (Request([large_x, small_x], attributes=[1]), 2),
        (Request([large_x, At((2, 2))], attributes=[0]), 3),
        (Request([large_x, None], attributes=[0]), 4),
        (Request([half, half], attributes=[0]), 5),
    ]
    outcomes = in_process(run, library_of(op, KERNEL), [request for request, _ in cases])
    assert [outcome.launches[0]["grid"][0] for outcome in outcomes] == [case for _, case in cases]

    pairs = [large_x, large_x], [At((2, 2)), small_x], [half, None]
    unknown = [Request([*pair], attributes=[0]) for pair in pairs]
    errors = [outcome.error for outcome in in_process(run, library_of(op, KERNEL), unknown)]
    assert errors[0].startswith(
        "the launcher was traced for other sizes or attributes. Build the library again"
    )
    assert errors[1].startswith(
        "the launcher was traced for inputs of other ranks: (1, 1) (1, 2) (1, absent). "
    )
    assert errors[2].startswith("the launcher was traced for inputs of other ranks: (1, 1). ")
