"""Models as a device's process gets them."""

import os

from driver.protocol.model_codec import decode, encode, sealed


def sent(model, **options):
    """Descriptors, which the caller owns, and where the structure is."""
    encoded = encode(model, **options)
    return [os.dup(fd) for fd in encoded.fds], encoded.where


def arrived(model):
    """The same model, with its constants in memory that no process can change."""
    fds, where = sent(model)
    return decode(sealed(fds, where), where)


def call_with_model(connection, method, model, *terms):
    """The device's own answer to a call that sends a model."""
    encoded = encode(model)
    return connection.call(method, encoded.where, *terms, fds=encoded.fds)[0]
