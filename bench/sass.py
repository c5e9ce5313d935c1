"""The machine code of the elementwise kernels: instructions per element, by unit."""

import re
import shutil
import subprocess
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from .report import BenchError

# The mangled name of an elementwise kernel: functor, arithmetic type, tensor type, width, threads, vectors,
# outputs, inputs.
_KERNEL = re.compile(
    r"ElementwiseKernelINS_\d+([A-Za-z0-9]+?)I(?:f|d|NS_\d+[A-Za-z0-9]+E)EE(f|d|\d+__half|\d+__nv_bfloat16)"
    r"Li(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)E"
)
_RESIDENT = (128, 4)  # threads and vectors of the kernels for tensors that stay in L2
_DTYPES = {"f": "float32", "d": "float64", "6__half": "float16", "13__nv_bfloat16": "bfloat16"}
_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*)\s*(.*?)\s*;")

# Lanes per clock of one multiprocessor of compute capability 9.0 (CUDA C++ Programming Guide, throughput of
# arithmetic instructions). Each of its 4 schedulers issues one instruction of 32 lanes.
LANES = {"issue": 128, "FMA": 128, "ALU": 64, "XU": 16, "FP64": 64, "LSU": 32}
_UNITS = {
    "FMA": "FFMA FMUL FADD IMAD HFMA2",
    "XU": "MUFU FRND F2F F2I I2F",
    "FP64": "DFMA DADD DMUL DSETP",
    "LSU": "LDG STG LDS STS LDL STL LDC",
    "": "BRA BSSY BSYNC EXIT CALL RET NOP S2R S2UR VOTE WARPSYNC BREAK",  # units that are not counted
}
_UNIT_OF = {name: unit for unit, names in _UNITS.items() for name in names.split()}


@dataclass(frozen=True)
class Instruction:
    predicate: str
    name: str
    operands: str

    @property
    def unit(self) -> str:
        """The unit that executes it: the ALU by default, none for arithmetic in uniform registers."""
        short = self.name.split(".")[0]
        return _UNIT_OF.get(short, "" if short.startswith("U") else "ALU")

    @property
    def target(self) -> int:
        return int(self.operands.split("0x")[-1].split()[0].rstrip(")"), 16)


@dataclass(frozen=True)
class Kernel:
    functor: str
    dtype: str
    vectors: int
    elements: int
    """Elements that a thread computes."""
    units: dict[str, int]
    """Instructions of a thread by unit. `issue` counts all of them."""

    @property
    def per_element(self) -> dict[str, float]:
        return {unit: round(count / self.elements, 2) for unit, count in self.units.items()}

    @property
    def clocks(self) -> dict[str, float]:
        """Clocks of a multiprocessor for one element, by unit."""
        return {unit: self.units[unit] / self.elements / lanes for unit, lanes in LANES.items()}


def find_cuobjdump() -> str:
    """Returns the path of cuobjdump.

    Raises:
        BenchError: it or nvdisasm, which it needs, is not installed.
    """
    found = shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin")
    if found is None or shutil.which("nvdisasm", path=f"{Path(found).parent}:/usr/local/cuda/bin") is None:
        raise BenchError(
            "no cuobjdump and nvdisasm here. They are parts of the CUDA toolkit (packages cuda-cuobjdump and "
            "cuda-nvdisasm). Put the folder of both on PATH"
        )
    return found


def kernels(library: Path) -> list[Kernel]:
    """Returns the elementwise kernels of a library that load whole vectors.

    Raises:
        BenchError: cuobjdump failed, or the library has no such kernel for compute capability 9.0.
    """
    command = [find_cuobjdump(), "-sass", "-arch", "sm_90", str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        found = list(read(process.stdout))
    if process.returncode != 0 or not found:
        raise BenchError(
            f"{library}: no elementwise kernels for compute capability 9.0 (cuobjdump's exit code "
            f"{process.returncode}). Build it with TWINOP_CUDA_ARCHS=90"
        )
    return found


def read(lines: Iterable[str]) -> Iterator[Kernel]:
    """Returns the kernels in cuobjdump's output."""
    name, body = "", dict[int, Instruction]()
    for line in (*lines, "Function : "):
        if "Function : " in line:
            if kernel := _kernel(name, body):
                yield kernel
            name, body = line.split("Function : ")[1].strip(), {}
        elif _KERNEL.search(name) and (match := _LINE.match(line)):
            body[int(match[1], 16)] = Instruction(match[2] or "", match[3], match[4])


def _kernel(name: str, body: dict[int, Instruction]) -> Kernel | None:
    match = _KERNEL.search(name)
    if match is None:
        return None
    functor, dtype = match[1], _DTYPES[match[2]]
    width, threads, vectors, outputs, inputs = map(int, match.groups()[2:])
    if width == 1 or (threads, vectors) == _RESIDENT:
        return None
    path = shortest_path(body, vectors * inputs, vectors * outputs)
    units = Counter(instruction.unit for instruction in path)
    counts = {unit: units[unit] for unit in LANES if unit != "issue"}
    return Kernel(functor, dtype, vectors, width * vectors, {"issue": len(path)} | counts)


def shortest_path(body: dict[int, Instruction], loads: int, stores: int) -> list[Instruction]:
    """Returns the shortest path from the entry to an exit with this number of 16-byte loads and stores.

    It is a lower bound for a thread that handles whole vectors only.

    Raises:
        BenchError: there is no such path.
    """
    addresses = sorted(body)
    following = dict(pairwise(addresses))
    start = (addresses[0] if addresses else 0, -1, 0, 0)  # address, return address, loads, stores
    before: dict[tuple[int, int, int, int], tuple[int, int, int, int] | None] = {start: None}
    queue = deque([start] if addresses else [])
    while queue:
        state = queue.popleft()
        at, back, loaded, stored = state
        instruction = body[at]
        loaded = min(loaded + instruction.name.startswith("LDG.E.128"), loads)
        stored = min(stored + instruction.name.startswith("STG.E.128"), stores)
        short = instruction.name.split(".")[0]
        if short == "EXIT" and (loaded, stored) == (loads, stores):
            path = []
            step: tuple[int, int, int, int] | None = state
            while step is not None:
                path.append(body[step[0]])
                step = before[step]
            return path[::-1]
        steps = []
        if short == "BRA":
            steps.append((instruction.target, back))
        elif short == "CALL":
            steps.append((instruction.target, following.get(at, -1)))
        elif short == "RET":
            steps.append((back, -1))
        conditional = bool(instruction.predicate) or (
            short == "BRA" and "P" in instruction.operands.split("0x")[0]
        )
        if conditional or short not in ("BRA", "CALL", "RET", "EXIT"):
            steps.append((following.get(at, -1), back))
        for to, returns in steps:
            following_state = (to, returns, loaded, stored)
            if to in body and following_state not in before:
                before[following_state] = state
                queue.append(following_state)
    raise BenchError(f"no path through the kernel makes {loads} loads and {stores} stores of 16 bytes")
