"""A .proto file read as its compiler would: messages, enums, maps, oneofs, methods; ours has no more.

So there is no generated code that asks for one version of protobuf, and the messages live in a pool of their own: a
program may import `tritonclient` or `kserve`, which have other definitions of the same names, beside them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

_TOKEN = re.compile(r'"[^"]*"|[\w.]+|[{}()<>=;,]')
_SCALARS = {
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "float": FieldDescriptorProto.TYPE_FLOAT,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "uint32": FieldDescriptorProto.TYPE_UINT32,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
}


class Method(NamedTuple):
    """A method of the service: names of its messages, and whether each side is a stream."""

    name: str
    request: str
    response: str
    streams: tuple[bool, bool]


class ProtoFile:
    """What a .proto file declares: `file` for a descriptor pool, and `methods` of its `service`."""

    def __init__(self, name: str, text: str) -> None:
        """Raises ValueError for what this reader does not know."""
        self._tokens: list[str] = _TOKEN.findall(re.sub(r"//[^\n]*", "", text))[::-1]
        self.file = FileDescriptorProto(name=name, syntax="proto3")
        self.service, self.methods = "", list[Method]()
        while self._tokens:
            self._read_top(self._next())

    def _next(self) -> str:
        return self._tokens.pop()

    def _expect(self, *tokens: str) -> None:
        for token in tokens:
            if (found := self._next()) != token:
                raise ValueError(f"{self.file.name}: {found!r} where {token!r} belongs")

    def _is_next(self, token: str) -> bool:
        if self._tokens[-1] != token:
            return False
        self._next()
        return True

    def _read_top(self, word: str) -> None:
        match word:
            case "syntax":
                self._expect("=", '"proto3"', ";")
            case "package":
                self.file.package = self._next()
                self._expect(";")
            case "message":
                self._read_message(self.file.message_type.add())
            case "enum":
                self._read_enum(self.file.enum_type.add())
            case "service":
                self._read_service()
            case _:
                raise ValueError(f"{self.file.name}: {word!r} is not known here")

    def _read_service(self) -> None:
        self.service = f"{self.file.package}.{self._next()}"
        self._expect("{")
        while not self._is_next("}"):
            self._expect("rpc")
            name = self._next()
            request, takes = self._read_type_of_method()
            self._expect("returns")
            response, gives = self._read_type_of_method()
            self._expect(";")
            self.methods.append(Method(name, request, response, (takes, gives)))

    def _read_type_of_method(self) -> tuple[str, bool]:
        self._expect("(")
        is_stream = self._is_next("stream")
        name = self._next()
        self._expect(")")
        return name, is_stream

    def _read_enum(self, enum: EnumDescriptorProto) -> None:
        enum.name = self._next()
        self._expect("{")
        while not self._is_next("}"):
            name = self._next()
            self._expect("=")
            enum.value.add(name=name, number=int(self._next()))
            self._expect(";")

    def _read_message(self, message: DescriptorProto) -> None:
        message.name = self._next()
        self._expect("{")
        while not self._is_next("}"):
            match self._tokens[-1]:
                case "message":
                    self._next()
                    self._read_message(message.nested_type.add())
                case "enum":
                    self._next()
                    self._read_enum(message.enum_type.add())
                case "oneof":
                    self._next()
                    message.oneof_decl.add(name=self._next())
                    self._expect("{")
                    while not self._is_next("}"):
                        self._read_field(message).oneof_index = len(message.oneof_decl) - 1
                case _:
                    self._read_field(message)

    def _read_field(self, message: DescriptorProto) -> FieldDescriptorProto:
        field = message.field.add(label=FieldDescriptorProto.LABEL_OPTIONAL)
        if self._is_next("repeated"):
            field.label = FieldDescriptorProto.LABEL_REPEATED
        kind = self._next()
        key = value = ""
        if kind == "map":
            self._expect("<")
            key = self._next()
            self._expect(",")
            value = self._next()
            self._expect(">")
        field.name = self._next()
        self._expect("=")
        field.number = int(self._next())
        self._expect(";")
        if key:
            field.label = FieldDescriptorProto.LABEL_REPEATED
            kind = _add_map_entry(message, field.name, key, value)
        _set_type(field, kind)
        return field


def _set_type(field: FieldDescriptorProto, kind: str) -> None:
    """A name that is no scalar's is a message's or an enum's: the pool finds out which."""
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type_name = kind


def _add_map_entry(message: DescriptorProto, name: str, key: str, value: str) -> str:
    """A map is a list of messages of two fields, named after it."""
    entry = message.nested_type.add(name="".join(word.capitalize() for word in name.split("_")) + "Entry")
    entry.options.map_entry = True
    for number, (word, kind) in enumerate((("key", key), ("value", value)), 1):
        field = entry.field.add(name=word, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
        _set_type(field, kind)
    return str(entry.name)
