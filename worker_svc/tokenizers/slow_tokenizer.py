"""tokenizer.json for a model folder that has its tokenizer in another format.

A sentencepiece model of a class that takes it as it is, and a tekken.json, are converted by what they say themselves;
anything else (vocab.json and merges.txt, tiktoken, sentencepiece under a class with ids of its own) by `transformers`,
which is imported only then.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from octavo.models.errors import SentencePieceError, TekkenError
from worker_svc.models.errors import ModelError

_SENTENCEPIECE = "tokenizer.model"
_TEKKEN = "tekken.json"
_OTHERS = ("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "*.tiktoken")
# Whose ids are the sentencepiece model's own. Others shift them (XGLM) or add some of their own (T5).
_PLAIN_CLASSES = {"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer"}
_PLAIN_MODEL_TYPES = {
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3_text",
}  # where no class is named


def make_tokenizer_json(folder: Path, trust_remote_code: bool = False) -> str | None:
    """The text of tokenizer.json, made of the folder's other files; None where there are none to make it of.

    What the folder's tokenizer.json says has no part in it. Raises ModelError.
    """
    model = folder / _SENTENCEPIECE
    if model.is_file() and _takes_ids_as_they_are(folder):
        from octavo.models.sentencepiece_tokenizer import is_sentencepiece, tokenizer_json

        data = model.read_bytes()
        if is_sentencepiece(data):
            config, added = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "added_tokens.json")
            try:
                return tokenizer_json(data, config, added)
            except SentencePieceError as error:
                raise ModelError(f"{model}: {error}") from None
    if (tekken := folder / _TEKKEN).is_file():
        from octavo.models import tekken_tokenizer

        try:
            return tekken_tokenizer.tokenizer_json(tekken.read_bytes(), _read_json(folder / "tokenizer_config.json"))
        except TekkenError as error:
            raise ModelError(f"{tekken}: {error}") from None
    if any(any(folder.glob(pattern)) for pattern in (_SENTENCEPIECE, *_OTHERS)):
        return _by_transformers(folder, trust_remote_code)
    return None


def _takes_ids_as_they_are(folder: Path) -> bool:
    if name := _read_json(folder / "tokenizer_config.json").get("tokenizer_class"):
        return str(name).removesuffix("Fast") in _PLAIN_CLASSES
    return _read_json(folder / "config.json").get("model_type") in _PLAIN_MODEL_TYPES


def _by_transformers(folder: Path, trust_remote_code: bool) -> str:
    try:
        from transformers import AutoTokenizer, TokenizersBackend
    except ImportError:
        raise ModelError(
            f"{folder}: there is no tokenizer.json; making one needs the Python package `transformers`: "
            "install octavo[transformers] on the worker"
        ) from None
    with tempfile.TemporaryDirectory(prefix="octavo-tokenizer-") as parent:
        # The library would take a tokenizer.json that is there, and a folder's name is part of its messages.
        shown = Path(parent) / folder.resolve().name
        shown.mkdir()
        for file in folder.iterdir():
            if file.name != "tokenizer.json":
                (shown / file.name).symlink_to(file.resolve())
        try:
            tokenizer = AutoTokenizer.from_pretrained(shown, trust_remote_code=trust_remote_code, local_files_only=True)
        except Exception as error:  # whatever a tokenizer's own code raises
            why = " ".join(str(error).split())[:200]
            raise ModelError(f"{folder}: there is no tokenizer.json, and transformers makes none: {why}") from None
    # The base class itself knows the vocabulary only, and would cut text as no model was trained to.
    if not isinstance(tokenizer, TokenizersBackend) or type(tokenizer) is TokenizersBackend:
        name = type(tokenizer).__name__
        raise ModelError(f"{folder}: there is no tokenizer.json, and none can be made of a tokenizer of class {name}")
    return str(tokenizer.backend_tokenizer.to_str())


def _read_json(path: Path) -> dict[str, Any]:
    """{} where there is no such file. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content
