"""The protocol as HTTP/REST with binary tensors: paths and JSON to calls and back. Needs no network."""

from __future__ import annotations

import json
import logging
import re
import zlib
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from driver.gateways.http_answer import BROWSER_FIELDS, FOR_NO_BROWSER, HttpAnswer
from driver.gateways.oip.inference import GivenTensor, InferCall, region_slice, time_and_priority, wanted_tensor
from driver.gateways.refusal import Refusal, RefusalCode, invalid, not_found, refusal_of
from driver.gateways.request_memory import SMALL, MemoryClaim, RequestMemory, json_bytes, json_object

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from driver.gateways.oip.inference import AnsweredTensor, InferAnswer, WantedTensor
    from driver.gateways.oip.service import InferenceService

_LOG = logging.getLogger("burst.oip")
_LENGTH = "inference-header-content-length"
_MODEL = r"/v2/models/([^/]+)(?:/versions/([^/]+))?"
_REGION = r"/v2/systemsharedmemory(?:/region/([^/]+))?"
_CUDA = r"/v2/cudasharedmemory(?:/region/([^/]+))?"
_MOST_JSON = 64 << 20
_PACKED = 1032  # times its size can a body become by unpacking


class HttpFront:
    """Answers requests by calling the service. Any thread."""

    def __init__(self, service: InferenceService, most_bytes: int) -> None:
        """`most_bytes`: of a body, also of one that came compressed."""
        self._service, self._most = service, most_bytes
        self.memory = RequestMemory()
        its = service
        self._routes: list[tuple[str, re.Pattern[str], Callable[..., Any]]] = [
            ("GET", re.compile(r"/v2/?"), lambda _: its.server_metadata()),
            ("GET", re.compile(r"/v2/health/live"), lambda _: its.server_live()),
            ("GET", re.compile(r"/v2/health/ready"), self._server_ready),
            ("GET", re.compile(r"/v2/models/stats"), lambda _: its.model_statistics()),
            ("GET", re.compile(_MODEL), lambda _, name, version: its.model_metadata(name, version)),
            ("GET", re.compile(_MODEL + "/ready"), self._model_ready),
            ("GET", re.compile(_MODEL + "/config"), lambda _, *which: _said(its.model_config(*which))),
            ("GET", re.compile(_MODEL + "/stats"), lambda _, *which: its.model_statistics(*which)),
            ("POST", re.compile("/v2/repository/index"), self._index),
            ("POST", re.compile("/v2/repository/models/([^/]+)/load"), self._load),
            ("POST", re.compile("/v2/repository/models/([^/]+)/unload"), lambda _, name: its.unload(name)),
            ("GET", re.compile(_REGION + "/status"), lambda _, name: its.region_status(name)),
            ("POST", re.compile(_REGION + "/register"), self._register),
            ("POST", re.compile(_REGION + "/unregister"), lambda _, name: its.unregister_region(name)),
            ("GET", re.compile(_CUDA + "/status"), lambda _, name: its.cuda_status(name)),
            ("POST", re.compile(_CUDA + "/register"), lambda _, name: its.register_cuda(name)),
            ("POST", re.compile(_CUDA + "/unregister"), lambda _, __: its.unregister_cuda()),
        ]
        self._infer_path = re.compile(_MODEL + "/infer")

    def answer(
        self, method: str, path: str, fields: Mapping[str, str], body: bytes, *, claim: MemoryClaim | None = None
    ) -> HttpAnswer:
        """`path`: as it came, quoted. `fields`: of the header, their names in small letters. `claim`: the memory of the
        body, to which what it becomes is added.
        """
        if any(name in fields for name in BROWSER_FIELDS):
            return HttpAnswer.of({"error": FOR_NO_BROWSER}, 403)
        try:
            with claim or MemoryClaim(self.memory) as memory:
                body = self._unpacked(fields.get("content-encoding", ""), body, memory)
                head, tail = _parts(fields.get(_LENGTH), body)
                if len(head) > SMALL:
                    memory.wait_for(json_bytes(head))
                if method == "POST" and (match := self._infer_path.fullmatch(path)):
                    which = unquote(match[1]), unquote(match[2] or "")
                    trace = fields.get("traceparent", "")
                    if fields.get(_LENGTH) == "0":
                        return self._infer_raw(which, tail, trace)
                    return self._infer(which, head, tail, trace)
                return self._routed(method, path, head)
        except Exception as error:  # noqa: BLE001 (told to the client)
            refusal = refusal_of(error, _note)
            return HttpAnswer.of({"error": refusal.text}, refusal.code.http)

    def _unpacked(self, encoding: str, body: bytes, claim: MemoryClaim) -> bytes:
        """Decompress a body. Raise Refusal for one that is larger than a body may be."""
        if encoding in ("", "identity"):
            return body
        if encoding not in ("gzip", "deflate"):
            raise Refusal(RefusalCode.UNIMPLEMENTED, f"content-encoding {encoding!r:.40}: gzip, deflate or none")
        claim.wait_for(min(self._most, _PACKED * len(body)))
        unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either header
        try:
            found = unpacker.decompress(body, self._most)
        except zlib.error:
            raise invalid(f"the body is not {encoding}") from None
        if not unpacker.eof:
            raise invalid(f"the body is damaged, or has more than {self._most} bytes")
        return found

    def _routed(self, method: str, path: str, body: bytes) -> HttpAnswer:
        for verb, pattern, call in self._routes:
            if match := pattern.fullmatch(path):
                if verb != method:
                    return HttpAnswer.of({"error": f"{path:.200} takes {verb}"}, 405)
                found = call(body, *_words(match))
                return found if isinstance(found, HttpAnswer) else HttpAnswer.of(found)
        raise not_found(f"there is no {path!r:.200} in version 2 of the Open Inference Protocol")

    def _server_ready(self, _: bytes) -> HttpAnswer:
        found = self._service.server_ready()
        return HttpAnswer.of(found, 200 if found["ready"] else 503)

    def _model_ready(self, _: bytes, name: str, version: str) -> HttpAnswer:
        found = self._service.model_ready(name, version)
        return HttpAnswer.of(found, 200 if found["ready"] else 503)

    def _index(self, body: bytes) -> list[dict[str, Any]]:
        models: list[dict[str, Any]] = self._service.repository_index(ready=bool(_json(body).get("ready")))["models"]
        return models

    def _load(self, body: bytes, name: str) -> dict[str, Any]:
        return self._service.load(name, _dict(_json(body), "parameters"))

    def _register(self, body: bytes, name: str) -> dict[str, Any]:
        said = _json(body)
        key, offset, nbytes = said.get("key"), said.get("offset", 0), said.get("byte_size")
        if not isinstance(key, str) or type(offset) is not int or type(nbytes) is not int:
            raise invalid("a region is registered by key, offset and byte_size: a string and two integers")
        return self._service.register_region(name, key, offset, nbytes)

    # ---- inference

    def _infer_raw(self, which: tuple[str, str], data: memoryview, trace: str) -> HttpAnswer:
        given = [self._service.raw_input(*which, data)]
        deadline, priority = time_and_priority({}, None)
        return _encoded(
            self._service.infer(
                InferCall(*which, "", given, None, deadline=deadline, priority=priority, traceparent=trace)
            )
        )

    def _infer(self, which: tuple[str, str], head: bytes, tail: memoryview, trace: str) -> HttpAnswer:
        said = _json(head)
        parameters = _dict(said, "parameters")
        deadline, priority = time_and_priority(parameters, None)
        given = _given(_list(said, "inputs"), tail)
        binary = parameters.get("binary_data_output", False) is True
        wanted = [_wanted(each, binary=binary) for each in _list(said, "outputs")] or None
        id_ = said.get("id", "")
        if not isinstance(id_, str):
            raise invalid("id must be a string")
        answer = self._service.infer(
            InferCall(*which, id_, given, wanted, deadline=deadline, priority=priority, traceparent=trace)
        )
        if wanted is None:
            answer = answer._replace(tensors=[each._replace(is_binary=binary) for each in answer.tensors])
        return _encoded(answer)


