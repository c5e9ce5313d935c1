"""Instances on a GPU: all datatypes, and running out of memory."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import service_models
from service_codecs import raw, values
from service_loads import loaded as loaded_with

from twinop.deploy import session
from twinop.deploy.service.errors import OUT_OF_MEMORY, ServiceError
from twinop.deploy.service.instance import LoadedModel

cuda = pytest.mark.cuda


def loaded(folder: Path, model: onnx.ModelProto, **given: Any) -> LoadedModel:
    return loaded_with(folder, model, **{"provider": "cuda"} | given)


SHAPES = ((1, 3), (5, 3), (2, 3), (300, 3), (1, 3), (0, 3))


@cuda
@pytest.mark.parametrize("datatype", service_models.ELEMENTS)
def test_every_datatype_comes_back(tmp_path: Path, datatype: str) -> None:
    instance = loaded(tmp_path, service_models.identity(datatype)).instances[0]
    kept = []  # earlier results must not change
    for seed, shape in enumerate(SHAPES):
        first = values(datatype, *shape, seed=seed)
        second = values(datatype, 2, 3, seed=seed + 100)
        kept.append((instance.run([{"x": first}], ["y"])["y"], first))
        kept.append(
            (instance.run([{"x": first}, {"x": second}], ["y"])["y"], np.concatenate([first, second]))
        )
    rows = values(datatype, 8, 3)[::2]
    kept.append((instance.run([{"x": rows}], ["y"])["y"], rows))
    for found, expected in kept:
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert raw(found) == raw(expected)


@cuda
def test_auto_takes_the_gpu(tmp_path: Path) -> None:
    model = loaded(tmp_path, service_models.mlp(64, 128, 16), provider="auto", max_batch_size=8)
    assert (model.session.device, model.session.reason) == ("cuda:0", "CUDA works here")
    assert model.custom_nodes == ["CustomRelu x1"]
    assert model.difference is not None and "not compared" not in model.difference
    rows = np.random.default_rng(0).standard_normal((5, 64), np.float32)
    found = model.instances[0].run([{"x": rows[:2]}, {"x": rows[2:]}], ["y"])["y"]
    expected = session(service_models.mlp(64, 128, 16), ["CPUExecutionProvider"]).run({"x": rows})["y"]
    np.testing.assert_allclose(found, expected, atol=5e-3)
    model.close()


@cuda
def test_out_of_gpu_memory(tmp_path: Path) -> None:
    instance = loaded(tmp_path, service_models.expand()).instances[0]
    x = np.ones(1, np.float32)
    for _ in range(2):
        with pytest.raises(ServiceError, match="not enough memory for this request") as error:
            instance.run([{"x": x, "shape": np.array([1 << 40])}], ["y"])
        assert error.value.failure is OUT_OF_MEMORY
        assert instance.run([{"x": x, "shape": np.array([3, 2])}], ["y"])["y"].shape == (3, 2)


@cuda
def test_memory_comes_back(tmp_path: Path, gpu_alone: None) -> None:
    import torch

    def used() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    model = service_models.mlp(4096, 4096, 4096)  # 128 MiB of weights
    loaded(tmp_path, model, instances=2).close()
    before = used()
    for _ in range(4):
        loaded(tmp_path, model, instances=2).close()
    assert used() - before < 200 << 20
