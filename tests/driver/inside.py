"""What tests look at inside of a client, and ask of a device: each private name stands here once."""

import os
from contextlib import contextmanager

from burst.channel import Channel
from driver.engine.client import EngineClient


def session_of(burst):
    """Its connection of the moment: the controller, and what became of requests."""
    return burst._session


def controller_of(burst):
    """Its execution burst controller, with queues and trace."""
    return session_of(burst).controller


def caller_of(burst):
    """What C knows of its requests and their answers."""
    return controller_of(burst)._caller


def pipeline_of(burst):
    """What waits for its results, and the options of that."""
    return burst._pipeline


def in_flight_of(burst):
    """Its requests in flight."""
    return burst._in_flight


def writer_of(controller):
    """The end of the request queue."""
    return controller._writer


def reader_of(controller):
    """The end of the result queue."""
    return controller._reader


def life_word_of(controller):
    """Where the device's life word is mapped."""
    return reader_of(controller).peer_page.base


def taken_queue(client, wire, message):
    """What the engine makes of a queue that a client sends: its descriptor, or an error."""
    return EngineClient._queue(client, wire, message)


def model_number_of(prepared):
    """What the device calls a prepared model."""
    return prepared.home.number


def programs_of(prepared):
    """What a fast device has lowered a model to, by the shapes of its inputs."""
    return prepared._programs


@contextmanager
def lane_of(device):
    """A socket of the client's lane, for requests of a client of its own making."""
    _, (fd, life) = device.call("lane")
    os.close(life)
    with Channel.from_fd(fd) as channel:
        yield channel


def open_bursts(device):
    """How many there are on the device, of all clients."""
    (_, _, _, bursts, *_), _ = device.call("figures")
    return bursts
