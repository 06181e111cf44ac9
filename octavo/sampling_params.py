"""How the tokens of a request are drawn and when they end: `SamplingParams`, and the one place that checks its ranges.

`SamplingParams` is what a Python user writes, `octavo.v1.SamplingParams` what crosses the wire, and `validate` judges
the wire form, so that the client, `LLM` and the scheduler refuse the same things with the same words. Knows nothing of
models, tokens' text or grpc.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, FrozenInstanceError, dataclass, fields, replace
from typing import Any, NamedTuple, NoReturn

from octavo.arguments.vllm_arguments import takes_arguments_of_vllm
from protos import inference_pb2 as pb

MAX_OUTPUTS = 128
MAX_STOP_STRINGS = 16
MAX_TOKEN_ENTRIES = 1024  # of logit_bias, allowed_token_ids, stop_token_ids and bad_words, each
MAX_BAD_WORD_CHARS = 1024  # of one
MAX_BAD_WORDS_BYTES = 64 * 1024  # of all together, in UTF-8
MAX_LOGIT_BIAS = 100.0
SMALLEST = 1e-30  # other numbers than 0 that only have to be above it: what is smaller is no normal float32
WHOLE_VOCABULARY = -1
EARLY_STOPPING = ("NO", "YES", "NEVER")
GUIDES = ("json_schema", "regex", "choice", "grammar", "json_object")


class Violation(NamedTuple):
    """One thing that is wrong with a request: where, what was given, and what is accepted instead."""

    field: str
    value: Any
    accepted: str

    def __str__(self) -> str:
        return f"{self.field}: got {self.value!r}; accepted: {self.accepted}"


@dataclass(frozen=True)
class SamplingLimits:
    """What one server allows. The defaults are the limits that hold on every server."""

    vocab_size: int = 1 << 32
    max_num_seqs: int = MAX_OUTPUTS
    max_model_len: int = 1 << 32
    max_logprobs: int = WHOLE_VOCABULARY  # the most logprobs a token; -1: up to the whole vocabulary
    max_stop_string_chars: int = 1 << 32


@takes_arguments_of_vllm
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request; field by field as `octavo.v1.SamplingParams`, `None` meaning the default.

    Raises ValueError for what no server accepts; what depends on the server (vocabulary, its limits) it refuses itself.
    """

    n: int = 1
    best_of: int | None = None  # as n
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 and 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # drawn before the first token, and reported
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    max_tokens: int | None = None  # up to the model's length
    min_tokens: int = 0
    logprobs: int | None = None  # so many of the most likely tokens; -1: the whole vocabulary
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None  # None: any
    bad_words: Sequence[str] = ()
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = "NO"  # NO, YES or NEVER; False, True and "never" are these
    guided: Mapping[str, Any] | None = None  # one of json_schema, regex, choice, grammar, json_object
    detokenize: bool = True

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value is None:
                object.__setattr__(self, name, default)
            elif name in _LISTS:
                object.__setattr__(self, name, _listed(name, value))
        object.__setattr__(self, "early_stopping", _early_stopping(self.early_stopping))
        violations = validate(self.to_proto(), SamplingLimits())
        if self.allowed_token_ids is not None and not self.allowed_token_ids:  # which the wire cannot tell from unset
            violations.append(Violation("allowed_token_ids", [], "at least one token id, or None for any"))
        if violations:
            raise ValueError("; ".join(map(str, violations)))

    def clone(self, **changes: Any) -> SamplingParams:
        """The same, but for `changes`; checked like a new one. None is a field's default.

        >>> SamplingParams(temperature=0.5, stop="\\n").clone(temperature=0).stop
        ('\\n',)
        """
        return replace(self, **changes)

    def to_proto(self) -> pb.SamplingParams:
        """The wire form; fields at their default stay unset. Raises ValueError for a value of a wrong type or size."""
        message = pb.SamplingParams()
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value == default:
                continue
            try:
                _set_field(message, name, value)
            except (TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"{name}: got {value!r}; {error}") from None
        return message


@takes_arguments_of_vllm
@dataclass(frozen=True)
class BeamSearchParams:
    """How wide and how long `LLM.beam_search` searches; the fields of vLLM's class of this name.

    Raises ValueError for what no server accepts.

    >>> BeamSearchParams(beam_width=4, max_tokens=16).sampling_params().best_of
    4
    """

    beam_width: int  # 1 is greedy
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # a search draws nothing: only 0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        width = self.beam_width
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= MAX_OUTPUTS:
            raise ValueError(str(Violation("beam_width", width, f"1 to {MAX_OUTPUTS}")))
        if self.temperature != 0:
            raise ValueError(str(Violation("temperature", self.temperature, "0: a beam search draws nothing")))
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """The same for `LLM.generate`, with the logprobs of the tokens themselves."""
        searches = self.beam_width > 1
        return SamplingParams(
            n=self.beam_width,
            best_of=self.beam_width,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            use_beam_search=searches,
            length_penalty=self.length_penalty if searches else 1.0,
            logprobs=0,
        )


