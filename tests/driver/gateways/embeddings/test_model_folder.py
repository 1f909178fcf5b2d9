"""Folders as sentence-transformers, fastembed and Optimum lay them out: what is found in them, and what is refused."""

import json

import pytest

pytest.importorskip("tokenizers")
from text_nets import ids_of, write_embedder, write_net, write_steps, write_tokenizer

from driver.errors import DeviceFailed
from driver.gateways.embeddings.model_folder import read_folder
from driver.gateways.embeddings.text_models import TextModel


def write(path, said):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(said))


@pytest.fixture
def folder(tmp_path):
    return write_embedder(tmp_path / "named")


class TestFiles:
    @pytest.mark.parametrize(
        "name", ["model.onnx", "onnx/model.onnx", "model_optimized.onnx", "onnx/model_quantized.onnx", "onnx/o4.onnx"]
    )
    def test_where_the_model_is(self, tmp_path, name):
        """At each place that a library writes it to, and where it is the only one."""
        found = read_folder(str(write_embedder(tmp_path / "named", name)))
        assert (found.name, found.model) == ("named", tmp_path / "named" / name)
        assert found.tokenizer == tmp_path / "named/tokenizer.json"

    @pytest.mark.parametrize("name", ["model_O4.onnx", "onnx/model_O4.onnx"])
    def test_a_file_that_is_given(self, folder, name):
        """Takes the place of model.onnx, in the same folder."""
        write_net(folder / name)
        found = read_folder(str(folder / name))
        assert (found.name, found.model, found.pooling) == ("named", folder / name, "mean")

    def test_a_name_that_is_given(self, folder):
        """Stands before the folder."""
        assert read_folder(f"org/small={folder}").name == "org/small"

    def test_a_folder_whose_name_has_the_sign(self, tmp_path):
        """A folder that is there is no name of another one."""
        assert read_folder(str(write_embedder(tmp_path / "a=b"))).name == "a=b"


class TestConfiguration:
    @pytest.mark.parametrize(
        ("mode", "pooling"),
        [("cls_token", "cls"), ("mean_tokens", "mean"), ("max_tokens", "max"), ("lasttoken", "last")],
    )
    def test_pooling(self, folder, mode, pooling):
        """Is sentence-transformers' own word for it."""
        write_steps(folder, "Transformer", "Pooling", pooling=mode)
        assert read_folder(str(folder)).pooling == pooling

    @pytest.mark.parametrize(("mode", "pooling"), [("mean", "mean"), ("lasttoken", "last")])
    def test_pooling_in_one_word(self, folder, mode, pooling):
        """As later versions write it."""
        write(folder / "1_Pooling/config.json", {"pooling_mode": mode})
        assert read_folder(str(folder)).pooling == pooling

    def test_normalisation(self, folder):
        """Is a step of modules.json; without that file, vectors have length 1. An option overrides both."""
        assert read_folder(str(folder)).normalizes
        write_steps(folder, "Transformer", "Pooling")
        assert not read_folder(str(folder)).normalizes
        assert read_folder(str(folder), normalizes=True).normalizes
        (folder / "modules.json").unlink()
        assert read_folder(str(folder)).normalizes

    def test_length(self, folder):
        """sentence-transformers' own, else the tokenizer's smallest that is a length, else the model's."""
        write(folder / "config.json", {"max_position_embeddings": 514})
        write(folder / "tokenizer_config.json", {"model_max_length": 10**30})
        assert read_folder(str(folder)).max_tokens == 514
        write(folder / "config.json", {"max_position_embeddings": 514, "model_type": "xlm-roberta"})
        assert read_folder(str(folder)).max_tokens == 512
        write(folder / "tokenizer_config.json", {"model_max_length": 512, "max_length": 128})
        assert read_folder(str(folder)).max_tokens == 128
        write(folder / "sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": True})
        found = read_folder(str(folder))
        assert (found.max_tokens, found.lowers) == (256, True)

    def test_prompt(self, folder):
        """The one that sentence-transformers adds by default stands before each text; others are left to clients."""
        config = {"prompts": {"query": "w9 w8 ", "document": "w7 "}, "default_prompt_name": None}
        for name, prefix in ((None, ""), ("query", "w9 w8 "), ("none", "")):
            write(folder / "config_sentence_transformers.json", config | {"default_prompt_name": name})
            model = TextModel(read_folder(str(folder)), "onnxruntime")
            (found,) = model.tokenizer.encode(["W1 w2"])
            assert found.ids.tolist() == ids_of(f"{prefix}w1 w2")[0].tolist()


class TestRefused:
    """Each is told before anything starts, with a remedy."""

    def said(self, folder, text=None):
        with pytest.raises(DeviceFailed) as error:
            TextModel(read_folder(text or str(folder)), "onnxruntime")
        return str(error.value)

    def test_files_that_are_missing(self, folder):
        """Each has its own text."""
        (folder / "tokenizer.json").rename(folder / "t.json")
        assert "save_pretrained" in self.said(folder)
        (folder / "model.onnx").unlink()
        assert "export the model" in self.said(folder)
        assert "give the folder" in self.said(folder, f"{folder}/none")
        assert "an .onnx file" in self.said(folder, f"{folder}/t.json")

    def test_several_models(self, folder):
        """None is chosen by chance."""
        (folder / "model.onnx").rename(folder / "a.onnx")
        write_net(folder / "onnx/b.onnx")
        assert "give one of its files: a.onnx, onnx/b.onnx" in self.said(folder)

    @pytest.mark.parametrize("name", ["modules.json", "config.json", "1_Pooling/config.json", "tokenizer.json"])
    @pytest.mark.parametrize("text", ["{", "3"])
    def test_a_damaged_file(self, folder, name, text):
        """Is named."""
        (folder / name).write_text(text)
        assert name in self.said(folder)

    def test_a_step_that_is_not_in_the_file(self, folder):
        """Weights outside of the .onnx file are not left out silently."""
        write_steps(folder, "Transformer", "Pooling", "Dense")
        assert "step Dense" in self.said(folder)

    @pytest.mark.parametrize(
        "config", [{"pooling_mode": "weightedmean"}, {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}]
    )
    def test_another_pooling(self, folder, config):
        """What is not done here is not done wrongly."""
        write(folder / "1_Pooling/config.json", config)
        assert "export the model with its pooling" in self.said(folder)

    def test_no_pooling(self, folder):
        """It is not guessed: a wrong one gives vectors that are merely worse."""
        (folder / "1_Pooling/config.json").unlink()
        assert "say it with --pooling cls, mean" in self.said(folder)
        assert TextModel(read_folder(str(folder), "cls"), "onnxruntime")

    def test_a_model_of_something_else(self, tmp_path):
        """Its inputs say so."""
        write_tokenizer(tmp_path)
        write_net(tmp_path / "model.onnx", rows=3)
        assert "[texts, tokens] is expected" in self.said(tmp_path)


class TestRanks:
    def test_a_logit_is_enough(self, tmp_path):
        """A model of one logit ranks, also where no configuration says so."""
        write_net(tmp_path / "model.onnx", ranks=True)
        write_tokenizer(tmp_path)
        assert TextModel(read_folder(str(tmp_path)), "onnxruntime").ranks
