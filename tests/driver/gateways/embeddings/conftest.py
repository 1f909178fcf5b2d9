"""One server for the tests of this folder: a model that embeds and one that ranks, on ONNX Runtime."""

import pytest

pytest.importorskip("tokenizers")
from text_nets import serving, write_embedder, write_ranker


@pytest.fixture(scope="package")
def asker(tmp_path_factory):
    place = tmp_path_factory.mktemp("texts")
    with serving([write_embedder(place / "texts"), write_ranker(place / "ranks")]) as found:
        yield found
