"""The element `burstinfer`: frames go through it, and what the model finds in each goes on with it as metadata.

A frame that leaves the element has had an answer: a frame without one (the device died and does not come back, the
execution failed or took too long) is dropped, with a warning on the bus, because it would look like a frame in which
nothing was found.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstBase", "1.0")
gi.require_version("GstVideo", "1.0")
from gi.repository import GObject, Gst, GstBase, GstVideo  # noqa: E402 (after their versions)

from burst import BurstError  # noqa: E402
from driver.errors import DriverError  # noqa: E402
from driver.gateways.gstreamer.frame_metadata import attach  # noqa: E402
from driver.gateways.gstreamer.frame_model import TYPES_OF_ONE, FrameModel, FrameOptions  # noqa: E402
from driver.gateways.gstreamer.frame_pool import descriptor_of, offer  # noqa: E402
from fmq import FmqError  # noqa: E402

_FAILURES = (BurstError, DriverError, FmqError, OSError, ValueError)
_ANY = "video/x-raw,format={RGB,RGBP,GRAY8},width=(int)[1,32767],height=(int)[1,32767]"
_FLAGS = GObject.ParamFlags.READWRITE
_READY = _FLAGS | Gst.PARAM_MUTABLE_READY


def _pad(name: str, direction: Gst.PadDirection) -> Gst.PadTemplate:
    return Gst.PadTemplate.new(name, direction, Gst.PadPresence.ALWAYS, Gst.Caps.from_string(_ANY))


def _text(blurb: str, default: str = "") -> Any:
    return GObject.Property(type=str, default=default, nick=blurb, blurb=blurb, flags=_READY)


def _number(blurb: str, default: float, least: float, most: float) -> Any:
    return GObject.Property(
        type=float, default=default, minimum=least, maximum=most, nick=blurb, blurb=blurb, flags=_READY
    )


def _counter_property(nick: str) -> Any:
    return GObject.Property(type=GObject.TYPE_UINT64, nick=nick, flags=GObject.ParamFlags.READABLE)


class BurstInfer(GstBase.BaseTransform):
    """In place: the frame that comes in goes out."""

    __gtype_name__ = "BurstInfer"
    __gstmetadata__: ClassVar = (
        "Burst inference",
        "Filter/Analyzer/Video",
        "Finds objects in frames by a model in another process, and attaches them as regions of interest",
        "The authors of Burst",
    )
    __gsttemplates__: ClassVar = (_pad("sink", Gst.PadDirection.SINK), _pad("src", Gst.PadDirection.SRC))

    model = _text("Path of an .onnx or .tflite file that finds objects; it has to be set")
    device = _text("Name of a device, or path of the socket where one is served; empty: the file's own runtime")
    labels = _text("Path of a file with the names of classes, one per line; empty: those in the model file")
    model_type = _text(f"What the outputs mean: auto, {', '.join(TYPES_OF_ONE)}", "auto")
    application = _text("Name of the camera in burst top and in metrics; empty: the element's name")
    threshold = _number("Least score of a detection", 0.5, 0.0, 1.0)
    scale = _number(
        "A model of floats gets (byte - mean) * scale; the default makes 0 to 1 of bytes", 1 / 255, -1e6, 1e6
    )
    mean = _number("A model of floats gets (byte - mean) * scale; in steps of bytes, 0 to 255", 0.0, -1e6, 1e6)
    timeout = _number("Seconds after which a frame without an answer is dropped", 5.0, 0.001, 3600.0)
    max_failures = GObject.Property(
        type=int,
        default=90,
        minimum=1,
        maximum=2**31 - 1,
        nick="Failures that end the stream",
        blurb="Frames without an answer, one after the other, after which the element gives up",
        flags=_FLAGS,
    )

    def __init__(self) -> None:
        super().__init__()
        self._frames: FrameModel | None = None
        self._pool: Gst.BufferPool | None = None
        self._done = self._copies = self._dropped = self._failed_last = 0
        self.set_in_place(True)

    @_counter_property("Frames")
    def frames(self) -> int:
        """Frames that had an answer."""
        return self._done

    @_counter_property("Copies")
    def copies(self) -> int:
        """Frames that were copied for the device: they lay elsewhere, or the model does not take bytes."""
        return self._copies

    @_counter_property("Dropped")
    def dropped(self) -> int:
        """Frames that were dropped without an answer, each with a warning on the bus."""
        return self._dropped

    # ---- from start to stop

    def do_start(self) -> bool:
        """Load the model, and start the device."""
        application = str(self.application or self.get_name())
        options = FrameOptions(
            self.model,
            self.device,
            self.labels,
            self.model_type,
            threshold=self.threshold,
            scale=self.scale,
            mean=self.mean,
            timeout=self.timeout,
            application=application,
        )
        self._failed_last = 0
        try:
            self._frames = FrameModel(options)
        except _FAILURES as error:
            return self._failed("cannot start", error, Gst.ResourceError.FAILED)
        return True

    def do_stop(self) -> bool:
        """End the burst. The device process ends later, when it has no client any more."""
        frames, self._frames, self._pool = self._frames, None, None
        if frames is not None:
            frames.close()
        return True

    # ---- what comes in

    def do_transform_caps(self, _direction: Gst.PadDirection, caps: Gst.Caps, wanted: Gst.Caps | None) -> Gst.Caps:
        """Return the caps, which both sides have: what the model takes."""
        own = _ANY if self._frames is None else self._frames.layout.caps
        found = caps.intersect(Gst.Caps.from_string(own))
        return found if wanted is None else wanted.intersect(found)

    def do_set_caps(self, caps: Gst.Caps, _out: Gst.Caps) -> bool:
        """Take frames of another form from now on."""
        info = GstVideo.VideoInfo.new_from_caps(caps)
        if info is None or self._frames is None:
            return False
        planes = range(info.finfo.n_planes)
        try:
            self._frames.configure(
                info.width, info.height, [info.stride[n] for n in planes], [info.offset[n] for n in planes]
            )
        except _FAILURES as error:
            return self._failed(f"cannot take {caps.to_string()}", error, Gst.StreamError.FORMAT)
        return True

    def do_propose_allocation(self, _decided: Gst.Query | None, query: Gst.Query) -> bool:
        """Offer memory that the device maps, where the model can use it as it is."""
        if self._frames is not None and self._frames.layout.takes_bytes:
            self._pool = offer(query)
        return True

    # ---- frames

    def do_transform_ip(self, buffer: Gst.Buffer) -> Gst.FlowReturn:
        """Run the model on the frame, and attach what it found. To GStreamer, an exception would be OK."""
        try:
            return self._looked_at(buffer)
        except BaseException as error:  # noqa: BLE001 (no frame leaves without an answer)
            self._failed("the element failed", error, Gst.LibraryError.FAILED)
            return Gst.FlowReturn.ERROR

    def _looked_at(self, buffer: Gst.Buffer) -> Gst.FlowReturn:
        frames = self._frames
        if frames is None or frames.burst is None:
            return Gst.FlowReturn.NOT_NEGOTIATED
        where = descriptor_of(buffer) if frames.may_be_in_place else None
        try:
            if where is not None:
                found = frames.detect_in_place(*where)
            else:
                self._copies += 1
                with buffer.map(Gst.MapFlags.READ) as mapped:
                    found = frames.detect_in_copy(mapped.data)
        except _FAILURES as error:
            return self._without_answer(error)
        self._done += 1
        self._failed_last = 0
        attach(buffer, found, frames.labels, frames.width, height=frames.height)
        return Gst.FlowReturn.OK

    def _without_answer(self, error: Exception) -> Gst.FlowReturn:
        self._dropped += 1
        self._failed_last += 1
        if self._failed_last >= self.max_failures:
            self._failed(
                f"{self._failed_last} frames, one after the other, had no answer", error, Gst.StreamError.FAILED
            )
            return Gst.FlowReturn.ERROR
        text = f"a frame had no answer from the device, and was dropped ({self._dropped} so far)"
        self._say(Gst.MessageType.WARNING, Gst.StreamError.FAILED, text, error)
        return Gst.FlowReturn.CUSTOM_SUCCESS  # the base class drops it

    def _failed(self, what: str, error: BaseException, code: Any) -> bool:
        self._say(Gst.MessageType.ERROR, code, f"{what}: {error}", error)
        return False

    def _say(self, kind: Gst.MessageType, code: Any, text: str, error: BaseException) -> None:
        debug = f"{type(error).__name__}: {error}"
        self.message_full(kind, type(code).quark(), int(code), text, debug, __file__, "", 0)
