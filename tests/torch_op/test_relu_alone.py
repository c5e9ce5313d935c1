"""What `./build.sh demo` leaves: the library of relu, without the one of all ops."""

import os
import subprocess
import sys
from pathlib import Path

from twinop.installation import ALL_OPS_TAKE
from twinop.libraries.library import find_library

SCRIPT = """
import sys, torch, twinop.libraries.library
from pathlib import Path
twinop.libraries.library.library_folders = lambda: [Path(sys.argv[1])]
from twinop import torch_op
from twinop.errors import TwinopError

x = torch.tensor([-1.0, 2.0], requires_grad=True)
torch_op.CustomReLU()(x).sum().backward()
assert x.grad.tolist() == [0, 1]
for call in (lambda: torch_op.gelu(x), lambda: torch_op.CustomGELU()(x), twinop.get_library_path):
    try:
        call()
    except (AttributeError, TwinopError) as error:
        print(error)
"""


def test_other_ops_say_how_to_build_them(tmp_path: Path) -> None:
    for stem in ("custom_relu", "twinop_torch"):
        os.symlink(find_library(stem), tmp_path / f"lib{stem}.so")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    build = f"Build it with ./build.sh, which builds all ops ({ALL_OPS_TAKE})"
    missing = "twinop.torch_op has no op 'gelu'; loaded ops: relu, relu_backward. "
    missing += f"./build.sh demo builds relu alone. {build}"
    *of_ops, of_library = done.stdout.splitlines()
    assert of_ops == [missing] * 2
    assert of_library.startswith("libcustom_ops.so not found") and build in of_library
