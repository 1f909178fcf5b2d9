"""Runs a pipeline in the Python that GStreamer's packages are for, and tells what goes through it, line by line.

Arguments: the pipeline, in which the element is named `i`; then, as often as wanted, a number of frames, and the caps
that the capsfilter `c` gets after so many. Lines: JSON of a frame, a message of the bus, or the counters at the end.
"""

import json
import sys

import gi

gi.require_version("GstVideo", "1.0")
from gi.repository import GLib, Gst, GstVideo  # noqa: E402 (after its version)

try:
    gi.require_version("GstAnalytics", "1.0")
    from gi.repository import GstAnalytics
except ValueError:
    GstAnalytics = None


def tell(**fields):
    print(json.dumps(fields), flush=True)


def regions(buffer):
    found = []
    for meta in metas(buffer):
        figures = meta.get_param("detection")
        assert figures is not None
        names = "label", "label_id", "confidence", "x_min", "y_min", "x_max", "y_max"
        found.append([meta.x, meta.y, meta.w, meta.h, {name: figures.get_value(name) for name in names}])
    return found


def metas(buffer):
    number = 0
    while (meta := GstVideo.buffer_get_video_region_of_interest_meta_id(buffer, number)) is not None:
        yield meta
        number += 1


def objects(buffer):
    """[label, left, top, width, height, score] of each object detection of GstAnalytics; None: it is not installed."""
    if GstAnalytics is None:
        return None
    relations = GstAnalytics.buffer_get_analytics_relation_meta(buffer)
    found = []
    for number in range(GstAnalytics.relation_get_length(relations)):
        is_object, detection = relations.get_od_mtd(number)
        assert is_object
        _, *place, score = detection.get_location()
        found.append([GLib.quark_to_string(detection.get_obj_type()), *place, score])
    return found


def main(pipeline, *changes):
    Gst.init(None)
    player = Gst.parse_launch(pipeline)
    element = player.get_by_name("i")
    later = {int(n): caps for n, caps in zip(changes[::2], changes[1::2], strict=True)}
    seen = 0

    def look(pad, info):
        nonlocal seen
        buffer, form = info.get_buffer(), GstVideo.VideoInfo.new_from_caps(pad.get_current_caps())
        with buffer.map(Gst.MapFlags.READ) as mapped:
            mean = sum(mapped.data) / len(mapped.data)
        size, both = [form.width, form.height], {"regions": regions(buffer), "objects": objects(buffer)}
        tell(frame=seen, mean=mean, **both, size=size, pts=buffer.pts)
        seen += 1
        if seen in later:
            player.get_by_name("c").set_property("caps", Gst.Caps.from_string(later[seen]))
        return Gst.PadProbeReturn.OK

    element.get_static_pad("src").add_probe(Gst.PadProbeType.BUFFER, look)
    player.set_state(Gst.State.PLAYING)
    bus, kinds = player.get_bus(), Gst.MessageType
    while True:
        message = bus.timed_pop_filtered(60 * Gst.SECOND, kinds.ERROR | kinds.WARNING | kinds.EOS)
        if message is None or message.type == kinds.EOS:
            break
        error, debug = message.parse_error() if message.type == kinds.ERROR else message.parse_warning()
        word = "error" if message.type == kinds.ERROR else "warning"
        tell(**{word: error.message, "debug": debug, "source": message.src.get_name()})
        if word == "error":
            break
    player.set_state(Gst.State.NULL)
    tell(end={name: element.get_property(name) for name in ("frames", "copies", "dropped")})


main(*sys.argv[1:])
