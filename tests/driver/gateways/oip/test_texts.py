"""BYTES both ways, at every kind of address and in every form that the protocol has for them."""

import numpy as np
import pytest
from packed_nets import WORDS
from tritonclient.utils import InferenceServerException, shared_memory

from driver.gateways.oip.inference import GivenTensor
from driver.gateways.oip.texts import given_texts
from driver.gateways.refusal import Refusal

BYTES = np.array([[text.encode() for text in row] for row in WORDS], object)
FLAGS, NUMBERS = np.array([True, False]), np.array([[1, -2]])


def inputs(client, texts=WORDS, **options):
    kinds = {"t": "BYTES", "b": "BOOL", "i": "INT64"}
    given = {"t": texts, "b": FLAGS, "i": NUMBERS}
    return [client.input(name, array, kinds[name], **options) for name, array in given.items()]


def check(found, texts=BYTES):
    assert found.as_numpy("u").tolist() == texts.tolist()
    assert found.as_numpy("c").tolist() == [False, True]
    assert found.as_numpy("j").tolist() == [[-1, 2]]


def test_texts_come_back(client):
    """Beside numbers, of any length, none and many."""
    check(client.infer("texts", inputs(client)))
    for texts in (np.empty((0, 3), object), np.array([b"x" * 100_000], object), np.array([b"y"] * 999, object)):
        check(client.infer("texts", inputs(client, texts)), texts)


def test_rows_of_texts_are_joined(client):
    """By a model that has a max_batch_size."""
    given = [client.input("x", WORDS, "BYTES")]
    assert client.infer("joined", given).as_numpy("y").tolist() == BYTES.tolist()
    with pytest.raises(InferenceServerException, match="5 rows; max_batch_size is 4"):
        client.infer("joined", [client.input("x", np.full((5, 1), "a", object), "BYTES")])


def test_in_json(server):
    """As lists of strings."""
    client = server.clients["http"]
    wanted = [client.kit.InferRequestedOutput(name, binary_data=False) for name in "ucj"]
    found = client.infer("texts", inputs(client, binary_data=False), outputs=wanted)
    assert found.get_output("u")["data"] == WORDS.reshape(-1).tolist()
    assert found.get_output("u")["datatype"] == "BYTES"


def test_metadata(client):
    """The type's name, and open sizes."""
    found = client.get_model_metadata("texts")
    tensors = found["inputs"] if isinstance(found, dict) else found.inputs
    first = tensors[0]
    assert (first["datatype"] if isinstance(first, dict) else first.datatype) == "BYTES"


def test_what_does_not_fit(client):
    """It is told by the input's name, and the connection goes on."""
    with pytest.raises(InferenceServerException, match=r"holds b'.xff'; the model takes texts of UTF-8"):
        client.infer("texts", inputs(client, np.array([b"\xff"], object)))
    wanted = [client.kit.InferRequestedOutput("u", class_count=1)]
    with pytest.raises(InferenceServerException, match="no output to classify"):
        client.infer("texts", inputs(client), outputs=wanted)
    check(client.infer("texts", inputs(client)))


def test_not_in_shared_memory(client):
    """Texts have no place of a size that is known before."""
    from oip_models import client_memory

    with client_memory(64) as (handle, key):
        shared_memory.set_shared_memory_region(handle, [np.zeros(64, np.uint8)])
        client.register_system_shared_memory("texts", key, 64)
        try:
            placed = [client.placed("t", WORDS, "BYTES", "texts", 64), *inputs(client)[1:]]
            with pytest.raises(InferenceServerException, match="BYTES come in the message"):
                client.infer("texts", placed)
            with pytest.raises(InferenceServerException, match="BYTES come in the message"):
                client.infer("texts", inputs(client), outputs=[client.output("u", "texts", 64)])
        finally:
            client.unregister_system_shared_memory("texts")


def test_maps_have_no_name(server):
    """A model that gives them is refused by the output, with the remedy."""
    (row,) = [row for row in server.repository.index(ready=False) if row["name"] == "maps"]
    assert (row["state"], "'probabilities' is seq(map(string,tensor(float)))" in row["reason"]) == ("UNAVAILABLE", True)
    assert "options={'zipmap': False}" in row["reason"]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\1\0\0", "end within a text"),
        (b"\xff\xff\xff\xffab", "end within a text"),
        (b"\1\0\0\0a\1\0\0\0b", r"shape \[1\] has not 2 texts"),
        (b"", r"shape \[1\] has not 0 texts"),
    ],
)
def test_lengths_that_lie(raw, words):
    """Each is checked before it is used."""
    with pytest.raises(Refusal, match=words):
        given_texts(GivenTensor("x", "BYTES", (1,), raw), "input 'x'")
