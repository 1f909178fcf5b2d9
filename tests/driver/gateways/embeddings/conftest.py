"""One server for the tests of this folder: a model that embeds and one that ranks, on ONNX Runtime."""

import pytest

pytest.importorskip("tokenizers")
from text_nets import serving, write_embedder, write_ranker

from driver.replicas import model_server


@pytest.fixture(scope="package")
def asker(tmp_path_factory):
    place = tmp_path_factory.mktemp("texts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_server, "batch_gain", lambda *_: 2.0)  # whatever a busy machine measures
        opened = serving([write_embedder(place / "texts"), write_ranker(place / "ranks")])
        with opened as found:
            yield found
