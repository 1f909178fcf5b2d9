"""Cameras: the buffers of a V4L2 device as hardware buffers, in which a device process reads frames where they lie.

video_ioctls.py    records and numbers of <linux/videodev2.h>, as far as they are needed
video_device.py    one open camera: each call of the kernel, and what its errors mean
frame_copies.py    frames that have to be copied: decoded from JPEG, or put together from planes in memory of their own
camera_metrics.py  figures of this process's cameras for prometheus_client
camera_stream.py   `driver.Camera`: buffers that are exported once, and a stream of frames in them
"""