def _tell_of_clone(params: SamplingParams, name: str, value: Any) -> NoReturn:
    raise FrozenInstanceError(f"SamplingParams cannot be changed; params.clone({name}={value!r}) is a changed copy")


SamplingParams.__setattr__ = _tell_of_clone  # type: ignore[assignment]  # a frozen dataclass may not define its own

_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(SamplingParams) if f.default is not MISSING}


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    """A list as it is kept. One text stands for a list of it."""
    if isinstance(value, str) and name in ("stop", "bad_words"):
        return (value,)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(str(Violation(name, value, "a list")))
    return tuple(value)


def _early_stopping(value: Any) -> Any:
    """The name on the wire of what `transformers` calls True, False and "never"; anything else as it is."""
    if isinstance(value, bool):
        return "YES" if value else "NO"
    return value.upper() if isinstance(value, str) else value


def _set_field(message: pb.SamplingParams, name: str, value: Any) -> None:
    match name:
        case name if name in _LISTS:
            getattr(message, name).extend(value)
        case "logit_bias":
            message.logit_bias.update(value)
        case "early_stopping":
            if value not in EARLY_STOPPING:
                raise ValueError(f"accepted: {', '.join(EARLY_STOPPING)}, True, False")
            message.early_stopping = getattr(pb, f"EARLY_STOPPING_{value}")
        case "guided":
            if len(value) != 1 or not value.keys() <= set(GUIDES):
                raise ValueError(f"accepted: one of {', '.join(GUIDES)}")
            ((kind, guide),) = value.items()
            if kind == "choice":
                message.guided.choice.choices.extend(guide)
            else:
                setattr(message.guided, kind, guide)
        case _:
            setattr(message, name, value)


def validate(params: pb.SamplingParams, limits: SamplingLimits) -> list[Violation]:
    """Everything that is out of range or contradictory in `params`; empty when a server with `limits` may accept it."""
    return [
        *_ranges(params),
        *_outputs(params, limits),
        *_lengths(params, limits),
        *_stops(params, limits),
        *_logprobs(params, limits),
        *_token_lists(params, limits),
        *_guided(params),
    ]


# Single numbers that depend on nothing else. A comparison with NaN is false, so NaN is refused by all of them.
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda v: v == 0 or SMALLEST <= v <= 2, f"0 (greedy), or {SMALLEST:g} to 2"),
    ("top_p", lambda v: SMALLEST <= v <= 1, f"{SMALLEST:g} to 1"),
    ("top_k", lambda v: v >= -1, "-1 or 0 (off), or at least 1"),
    ("min_p", lambda v: v == 0 or SMALLEST <= v <= 1, f"0 (off), or {SMALLEST:g} to 1"),
    ("presence_penalty", lambda v: -2 <= v <= 2, "-2 to 2"),
    ("frequency_penalty", lambda v: -2 <= v <= 2, "-2 to 2"),
    # Far from 1 a logit that is divided by it would be infinite, and its row without probabilities.
    ("repetition_penalty", lambda v: 0.01 <= _decimal(v) <= 100, "0.01 to 100"),
    ("length_penalty", lambda v: -100 <= v <= 100, "-100 to 100"),
    ("max_tokens", lambda v: v >= 1, "at least 1"),
    ("early_stopping", lambda v: v in pb.EarlyStopping.values(), ", ".join(pb.EarlyStopping.keys())),
)


def _decimal(value: float) -> float:
    """What a client wrote that arrives as the float32 next to it, which may be a little less: 0.01 for one."""
    return float(f"{value:.7g}")


def _ranges(params: pb.SamplingParams) -> list[Violation]:
    return [
        Violation(name, getattr(params, name), accepted)
        for name, is_accepted, accepted in _RANGES
        if params.HasField(name) and not is_accepted(getattr(params, name))
    ]


def _outputs(params: pb.SamplingParams, limits: SamplingLimits) -> list[Violation]:
    """How many outputs there are: n, best_of and beams."""
    found = []
    n = params.n if params.HasField("n") else 1
    best_of = params.best_of if params.HasField("best_of") else n
    most = min(MAX_OUTPUTS, limits.max_num_seqs)
    if not 1 <= n <= most:
        found.append(Violation("n", n, f"1 to {most}"))
    elif not n <= best_of <= most:
        found.append(Violation("best_of", best_of, f"n, which is {n}, to {most}"))
    is_greedy = params.HasField("temperature") and params.temperature == 0
    if params.use_beam_search:
        if best_of <= 1:
            found.append(Violation("best_of", best_of, "at least 2 with use_beam_search: it is the beam width"))
        if not is_greedy:
            temperature = params.temperature if params.HasField("temperature") else 1.0
            found.append(Violation("temperature", temperature, "0 with use_beam_search"))
        return found
    if is_greedy and best_of > 1:
        name = "best_of" if params.HasField("best_of") else "n"
        found.append(Violation(name, best_of, "1 with temperature 0, where all outputs would be the same"))
    if params.early_stopping != pb.EARLY_STOPPING_NO:
        found.append(Violation("early_stopping", params.early_stopping, "EARLY_STOPPING_NO without use_beam_search"))
    if params.HasField("length_penalty") and params.length_penalty != 1:
        found.append(Violation("length_penalty", params.length_penalty, "1 without use_beam_search"))
    return found


