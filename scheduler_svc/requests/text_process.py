"""A text process: `python -m scheduler_svc.requests.text_process`, fed by `TextProcesses`, and killed by it at will.

Frames come on standard input, answers go to standard output, one for each in order. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import BinaryIO

from octavo.shared.log import trace
from protos import frontend_pb2
from protos import inference_pb2 as pb
from scheduler_svc.errors import RequestRefused
from scheduler_svc.models.model_description import decode_model_with, decode_models
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.requests import frames
from scheduler_svc.requests.frames import Answer, Ask
from scheduler_svc.requests.request_checks import TextSettings
from scheduler_svc.requests.request_reader import parse, read_generate_request
from scheduler_svc.requests.request_text import RequestTexts
from scheduler_svc.text.tokenizer import Tokenizer


def main() -> int:
    """Returns the process's exit code."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # meant for the process that started this one, which kills it
        signal.signal(number, signal.SIG_IGN)
    source = sys.stdin.buffer
    sink = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever anybody prints is no frame
    text = _Text()
    while (header := source.read(frames.HEADER.size)) and len(header) == frames.HEADER.size:
        length, kind = frames.HEADER.unpack(header)
        data = source.read(length)
        if len(data) < length:
            break
        _write(sink, *text.answer(Ask(kind), data))
        del data
    return 0


def _write(sink: BinaryIO, answer: Answer, payload: bytes) -> None:
    sink.write(frames.frame(answer, payload))
    sink.flush()


class _Text:
    """What was loaded last, and what it makes of requests."""

    def __init__(self) -> None:
        self._texts: RequestTexts | None = None
        self._tokenizers: dict[str, Tokenizer] = {}  # by the fingerprint of their model

    def answer(self, kind: Ask, data: bytes) -> tuple[Answer, bytes]:
        try:
            return Answer.OK, self._answer(kind, data)
        except RequestRefused as error:
            return Answer.REFUSED, frames.encode_refusal(error)
        except Exception as error:
            return Answer.FAILED, trace(error).encode(errors="replace")

    def _answer(self, kind: Ask, data: bytes) -> bytes:
        if kind is Ask.LOAD:
            return self._load(data)
        assert self._texts is not None, "nothing was loaded"
        if kind is Ask.PREPARE:
            request = parse(read_generate_request, data, "/octavo.v1.Inference/Generate")
            return frames.encode_prepared(self._texts.prepare(request))
        if kind is Ask.TOKENIZE:
            return self._texts.tokenize(
                parse(pb.TokenizeRequest.FromString, data, "/octavo.v1.Inference/Tokenize")
            ).SerializeToString()
        return self._texts.detokenize(
            parse(pb.DetokenizeRequest.FromString, data, "/octavo.v1.Inference/Detokenize")
        ).SerializeToString()

    def _load(self, data: bytes) -> bytes:
        """Settings, all models, and of those that it does not have: fingerprint, names and contents of files."""
        settings, models, *loaded = frames.unpack(data)
        message = frontend_pb2.ServedModels.FromString(models)
        for fingerprint, *files in map(frames.unpack, loaded):
            names = [name.decode() for name in files[::2]]
            self._tokenizers[fingerprint.decode()] = Tokenizer(dict(zip(names, files[1::2], strict=True)))
        served = decode_models(message, self._decode)
        self._texts = RequestTexts(served, TextSettings(**json.loads(settings)))
        self._tokenizers = {each.model.fingerprint: each.model.tokenizer for each in served.known}
        return b""

    def _decode(self, description: frontend_pb2.ModelDescription) -> ServedModel:
        return decode_model_with(description, self._tokenizers[description.fingerprint])


if __name__ == "__main__":
    sys.exit(main())
