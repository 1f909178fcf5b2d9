"""The file that GStreamer's loader of Python elements reads; the element is in driver.gateways.gstreamer.element."""

from gi.repository import Gst

from driver.gateways.gstreamer.element import BurstInfer
from driver.gateways.gstreamer.plugin_folder import ELEMENT

__gstelementfactory__ = (ELEMENT, Gst.Rank.NONE, BurstInfer)
