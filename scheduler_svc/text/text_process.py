"""A text process: `python -m scheduler_svc.text.text_process`, fed by `TextProcesses`, and killed by it at will.

Frames come on standard input, answers go to standard output, one for each in order. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import BinaryIO

from octavo.log import trace
from protos import frontend_pb2
from protos import inference_pb2 as pb
from scheduler_svc.errors import RequestRefused
from scheduler_svc.model_description import decode_model_with
from scheduler_svc.request_reader import parse, read_generate_request
from scheduler_svc.text import frames
from scheduler_svc.text.frames import Answer, Ask
from scheduler_svc.text.request_checks import TextSettings
from scheduler_svc.text.request_text import RequestText
from scheduler_svc.tokenizer import Tokenizer


def main() -> int:
    """Returns the process's exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the process that started this one, which kills it
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
        self._text: RequestText | None = None
        self._tokenizer: Tokenizer | None = None

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
        assert self._text is not None, "nothing was loaded"
        if kind is Ask.PREPARE:
            request = parse(read_generate_request, data, "/octavo.v1.Inference/Generate")
            return frames.encode_prepared(self._text.prepare(request))
        if kind is Ask.TOKENIZE:
            return self._text.tokenize(
                parse(pb.TokenizeRequest.FromString, data, "/octavo.v1.Inference/Tokenize")
            ).SerializeToString()
        return self._text.detokenize(
            parse(pb.DetokenizeRequest.FromString, data, "/octavo.v1.Inference/Detokenize")
        ).SerializeToString()

    def _load(self, data: bytes) -> bytes:
        """Settings, the model's description, and the names and contents of its tokenizer's files unless it has them."""
        settings, description, *files = frames.unpack(data)
        if files:
            names = [name.decode() for name in files[::2]]
            self._tokenizer = Tokenizer(dict(zip(names, files[1::2], strict=True)))
        assert self._tokenizer is not None, "no tokenizer was given"
        model = decode_model_with(frontend_pb2.ModelDescription.FromString(description), self._tokenizer)
        self._text = RequestText(model, TextSettings(**json.loads(settings)))
        return b""


if __name__ == "__main__":
    sys.exit(main())
