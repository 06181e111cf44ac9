"""The models that requests may name, and which of them a request gets.

Workers that compute the same tokens from the same text serve one model, whose identity is its fingerprint. Several may
have one name: they are its revisions, of which the newest with a worker takes new requests, while the others end what
they have. `NAME@FINGERPRINT`, of which the first digits are enough, names a revision itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.shared.command_line import listed
from scheduler_svc.errors import NotReady, UnknownName
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.text.tokenizer import Tokenizer

MIN_DIGITS = 6  # of a fingerprint that names a revision
SHOWN_DIGITS = 12
MAX_SHOWN = 256  # characters of a name that nobody has


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model and its workers: those that take requests, and those that end what they have."""

    model: ServedModel
    num_serving: int = 0
    num_draining: int = 0


@dataclass(frozen=True, slots=True)
class AwaitedModel:
    """Of a worker that has yet to join. Both are empty while it has not been heard of: it may be of any."""

    name: str = ""
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class ServedModels:
    """All models at one moment.

    Attributes:
        known: in the order in which they came.
        default_name: what a request without a name gets in any case; empty: the name that came first, of those with a
            worker that takes requests, or of all where no model has one.
        awaited: a name that nobody knows may be one of these before long: it is refused for now, and not for good.
    """

    known: tuple[KnownModel, ...] = ()
    default_name: str = ""
    awaited: frozenset[AwaitedModel] = frozenset()

    @classmethod
    def of(cls, *models: ServedModel) -> ServedModels:
        """These, each with one worker."""
        return cls(tuple(KnownModel(model, num_serving=1) for model in models))

    @property
    def names(self) -> list[str]:
        """Each once, in the order in which they came."""
        return list(dict.fromkeys(each.model.name for each in self.known))

    def with_tokenizer(self, tokenizer: Tokenizer) -> ServedModels:
        """The same models, all with this tokenizer."""
        known = (replace(each, model=replace(each.model, tokenizer=tokenizer)) for each in self.known)
        return replace(self, known=tuple(known))

    def find(self, fingerprint: str) -> ServedModel | None:
        """The revision with exactly this fingerprint, whether it takes requests or not."""
        return next((each.model for each in self.known if each.model.fingerprint == fingerprint), None)

    def resolve(self, name: str = "", fingerprint: str = "") -> ServedModel:
        """The model of a new request, or with a fingerprint that of one which goes on with its tokens.

        Raises NotReady before there is any model, or this one, where it is awaited; UnknownName for one that is not
        here.
        """
        self.check_any()
        try:
            return self._resolve(name, fingerprint)
        except UnknownName as error:
            if not self._is_awaited(name, fingerprint):
                raise
            raise NotReady(f"{error}; not all workers have joined yet") from None

    def _resolve(self, name: str, fingerprint: str) -> ServedModel:
        if fingerprint:
            return self._resume(name, fingerprint)
        if not name:
            return self.default()
        if name in self.names:
            return self.current(name)
        return self._revision(name)

    def default(self) -> ServedModel:
        """What a request without a name gets. Raises NotReady while it has not come."""
        if self.default_name:
            if self.default_name not in self.names:
                raise NotReady(f"no worker of {self.default_name!r}, the default (--served-model-name), has joined yet")
            return self.current(self.default_name)
        serving = (each.model for each in self.known if each.num_serving)
        self.check_any()
        return self.current(next(serving, self.known[0].model).name)

    def check_any(self) -> None:
        """Raises NotReady before there is any model."""
        if not self.known:
            raise NotReady("no worker has joined this scheduler yet")

    def without_counts(self) -> ServedModels:
        """All that decides which model a request gets, and changes no more often than that."""
        known = (KnownModel(each.model, num_serving=min(each.num_serving, 1)) for each in self.known)
        return replace(self, known=tuple(known))

    def default_or_none(self) -> ServedModel | None:
        """None: a request without a name would be refused."""
        try:
            return self.default()
        except NotReady:
            return None

    def name_of(self, fingerprint: str) -> str:
        """Empty for a model that is not known."""
        model = self.find(fingerprint)
        return model.name if model is not None else ""

    def current(self, name: str) -> ServedModel:
        """Of the revisions of a name that is known, the one that takes new requests."""
        revisions = self._revisions(name)
        return next((each for each in reversed(revisions) if each.num_serving), revisions[-1]).model

    def _resume(self, name: str, fingerprint: str) -> ServedModel:
        if (model := self.find(fingerprint)) is not None:
            if name and name != model.name and not _is_revision(name, model):
                raise UnknownName(f"model {model.name!r} is {fingerprint}; the request names {name[:MAX_SHOWN]!r}")
            return model
        ours = self._resolve(name, "")  # raises where not even the name is known
        raise UnknownName(
            f"model {ours.name!r} is {ours.fingerprint} here; the request began with {fingerprint[:32]!r}"
        )

    def _is_awaited(self, name: str, fingerprint: str) -> bool:
        if fingerprint and self.find(fingerprint) is not None:
            return False  # it is here, by another name
        if fingerprint:
            return any(each.fingerprint in ("", fingerprint) for each in self.awaited)
        return any(not each.name or name == each.name or _is_revision(name, each) for each in self.awaited)

    def _revision(self, name: str) -> ServedModel:
        found = [each.model for each in self.known if _is_revision(name, each.model)]
        if len(found) != 1:
            wanted = name.rpartition("@")[0]
            revisions = [f"{wanted}@{each.model.fingerprint[:SHOWN_DIGITS]}" for each in self._revisions(wanted)]
            raise UnknownName(f"model {name[:MAX_SHOWN]!r} is not served here; {listed(revisions or self.names)}")
        return found[0]

    def _revisions(self, name: str) -> list[KnownModel]:
        return [each for each in self.known if each.model.name == name]


def _is_revision(name: str, model: ServedModel | AwaitedModel) -> bool:
    wanted, _, digits = name.rpartition("@")
    return wanted == model.name and len(digits) >= MIN_DIGITS and model.fingerprint.startswith(digits)
