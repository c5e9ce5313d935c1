"""The messages of Triton's RepositoryIndex call, which KServe's protobuf file lacks."""

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_STRING, _BOOL, _MESSAGE = _Field.TYPE_STRING, _Field.TYPE_BOOL, _Field.TYPE_MESSAGE


@cache
def messages() -> tuple[Any, Any]:
    """Return the classes of the request and the response, as Triton's grpc_service.proto defines them.

    They have their own descriptor pool: in the default one they would clash with tritonclient's.
    """
    file = descriptor_pb2.FileDescriptorProto(name="twinop_index.proto", package="inference", syntax="proto3")
    request = file.message_type.add(name="RepositoryIndexRequest")
    request.field.add(name="repository_name", number=1, type=_STRING, label=_Field.LABEL_OPTIONAL)
    request.field.add(name="ready", number=2, type=_BOOL, label=_Field.LABEL_OPTIONAL)
    response = file.message_type.add(name="RepositoryIndexResponse")
    entry = response.nested_type.add(name="ModelIndex")
    for number, name in enumerate(("name", "version", "state", "reason"), 1):
        entry.field.add(name=name, number=number, type=_STRING, label=_Field.LABEL_OPTIONAL)
    models = response.field.add(name="models", number=1, type=_MESSAGE, label=_Field.LABEL_REPEATED)
    models.type_name = ".inference.RepositoryIndexResponse.ModelIndex"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = (pool.FindMessageTypeByName(f"inference.{each.name}") for each in (request, response))
    first, second = map(message_factory.GetMessageClass, made)
    return first, second
