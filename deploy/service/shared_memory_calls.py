"""The calls to register shared memory, over HTTP and gRPC. There is none of CUDA's to unregister."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .protocol import pb
from .shared_memory import Regions

if TYPE_CHECKING:
    from .grpc_server import Call


def routes(regions: Regions, read_object: Callable[[Request], Awaitable[dict[str, Any]]]) -> list[Route]:
    """Return the HTTP routes. `read_object` returns a request's body, a JSON object."""

    def named(request: Request) -> tuple[str, str]:
        return request.path_params.get("region", ""), str(request.client)

    async def register(request: Request) -> Response:
        given = await read_object(request)
        key, offset, size = given.get("key"), given.get("offset", 0), given.get("byte_size")
        regions.register(*named(request), key, offset, size)
        return Response()

    async def unregister(request: Request) -> Response:
        regions.unregister(*named(request))
        return Response()

    async def status(request: Request) -> Response:
        return Response(orjson.dumps(regions.status(*named(request))), media_type="application/json")

    async def unregister_cuda(request: Request) -> Response:
        return Response()

    path = "/v2/systemsharedmemory"
    return [
        Route(f"{path}/region/{{region}}/register", register, methods=["POST"]),
        Route(f"{path}/region/{{region}}/unregister", unregister, methods=["POST"]),
        Route(f"{path}/unregister", unregister, methods=["POST"]),
        Route(f"{path}/region/{{region}}/status", status, methods=["GET"]),
        Route(f"{path}/status", status, methods=["GET"]),
        Route("/v2/cudasharedmemory/unregister", unregister_cuda, methods=["POST"]),
    ]


class SharedMemoryCalls:
    """The calls over gRPC."""

    def __init__(self, regions: Regions) -> None:
        self.regions = regions

    async def SystemSharedMemoryRegister(self, request: Any, call: "Call") -> Any:
        self.regions.register(request.name, call.peer(), request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(self, request: Any, call: "Call") -> Any:
        self.regions.unregister(request.name, call.peer())
        return pb.SystemSharedMemoryUnregisterResponse()

    async def SystemSharedMemoryStatus(self, request: Any, call: "Call") -> Any:
        found = self.regions.status(request.name, call.peer())
        return pb.SystemSharedMemoryStatusResponse(regions={each["name"]: each for each in found})

    async def CudaSharedMemoryUnregister(self, request: Any, call: "Call") -> Any:
        return pb.CudaSharedMemoryUnregisterResponse()
