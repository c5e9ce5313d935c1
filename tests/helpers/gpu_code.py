"""Which GPUs' code the built library has."""

import os
import re

import pytest
import torch

from twinop.libraries.library import find_library, read_library

_ARCHS = read_library(find_library("custom_ops")).cuda_archs
_HAS_HOPPERS = re.search(r"(^|,)90a?(-real)?(,|$)", _ARCHS) is not None
_IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
_TARGET = os.environ.get("TWINOP_TARGET", "9.0")

needs_hopper_kernels = pytest.mark.skipif(
    not (_IS_HOPPER and _HAS_HOPPERS and _TARGET == "9.0"),
    reason=f"a Hopper GPU runs it with its own kernels; here the code of {_ARCHS} runs as on {_TARGET}",
)
