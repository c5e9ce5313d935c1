"""What messages tell a user of the source tree, and a user of a wheel, who has no build.sh."""

from pathlib import Path

import pytest
from models import make_model

from twinop import installation
from twinop.building.toolchain import find_installation
from twinop.deploy import session
from twinop.errors import TwinopError
from twinop.installation import how_to_build
from twinop.libraries.library import find_library


def test_in_the_source_tree() -> None:
    assert how_to_build() == f"Build it with ./build.sh, which builds all ops ({installation.ALL_OPS_TAKE})"
    assert f'all_ops_take="{installation.ALL_OPS_TAKE}"' in (installation.ROOT / "build.sh").read_text()
    assert how_to_build(archs="90") == "Build it with TWINOP_CUDA_ARCHS=90 ./build.sh"


def test_messages_to_the_user_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "ROOT", tmp_path)
    for module in ("twinop.building.toolchain", "twinop.libraries.find"):
        monkeypatch.setattr(f"{module}.library_folders", lambda: [tmp_path])
    for call in (lambda: find_library("none"), find_installation, lambda: session(make_model("CustomRelu"))):
        with pytest.raises(TwinopError, match="pip install --force-reinstall") as error:
            call()
        assert "build.sh" not in str(error.value)
    assert how_to_build(archs="90") == "Install a wheel of twinop that was built for 90"
    assert how_to_build("mish", needs_cuda=True) == "Build it with twinop build where nvcc is on PATH"
