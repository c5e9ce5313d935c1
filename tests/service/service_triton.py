"""Calls of tritonclient's gRPC client."""

from typing import Any

import numpy as np
import tritonclient.grpc as triton


def echoed(port: int | None, model: str, datatype: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """Return y of an identity model, with its datatype."""
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        given = triton.InferInput("x", list(array.shape), datatype)
        given.set_data_from_numpy(array)
        result = client.infer(model, [given], request_id="from triton")
        answer = result.get_response()
        assert (answer.id, answer.model_name, answer.model_version) == ("from triton", model, "1")
        return answer.outputs[0].datatype, result.as_numpy("y")


def index(client: Any, ready: bool = False) -> list[Any]:
    """List the models; tritonclient's method has no `ready`."""
    if not ready:
        return list(client.get_model_repository_index().models)
    return list(
        client._client_stub.RepositoryIndex(triton.service_pb2.RepositoryIndexRequest(ready=True)).models
    )


def repository(port: int | None, model: str) -> dict[str, Any]:
    """Load and unload a model, and return what the client observes."""
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        seen: dict[str, Any] = {"live": client.is_server_live(), "ready": client.is_server_ready()}
        seen["extensions"] = list(client.get_server_metadata().extensions)
        seen["model ready"] = client.is_model_ready(model), client.is_model_ready(model, "1")
        metadata = client.get_model_metadata(model, "1")
        seen["metadata"] = (
            metadata.platform,
            list(metadata.versions),
            [(each.name, each.datatype, list(each.shape)) for each in metadata.inputs],
        )
        client.unload_model(model)
        try:
            seen["unloaded"] = client.is_model_ready(model)
        except triton.InferenceServerException as error:
            seen["unloaded"] = error.status()
        states = {each.name: (each.version, each.state, each.reason) for each in index(client)}
        seen["index"] = states[model]
        seen["index of the ready"] = model in {each.name for each in index(client, ready=True)}
        try:
            client.load_model(model, config="{}")
        except triton.InferenceServerException as error:
            seen["loaded with parameters"] = (error.status(), error.message())
        client.load_model(model)
        seen["loaded"] = client.is_model_ready(model)
        seen["index of the ready, loaded"] = model in {each.name for each in index(client, ready=True)}
        return seen
