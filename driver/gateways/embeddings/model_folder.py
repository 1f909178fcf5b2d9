"""Folders of models as sentence-transformers, fastembed and Optimum lay them out: which files, and what is done to
texts and to vectors.

model.onnx, onnx/model.onnx   the model; model_optimized.onnx and model_quantized.onnx where there is no other
tokenizer.json                its tokenizer; tokenizer_config.json, config.json: lengths and special tokens
modules.json                  sentence-transformers' steps: Transformer, Pooling (1_Pooling/config.json), Normalize
sentence_bert_config.json     max_seq_length, do_lower_case
config_sentence_transformers.json   default_prompt_name, of its prompts
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from driver.errors import DeviceFailed
from driver.gateways.embeddings.pooling import POOLINGS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FILES = "model.onnx", "model_optimized.onnx", "model_quantized.onnx"
_ONNX = "onnx"
_MOST_TOKENS = 1 << 17  # a "length" above it means that none is known
_USUAL_TOKENS = 512
_COUNT_FROM_TWO = {"roberta", "xlm-roberta", "camembert", "mpnet"}  # positions: the first two are for padding
_STEPS = {"Transformer", "Pooling", "Normalize"}
_OF_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt",
    "pooling_mode_lasttoken": "last",
}
_OF_MODES = {"lasttoken": "last", "mean_sqrt_len_tokens": "mean_sqrt"}


class ModelFolder(NamedTuple):
    """The model of a folder, as the folder describes it.

    max_tokens: to which a text is truncated. pooling: by name; None: it is not told. normalizes: vectors get length 1.
    prefix: stands before each text that is embedded. lowers: texts are made lower case. ranks: None: the model's output
    tells. pad_token, pad_id: what pads, if that is told.
    """

    name: str
    model: Path
    tokenizer: Path
    max_tokens: int = _USUAL_TOKENS
    pooling: str | None = None
    normalizes: bool = True
    prefix: str = ""
    lowers: bool = False
    ranks: bool | None = None
    truncation_side: str = "right"
    pad_token: str | None = None
    pad_id: int | None = None


def read_folder(text: str, pooling: str | None = None, *, normalizes: bool | None = None) -> ModelFolder:
    """Read FOLDER or NAME=FOLDER; in its place may stand the .onnx file. `pooling`, `normalizes`: in the place of what
    the folder says. Raise DeviceFailed.
    """
    name, _, rest = text.partition("=")
    if not rest or Path(text).exists():
        name, rest = "", text
    path = Path(rest).absolute()
    if not path.exists():
        raise DeviceFailed(f"--embeddings {text}: there is no {path}; give the folder of a model")
    folder, model = (path, _model_in(path)) if path.is_dir() else (path.parent, path)
    if model.suffix != ".onnx":
        raise DeviceFailed(f"--embeddings {text}: give a folder, or an .onnx file in one")
    if folder.name == _ONNX and not (folder / "tokenizer.json").exists():
        folder = folder.parent
    found = _Reader(folder, model).read()
    return found._replace(
        name=name or folder.name,
        pooling=pooling or found.pooling,
        normalizes=found.normalizes if normalizes is None else normalizes,
    )


def _model_in(folder: Path) -> Path:
    for name in _FILES:
        for path in (folder / name, folder / _ONNX / name):
            if path.is_file():
                return path
    others = sorted([*folder.glob("*.onnx"), *folder.glob(f"{_ONNX}/*.onnx")])
    if len(others) != 1:
        told = ", ".join(str(path.relative_to(folder)) for path in others)
        raise DeviceFailed(
            f"--embeddings {folder}: there is no model.onnx and no onnx/model.onnx; "
            + (f"give one of its files: {told}" if others else "export the model to ONNX first")
        )
    return others[0]


class _Reader:
    """Reads one folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model
        self._steps = list(self._read_steps())

    def read(self) -> ModelFolder:
        words, model = self._json("tokenizer_config.json"), self._json("config.json")
        sentence = self._json("sentence_bert_config.json", self._path_of("Transformer"))
        pad = words.get("pad_token")
        return ModelFolder(
            name="",
            model=self._model,
            tokenizer=self._tokenizer(),
            max_tokens=self._max_tokens(sentence, words, model),
            pooling=self._pooling(),
            normalizes=not self._steps or any(kind == "Normalize" for kind, _ in self._steps),
            prefix=self._prefix(),
            lowers=sentence.get("do_lower_case") is True,
            ranks=_ranks(model),
            truncation_side="left" if words.get("truncation_side") == "left" else "right",
            pad_token=pad.get("content") if isinstance(pad, dict) else pad,
            pad_id=_size(model.get("pad_token_id"), least=0),
        )

    def _read_steps(self) -> Iterator[tuple[str, str]]:
        """Yield the kind and the folder of each of sentence-transformers' steps."""
        for each in self._json("modules.json", expected=list):
            kind = str(each["type"]).rpartition(".")[2]
            if kind not in _STEPS:
                raise DeviceFailed(
                    f"--embeddings {self._folder}: its step {kind} is not in the .onnx file, and is none of "
                    f"{', '.join(sorted(_STEPS))}; export the model with it"
                )
            yield kind, str(each.get("path", ""))

    def _path_of(self, kind: str) -> str:
        return next((path for its, path in self._steps if its == kind), "")

    def _tokenizer(self) -> Path:
        for folder in (self._folder, self._folder / self._path_of("Transformer"), self._model.parent):
            if (path := folder / "tokenizer.json").is_file():
                return path
        raise DeviceFailed(
            f"--embeddings {self._folder}: there is no tokenizer.json; transformers writes one with "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )

    def _max_tokens(self, sentence: Mapping[str, Any], words: Mapping[str, Any], model: Mapping[str, Any]) -> int:
        """Return the length that sentence-transformers would take, else fastembed's, else the model's."""
        if told := _size(sentence.get("max_seq_length")):
            return told
        if its := [size for key in ("model_max_length", "max_length") if (size := _size(words.get(key)))]:
            return min(its)
        positions = _size(model.get("max_position_embeddings")) or _USUAL_TOKENS
        return positions - 2 if model.get("model_type") in _COUNT_FROM_TWO else positions

    def _prefix(self) -> str:
        """Return the prompt that sentence-transformers adds by default."""
        config = self._json("config_sentence_transformers.json")
        prompts, name = config.get("prompts"), config.get("default_prompt_name")
        return str(prompts.get(name, "")) if isinstance(prompts, dict) and isinstance(name, str) else ""

    def _pooling(self) -> str | None:
        path = self._path_of("Pooling")
        config = self._json("config.json", path) if path else self._json("1_Pooling/config.json")
        if mode := config.get("pooling_mode"):
            modes = [_OF_MODES.get(str(mode), str(mode))]
        else:
            modes = [key for key, is_on in config.items() if key.startswith("pooling_mode_") and is_on is True]
            modes = [_OF_POOLING.get(key, key) for key in modes]
        if len(modes) > 1 or any(mode not in POOLINGS for mode in modes):
            raise DeviceFailed(
                f"--embeddings {self._folder}: its pooling is {' and '.join(modes)}; one of {', '.join(POOLINGS)} is "
                "done here: export the model with its pooling"
            )
        return modes[0] if modes else None

    def _json(self, name: str, folder: str = "", expected: type = dict) -> Any:
        """Return what is in a file; nothing if there is no such file."""
        path = self._folder / folder / name
        try:
            found = json.loads(path.read_bytes()) if path.is_file() else expected()
        except (OSError, ValueError, RecursionError) as error:
            raise DeviceFailed(f"--embeddings: {path} cannot be read: {error}") from error
        if not isinstance(found, expected):
            raise DeviceFailed(f"--embeddings: {path} is not what such a file is")
        return found


def _ranks(model: Mapping[str, Any]) -> bool | None:
    """Return True for the configuration of a cross-encoder."""
    architectures = model.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        return None
    return str(architectures[0]).endswith("ForSequenceClassification")


def _size(given: object, least: int = 1) -> int | None:
    return given if type(given) is int and least <= given <= _MOST_TOKENS else None


__all__ = ["ModelFolder", "read_folder"]
