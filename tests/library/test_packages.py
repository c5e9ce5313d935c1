"""Libraries are found by the domains that a model names: in a project and in installed packages."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from abi_files import CPU, X, c_library, negate_model
from user_ops import cube_package, cube_project, describe_package, negate_package, put_in_build, three_nodes

import twinop
from twinop import deploy
from twinop.deploy.errors import ModelError
from twinop.errors import LibraryError
from twinop.libraries.built import mark
from twinop.libraries.find import find_library_of, package_key, package_of
from twinop.libraries.library import find_library

ROW = np.array([[-1, 2, -3, 0.5]], np.float32)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages; the current folder is another one, and empty."""
    (tmp_path / "site").mkdir()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name in ("test_cube", "other_ops", "broken_ops"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "site"


def test_two_packages_and_twinops_ops(site: Path) -> None:
    cube_package(site)
    negate_package(site)
    opened = deploy.session(three_nodes(), CPU)
    paths = [library.path for library in opened.libraries]
    assert paths[:2] == [site / "test_cube/libtest_cube.so", site / "libother_ops.so"]
    np.testing.assert_array_equal(opened.run({"x": ROW})["y"], np.maximum(-(ROW**3), 0))

    onnx.save(three_nodes(), "net.onnx")
    found = twinop.libraries_for("net.onnx")
    assert found == [str(path.absolute()) for path in paths]
    options = onnxruntime.SessionOptions()
    for path in found:
        options.register_custom_ops_library(path)
    session = onnxruntime.InferenceSession("net.onnx", options, providers=CPU)
    np.testing.assert_array_equal(session.run(None, {"x": ROW})[0], np.maximum(-(ROW**3), 0))


def test_a_package_is_imported_only_for_its_domain(site: Path) -> None:
    (site / "broken_ops.py").write_text("raise RuntimeError('this import fails')")
    describe_package(site, "broken-ops", "2.0", "broken", "broken_ops")
    cube_package(site)
    assert find_library_of("test_cube") == str(site / "test_cube/libtest_cube.so")
    package = package_of("broken")
    assert package and package.requirement == "broken-ops==2.0" and "broken_ops" not in sys.modules
    with pytest.raises(LibraryError) as caught:
        find_library_of("broken")
    assert str(caught.value).startswith(
        "package broken-ops 2.0, which has the ops of the domain broken: importing its module broken_ops "
        "failed: RuntimeError: this import fails. Fix or reinstall it"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "its module broken_ops has no function library_path(). Expected, in that module"),
        ("def library_path():\n    return '/none/libx.so'", "its library /none/libx.so is missing. Install"),
    ],
)
def test_a_broken_package(site: Path, text: str, said: str) -> None:
    (site / "broken_ops.py").write_text(text)
    describe_package(site, "broken-ops", "2.0", "broken", "broken_ops")
    with pytest.raises(LibraryError) as caught:
        find_library_of("broken")
    assert said in str(caught.value)


def test_a_package_whose_kernels_need_a_module_that_is_missing(site: Path) -> None:
    """A machine that serves models has the library, and neither Triton nor torch."""
    negate_package(site)
    (site / "other_ops.py").write_text("import no_such_compiler")
    assert find_library_of("other.ops") == str(site / "libother_ops.so")
    (site / "libother_ops.so").unlink()
    with pytest.raises(LibraryError, match="failed: ModuleNotFoundError: No module named 'no_such_compiler'"):
        find_library_of("other.ops")


def test_two_packages_with_one_domain(site: Path) -> None:
    negate_package(site)
    describe_package(site, "more-ops", "1.0", "other.ops", "more_ops")
    said = r"packages more-ops 1.0 and other-ops 0.3 both have ops of the domain other.ops.*Uninstall one"
    with pytest.raises(LibraryError, match=said):
        deploy.session(negate_model("other.ops"), CPU)
    with pytest.raises(LibraryError, match=said):
        find_library_of("other.ops")
    opened = deploy.session(negate_model("other.ops"), CPU, site / "libother_ops.so")
    np.testing.assert_array_equal(opened.run({"x": X})["y"], -X)


