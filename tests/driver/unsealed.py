"""Queues of a burst in memory that their owner can truncate, as only a client without manners makes them."""

import os

import numpy as np

import fmq
from burst import Offer, Trace
from burst.channel import Channel
from burst.datum import DATUM_DTYPE
from fmq.geometry import CONTROL, Geometry
from fmq.region import Region

CAPACITY, DATA_WAIT = 64, 384


def unsealed_queue():
    """A queue, in a memfd without seals; its descriptor is kept open."""
    geometry = Geometry.of(DATUM_DTYPE, CAPACITY, fmq.Flavour.SYNCHRONIZED)
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, CONTROL + 4096)
    region = Region(os.dup(fd), CONTROL + 4096)
    geometry.format(region, 0)
    return fd, region, fmq.MessageQueue.open(region)


def truncate_queues(prepared):
    """Opens a burst on two such queues, waits until the device's listener sleeps, and truncates them.

    Raises StatusError when the device refuses them. What it holds lives as long as the process.
    """
    (fd, region, requests), (other, *_, results) = held = unsealed_queue(), unsealed_queue()
    (near, callback), (context, far) = Channel.pair(), Channel.pair()
    queues = (requests.descriptor, results.descriptor)
    trace = Trace.create().memory
    prepared.configure_burst(0.0)(Offer(*queues, trace, callback, far, [2]))
    callback.close(), far.close()
    word = region.asarray(np.uint32, 1, DATA_WAIT)
    while not word[0] & 1:
        os.sched_yield()
    os.ftruncate(fd, 0), os.ftruncate(other, 0)
    _held.append((held, near, context))


_held = []