def _words(match: re.Match[str]) -> list[str]:
    return [unquote(word or "") for word in match.groups()]


def _parts(length: str | None, body: bytes) -> tuple[bytes, memoryview]:
    """Return the JSON at the beginning, and the binary tensors after it. Raise Refusal."""
    if length is None:
        return body, memoryview(b"")
    if not length.isascii() or not length.isdecimal() or len(length) > 12 or int(length) > len(body):
        raise invalid(f"{_LENGTH}: {length!r:.20} is not the length of JSON in a body of {len(body)} bytes")
    view = memoryview(body)
    return bytes(view[: int(length)]), view[int(length) :]


def _json(body: bytes) -> dict[str, Any]:
    """Return an object of JSON; an empty one for an empty body. Raise Refusal."""
    if not body:
        return {}
    if len(body) > _MOST_JSON:
        raise invalid(f"{len(body)} bytes of JSON; send tensors in binary form")
    try:
        return json_object(body)
    except ValueError as error:
        raise invalid(str(error)) from None


def _dict(said: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = said.get(name, {})
    if not isinstance(found, dict):
        raise invalid(f"{name!r} must be an object")
    return found


def _list(said: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = said.get(name, [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise invalid(f"{name!r} must be a list of objects")
    return found


def _given(inputs: list[dict[str, Any]], tail: memoryview) -> list[GivenTensor]:
    found, begin = [], 0
    for each in inputs:
        name, datatype, shape = each.get("name"), each.get("datatype"), each.get("shape")
        if not isinstance(name, str) or not isinstance(datatype, str) or not _is_shape(shape):
            raise invalid("each input needs a name, a datatype, and a shape, which is a list of integers")
        what = f"input {name!r:.80}"
        parameters = _dict(each, "parameters")
        place, size, raw = region_slice(parameters, what), parameters.get("binary_data_size"), None
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(tail) - begin:
                raise invalid(f"{what}: binary_data_size={size!r:.40}, and {len(tail) - begin} bytes are left")
            raw, begin = tail[begin : begin + size], begin + size
        values = each.get("data")
        if sum(source is not None for source in (place, raw, values)) != 1:
            raise invalid(
                f"{what} needs its values in exactly one place: data, binary_data_size or shared_memory_region"
            )
        if values is not None and not isinstance(values, list):
            raise invalid(f"{what}: data must be a list")
        found.append(GivenTensor(name, datatype, tuple(shape or ()), raw, values=values, place=place))
    if begin != len(tail):
        raise invalid(f"{len(tail) - begin} bytes of binary data do not belong to any input")
    return found


def _is_shape(shape: object) -> bool:
    return isinstance(shape, list) and all(type(size) is int for size in shape)


def _wanted(each: dict[str, Any], *, binary: bool) -> WantedTensor:
    name = each.get("name")
    if not isinstance(name, str):
        raise invalid("each output needs a name")
    parameters = _dict(each, "parameters")
    return wanted_tensor(name, parameters, is_binary=parameters.get("binary_data", binary) is True)


def _encoded(answer: InferAnswer) -> HttpAnswer:
    said: dict[str, Any] = {"model_name": answer.model, "model_version": answer.version}
    if answer.id:
        said["id"] = answer.id
    raw: list[Any] = []
    said["outputs"] = [_output(each, raw) for each in answer.tensors]
    head = json.dumps(said).encode()
    if not raw:
        return HttpAnswer(200, [("content-type", "application/json")], [head])
    fields = [("content-type", "application/octet-stream"), ("Inference-Header-Content-Length", str(len(head)))]
    return HttpAnswer(200, fields, [head, *raw])


def _output(each: AnsweredTensor, raw: list[Any]) -> dict[str, Any]:
    said: dict[str, Any] = {"name": each.name, "datatype": each.kind.name, "shape": list(each.shape)}
    if each.place:
        said["parameters"] = {
            "shared_memory_region": each.place.region,
            "shared_memory_offset": each.place.offset,
            "shared_memory_byte_size": each.place.nbytes,
        }
        return said
    if each.is_binary:
        raw.append(each.packed())
        said["parameters"] = {"binary_data_size": len(raw[-1])}
    elif not each.kind.contents:
        raise invalid(f"output {each.name!r} is {each.kind.name}: ask for it with binary_data")
    else:
        said["data"] = each.values()
    return said


def _said(message: Any) -> dict[str, Any]:
    """Return a protobuf message as plain JSON with the protocol's names, numbers as numbers."""
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            is_plain = field.message_type.fields_by_name["value"].message_type is None
            found[field.name] = {str(k): value[k] if is_plain else _said(value[k]) for k in value}
        elif field.enum_type is not None:
            found[field.name] = field.enum_type.values_by_number[value].name
        elif field.message_type is not None:
            found[field.name] = [_said(each) for each in value] if field.is_repeated else _said(value)
        else:
            found[field.name] = list(value) if field.is_repeated else value
    return found


def _note(error: Exception) -> None:
    _LOG.error("a request failed", exc_info=error)
