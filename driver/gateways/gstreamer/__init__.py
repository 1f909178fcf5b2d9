"""`burstinfer`: an element of GStreamer that runs a model on video frames where they lie.

GStreamer finds the element in the folder `python` here, which `python -m driver.gateways.gstreamer` names. It loads it
into a Python of its own, so nothing but `element`, `frame_pool` and that folder imports GStreamer's packages.
"""
