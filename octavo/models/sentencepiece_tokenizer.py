"""Builds tokenizer.json from a sentencepiece model, the `tokenizer.model` of Llama 2, Mistral and their kind.

The model itself says how it cuts text: kind, scores, spaces, normalisation. All of it is read, and what cannot be
expressed is refused, because splitting text in another way gives wrong ids in silence. Ids are the sentencepiece
library's own; needs neither it nor `transformers`, whose conversion goes by the tokenizer's class and not by what the
model says. One difference is known: where a model normalises text, `tokenizers` normalises a letter with the marks
that join it as one, so that rare clusters of them come out otherwise.
Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram

from octavo.models.errors import SentencePieceError
from octavo.models.gguf_tokenizer import merges_from_scores

_UNIGRAM, _BPE = 1, 2  # TrainerSpec.model_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # SentencePiece.type
_SPACE = "▁"
_ALL = 1 << 31  # spaces in front of a text

# The fields that are read: message -> (name, number, type, default). Unknown ones are skipped by protobuf.
_FIELDS: dict[str, tuple[tuple[str, int, str, str], ...]] = {
    "Piece": (("piece", 1, "STRING", ""), ("score", 2, "FLOAT", "0"), ("type", 3, "INT32", "1")),
    "TrainerSpec": (
        ("model_type", 3, "INT32", "1"),
        ("treat_whitespace_as_suffix", 24, "BOOL", "false"),
        ("byte_fallback", 35, "BOOL", "false"),
        ("unk_id", 40, "INT32", "0"),
        ("bos_id", 41, "INT32", "1"),
        ("eos_id", 42, "INT32", "2"),
    ),
    "NormalizerSpec": (
        ("precompiled_charsmap", 2, "BYTES", ""),
        ("add_dummy_prefix", 3, "BOOL", "true"),
        ("remove_extra_whitespaces", 4, "BOOL", "true"),
        ("escape_whitespaces", 5, "BOOL", "true"),
    ),
}


def is_sentencepiece(data: bytes) -> bool:
    """Whether this is a sentencepiece model at all: other formats go by the name tokenizer.model too."""
    try:
        return len(_parse(data).pieces) > 0
    except SentencePieceError:
        return False


def tokenizer_json(data: bytes, config: Mapping[str, Any], added_tokens: Mapping[str, int]) -> str:
    """The text of tokenizer.json. Raises `SentencePieceError`.

    data: the model file. config: tokenizer_config.json, of which `add_bos_token` (default: true), `add_eos_token`
    (false), `legacy` (true) and `added_tokens_decoder` count. added_tokens: added_tokens.json, text -> id.
    """
    model = _parse(data)
    _refuse_others(model)
    try:
        tokenizer = Tokenizer(_bpe(model) if model.trainer_spec.model_type == _BPE else _unigram(model))
        _cut_as(tokenizer, model.normalizer_spec, bool(config.get("legacy", True)))
        tokenizer.decoder = _decoder(model.normalizer_spec)
        _add_tokens(tokenizer, model, config, added_tokens)
        _add_template(tokenizer, model, config)
        return tokenizer.to_str()
    except SentencePieceError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise SentencePieceError(f"it cannot be converted: {' '.join(str(error).split())}") from error


# ---- Reading --------------------------------------------------------------------------------------------------------


def _parse(data: bytes) -> Any:
    model = _message_class()()
    try:
        model.ParseFromString(data)
    except DecodeError:
        raise SentencePieceError("this is not a sentencepiece model") from None
    return model


@cache
def _message_class() -> Any:
    """The message `Model`, in a pool of its own: the sentencepiece package registers the same format elsewhere."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="sentencepiece_fields.proto", package="octavo.sentencepiece")
    for message, fields in _FIELDS.items():
        added = file.message_type.add(name=message)
        for name, number, kind, default in fields:
            added.field.add(
                name=name,
                number=number,
                label=field.LABEL_OPTIONAL,
                type=getattr(field, f"TYPE_{kind}"),
                default_value=default,
            )
    model = file.message_type.add(name="Model")
    for name, number, message in (("pieces", 1, "Piece"), ("trainer_spec", 2, "TrainerSpec"),
                                  ("normalizer_spec", 3, "NormalizerSpec")):  # fmt: skip
        label = field.LABEL_REPEATED if name == "pieces" else field.LABEL_OPTIONAL
        model.field.add(
            name=name, number=number, label=label, type=field.TYPE_MESSAGE, type_name=f".{file.package}.{message}"
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.Model"))


def _refuse_others(model: Any) -> None:
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if trainer.model_type not in (_UNIGRAM, _BPE):
        raise SentencePieceError(
            f"models of type {trainer.model_type} cannot be converted; unigram (1) and BPE (2) can"
        )
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise SentencePieceError("its spaces stand behind words or are not escaped, which cannot be converted")
    # Text between added tokens, which such pieces become, would be treated as a whole text is.
    adds_or_removes_spaces = normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces
    for piece in model.pieces:
        if piece.type not in (_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE):
            raise SentencePieceError(f"piece {piece.piece!r} is of type {piece.type}, which cannot be converted")
        if piece.type == _USER_DEFINED and (adds_or_removes_spaces or _SPACE in piece.piece):
            raise SentencePieceError(
                f"piece {piece.piece!r} is user-defined, which cannot be converted with a space in it, "
                "or where spaces are put in front of a text or removed"
            )
    if not 0 <= trainer.unk_id < len(model.pieces):
        raise SentencePieceError(f"it has no unknown token: its id is {trainer.unk_id}")


# ---- Cutting text ---------------------------------------------------------------------------------------------------


def _bpe(model: Any) -> BPE:
    normal = [piece for piece in model.pieces if piece.type == _NORMAL]
    return BPE(
        vocab={piece.piece: index for index, piece in enumerate(model.pieces)},
        merges=merges_from_scores([piece.piece for piece in normal], [piece.score for piece in normal]),
        unk_token=model.pieces[model.trainer_spec.unk_id].piece,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def _unigram(model: Any) -> Unigram:
    return Unigram(
        [(piece.piece, piece.score) for piece in model.pieces],
        unk_id=model.trainer_spec.unk_id,
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def _cut_as(tokenizer: Tokenizer, spec: Any, is_legacy: bool) -> None:
    """Normalisation and the space in front: of every part between added tokens or, not `is_legacy`, of the first alone,
    which is how `transformers` reads that key."""
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix and is_legacy:
        steps.append(normalizers.Prepend(_SPACE))
    elif spec.add_dummy_prefix:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def _decoder(spec: Any) -> decoders.Decoder:
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.remove_extra_whitespaces:
        steps.append(decoders.Strip(content=" ", left=_ALL, right=0))
    elif spec.add_dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    return decoders.Sequence(steps)


# ---- Special tokens -------------------------------------------------------------------------------------------------


def _add_tokens(tokenizer: Tokenizer, model: Any, config: Mapping[str, Any], added_tokens: Mapping[str, int]) -> None:
    """Control pieces are special, user-defined ones matched whole; then what other files add, at the ids they say."""
    for index, piece in enumerate(model.pieces):
        if piece.type in (_UNKNOWN, _CONTROL):
            tokenizer.add_special_tokens([AddedToken(piece.piece, normalized=False, special=True)])
        elif piece.type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(piece.piece, normalized=False)])
        if tokenizer.token_to_id(piece.piece) != index:
            raise SentencePieceError(f"piece {piece.piece!r} stands in it more than once")
    wanted: dict[int, dict[str, Any]] = {index: {"content": text} for text, index in added_tokens.items()}
    wanted |= {int(index): entry for index, entry in config.get("added_tokens_decoder", {}).items()}
    for index, entry in sorted(wanted.items()):
        flags = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
        token = AddedToken(entry["content"], normalized=False, **flags)
        if token.special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
        if (found := tokenizer.token_to_id(token.content)) != index:
            raise SentencePieceError(f"added token {token.content!r} would get id {found} and not its own, {index}")


def _add_template(tokenizer: Tokenizer, model: Any, config: Mapping[str, Any]) -> None:
    ids = model.trainer_spec.bos_id, model.trainer_spec.eos_id
    wanted = bool(config.get("add_bos_token", True)), bool(config.get("add_eos_token", False))
    bos, eos = (
        [model.pieces[index].piece] if asked and index >= 0 else [] for index, asked in zip(ids, wanted, strict=True)
    )
    if bos or eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            pair=[*bos, "$A", *eos, *(f"{token}:1" for token in bos), "$B:1", *(f"{token}:1" for token in eos)],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in (*bos, *eos)],
        )
