"""The few messages of protobuf that we read, described here: TensorBoard's events and the history of W&B's runs.

The field numbers are those of `tensorflow/core/util/event.proto`, `summary.proto`, `tensor.proto` and of
`wandb_internal.proto`; fields that are not named here are skipped by protobuf itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.extras import missing_extra

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
except ImportError as error:
    raise missing_extra("historic", "reading TensorBoard and W&B files (protobuf)") from error

DecodeError = message.DecodeError

_D = descriptor_pb2.FieldDescriptorProto
_DOUBLE, _FLOAT, _INT64, _INT32 = _D.TYPE_DOUBLE, _D.TYPE_FLOAT, _D.TYPE_INT64, _D.TYPE_INT32
_STRING, _BYTES, _MESSAGE = _D.TYPE_STRING, _D.TYPE_BYTES, _D.TYPE_MESSAGE
_ONE, _MANY = _D.LABEL_OPTIONAL, _D.LABEL_REPEATED

# message: (field, number, type, one or many, type of a message)
_SHAPES: Mapping[str, Sequence[tuple[str, int, int, int, str]]] = {
    "Tensor": (
        ("dtype", 1, _INT32, _ONE, ""), ("tensor_content", 4, _BYTES, _ONE, ""), ("float_val", 5, _FLOAT, _MANY, ""),
        ("double_val", 6, _DOUBLE, _MANY, ""), ("int_val", 7, _INT32, _MANY, ""), ("int64_val", 10, _INT64, _MANY, ""),
    ),
    "Value": (
        ("tag", 1, _STRING, _ONE, ""), ("simple_value", 2, _FLOAT, _ONE, ""), ("tensor", 8, _MESSAGE, _ONE, "Tensor"),
    ),
    "Summary": (("value", 1, _MESSAGE, _MANY, "Value"),),
    "Event": (
        ("wall_time", 1, _DOUBLE, _ONE, ""), ("step", 2, _INT64, _ONE, ""), ("summary", 5, _MESSAGE, _ONE, "Summary"),
    ),
    "HistoryStep": (("num", 1, _INT64, _ONE, ""),),
    "HistoryItem": (
        ("key", 1, _STRING, _ONE, ""), ("nested_key", 2, _STRING, _MANY, ""), ("integer", 5, _D.TYPE_SINT64, _ONE, ""),
        ("number", 6, _DOUBLE, _ONE, ""), ("value_json", 16, _STRING, _ONE, ""),
    ),
    "History": (("item", 1, _MESSAGE, _MANY, "HistoryItem"), ("step", 2, _MESSAGE, _ONE, "HistoryStep")),
    "Run": (
        ("run_id", 1, _STRING, _ONE, ""), ("project", 3, _STRING, _ONE, ""), ("run_group", 6, _STRING, _ONE, ""),
        ("display_name", 8, _STRING, _ONE, ""), ("host", 13, _STRING, _ONE, ""),
    ),
    "WandbRecord": (("history", 2, _MESSAGE, _ONE, "History"), ("run", 17, _MESSAGE, _ONE, "Run")),
}  # fmt: skip
_PACKAGE = "transom.historic"


def _built() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="transom/historic.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _SHAPES.items():
        shape = file.message_type.add(name=name)
        for field, number, kind, label, of in fields:
            type_name = f".{_PACKAGE}.{of}" if of else None
            shape.field.add(name=field, number=number, type=kind, label=label, type_name=type_name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file) if hasattr(pool, "Add") else pool.AddSerializedFile(file.SerializeToString())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _SHAPES}


_CLASSES = _built()
Event: Any = _CLASSES["Event"]
WandbRecord: Any = _CLASSES["WandbRecord"]