def _lengths(params: pb.SamplingParams, limits: SamplingLimits) -> list[Violation]:
    if params.HasField("max_tokens") and params.min_tokens > params.max_tokens >= 1:
        return [Violation("min_tokens", params.min_tokens, f"at most max_tokens, which is {params.max_tokens}")]
    if params.min_tokens > limits.max_model_len:
        return [Violation("min_tokens", params.min_tokens, f"at most the model's length, {limits.max_model_len}")]
    return []


def _stops(params: pb.SamplingParams, limits: SamplingLimits) -> list[Violation]:
    if len(params.stop) > MAX_STOP_STRINGS:
        found = [Violation("stop", f"{len(params.stop)} strings", f"at most {MAX_STOP_STRINGS}")]
    else:
        most = limits.max_stop_string_chars
        found = [Violation(f"stop[{i}]", text, "a non-empty string") for i, text in enumerate(params.stop) if not text]
        found += [
            Violation(f"stop[{i}]", f"{len(text)} characters", f"at most {most} (the server's --max-stop-string-chars)")
            for i, text in enumerate(params.stop)
            if len(text) > most
        ]
    if params.stop and params.HasField("detokenize") and not params.detokenize:
        found.append(Violation("stop", list(params.stop), "none with detokenize = false: no text is made"))
    return found


def _logprobs(params: pb.SamplingParams, limits: SamplingLimits) -> list[Violation]:
    whole = limits.max_logprobs == WHOLE_VOCABULARY
    most = limits.vocab_size if whole else limits.max_logprobs
    lowest = WHOLE_VOCABULARY if whole else 0
    accepted = f"0 to {most}" + (", or -1 for the whole vocabulary" if whole else " (the server's --max-logprobs)")
    return [
        Violation(name, getattr(params, name), accepted)
        for name in ("logprobs", "prompt_logprobs")
        if params.HasField(name) and not lowest <= getattr(params, name) <= most
    ]


def _token_lists(params: pb.SamplingParams, limits: SamplingLimits) -> list[Violation]:
    found = [
        Violation(name, f"{len(entries)} entries", f"at most {MAX_TOKEN_ENTRIES}")
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "bad_words")
        if len(entries := getattr(params, name)) > MAX_TOKEN_ENTRIES
    ]
    if found:
        return found  # entries of such lists are not looked at one by one
    found += _outside_vocabulary("logit_bias", params.logit_bias, limits)
    found += [
        Violation(f"logit_bias[{token_id}]", bias, f"-{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}")
        for token_id, bias in params.logit_bias.items()
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS
    ]
    found += _outside_vocabulary("allowed_token_ids", params.allowed_token_ids, limits)
    found += _outside_vocabulary("stop_token_ids", params.stop_token_ids, limits)
    return found + _bad_words(params)


def _bad_words(params: pb.SamplingParams) -> list[Violation]:
    found = []
    for i, word in enumerate(params.bad_words):
        if not word:
            found.append(Violation(f"bad_words[{i}]", word, "a non-empty string"))
        elif len(word) > MAX_BAD_WORD_CHARS:
            found.append(Violation(f"bad_words[{i}]", f"{len(word)} characters", f"at most {MAX_BAD_WORD_CHARS}"))
    if (num_bytes := sum(len(word.encode()) for word in params.bad_words)) > MAX_BAD_WORDS_BYTES:
        found.append(Violation("bad_words", f"{num_bytes} bytes in all", f"at most {MAX_BAD_WORDS_BYTES}"))
    return found


def _outside_vocabulary(name: str, token_ids: Any, limits: SamplingLimits) -> list[Violation]:
    """The first id that the model does not have; one is enough to say what is wrong."""
    accepted = f"token ids 0 to {limits.vocab_size - 1}"
    return [Violation(name, token_id, accepted) for token_id in token_ids if token_id >= limits.vocab_size][:1]


def _guided(params: pb.SamplingParams) -> list[Violation]:
    if not params.HasField("guided"):
        return []
    kind = params.guided.WhichOneof("guide")
    if kind is None:
        return [Violation("guided", "nothing", f"one of {', '.join(GUIDES)}")]
    guide = params.guided.choice.choices if kind == "choice" else getattr(params.guided, kind)
    if not guide:
        value = list(guide) if kind == "choice" else guide
        return [Violation(f"guided.{kind}", value, "true" if kind == "json_object" else "not empty")]
    if kind == "choice" and "" in guide:
        return [Violation("guided.choice", "", "non-empty strings")]
    return []