def test_the_project_comes_before_the_package(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cube_package(site)
    project = cube_project(site.parent / "project")
    monkeypatch.chdir(project)
    assert find_library_of("test_cube") == str(project / "build/libtest_cube.so")
    model = three_nodes()
    del model.graph.node[1:]
    model.graph.node[0].output[0] = "y"
    assert deploy.check_model(model)[0].path == project / "build/libtest_cube.so"


def test_what_lies_in_build_is_not_loaded_because_it_lies_there(site: Path, tmp_path: Path) -> None:
    """Only `twinop build` and CMake put libraries there that are loaded unasked, and a link is not one."""
    built = put_in_build(c_library("other_ops", '-DDOMAIN="other.ops"'), Path().absolute())
    assert find_library_of("other.ops") == str(built)

    def refusals() -> Iterator[str]:
        for find in (find_library_of, lambda domain: deploy.session(negate_model("other.ops"), CPU)):
            with pytest.raises((LibraryError, ModelError)) as caught:
                find("other.ops")
            yield str(caught.value)

    elsewhere = built.rename(tmp_path / "libother_ops.so")
    built.symlink_to(elsewhere)
    refused = [*refusals()]
    elsewhere.rename(built)
    mark(built).unlink()
    refused += refusals()
    for said in refused:
        assert f"{built.parent} (not libother_ops.so, which twinop build did not put there)" in said
    assert (deploy.session(negate_model("other.ops"), CPU, built).run({"x": X})["y"] == -X).all()


def test_twinops_own_domain_is_not_looked_for_in_a_project(site: Path) -> None:
    put_in_build(find_library("custom_relu"), Path())
    assert Path(find_library_of("custom_domain")).parent != Path.cwd() / "build"


def test_no_library_of_a_domain(site: Path) -> None:
    with pytest.raises(LibraryError) as caught:
        find_library_of("none.such")
    said = str(caught.value)
    assert said.startswith(f"no library of the domain none.such found; searched {Path.cwd() / 'build'}, ")
    assert said.endswith("Build it (twinop build), or install the package that has it")
    with pytest.raises(ModelError) as refused:
        deploy.session(negate_model("none.such"), CPU)
    assert "no library has none.such::CustomNegate" in str(refused.value)
    assert str(refused.value).endswith("package that has it, or name the library (library=)")


def test_the_model_names_the_missing_package(site: Path) -> None:
    model = negate_model("none.such")
    model.metadata_props.add(key=package_key("none.such"), value="other-ops==0.3")
    with pytest.raises(ModelError, match="Build it .*, pip install other-ops==0.3, or name the library"):
        deploy.session(model, CPU)
    body = onnx.helper.make_node("Neg", ["x"], ["y"])
    opsets = [onnx.helper.make_opsetid("", 20)]
    function = onnx.helper.make_function("none.such", "CustomNegate", ["x"], ["y"], [body], opsets)
    model.functions.append(function)
    del model.graph.node[0].attribute[:]
    with pytest.warns(RuntimeWarning, match="slower: pip install other-ops==0.3, or name the library"):
        deploy.session(model, CPU)


def test_metadata_that_names_a_library_loads_nothing(site: Path) -> None:
    library = str(c_library("other_ops", '-DDOMAIN="other.ops"'))
    model = negate_model("other.ops")
    for key in (package_key("other.ops"), "twinop.library", "twinop.libraries", "library", "twinop.module"):
        model.metadata_props.add(key=key, value=library)
    onnx.save(model, "m.onnx")
    for source in ("m.onnx", model):
        with pytest.raises(ModelError, match="no library has other.ops::CustomNegate"):
            deploy.session(source, CPU)
    assert library not in Path("/proc/self/maps").read_text()


def test_a_library_of_another_abi_keeps_its_message(site: Path) -> None:
    """It is in the project, and no other one has the domain."""
    path = put_in_build(c_library("newer", '-DDOMAIN="newer"'), Path().absolute())
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"abi":3', b'"abi":9'))
    said = "Skipped: .*libnewer.so: was built by twinop .*, with version 9 of the binary interface"
    with pytest.raises(LibraryError, match=said):
        find_library_of("newer")
    with pytest.raises(ModelError, match=said):
        deploy.session(negate_model("newer"), CPU)
