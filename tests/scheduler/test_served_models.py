"""Which model a request gets, by name and by revision."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from scheduler_svc.errors import NotReady, UnknownName
from scheduler_svc.models.model_description import decode_models, encode_models
from scheduler_svc.models.model_names import ModelNames
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.models.served_models import AwaitedModel, KnownModel, ServedModels
from tests.scheduler.tiny_served_model import tiny_served_model


@pytest.fixture
def a(tmp_path: Path) -> ServedModel:
    return dataclasses.replace(tiny_served_model(tmp_path), name="a", fingerprint="aaaaaa0" + "0" * 25)


@pytest.fixture
def b(a: ServedModel) -> ServedModel:
    return dataclasses.replace(a, name="b", fingerprint="bbbbbb" + "0" * 26)


@pytest.fixture
def new_a(a: ServedModel) -> ServedModel:
    return dataclasses.replace(a, fingerprint="aaaaaa1" + "0" * 25)


def test_before_any_worker_clients_are_told_to_try_again() -> None:
    with pytest.raises(NotReady, match="no worker has joined"):
        ServedModels().resolve("a")
    assert ServedModels().default_or_none() is None


def test_by_name_and_without_one_the_first(a: ServedModel, b: ServedModel) -> None:
    models = ServedModels.of(a, b)
    assert models.resolve() is a and models.resolve("a") is a and models.resolve("b") is b
    with pytest.raises(UnknownName, match=r"model 'c' is not served here; 'a' and 'b' are$"):
        models.resolve("c")
    with pytest.raises(UnknownName, match=r"model 'c' is not served here; 'a' is$"):
        ServedModels.of(a).resolve("c")


def test_without_a_name_only_who_has_workers_is_taken_for_the_first(a: ServedModel, b: ServedModel) -> None:
    """A rollout to another name refuses nobody: when the last worker of the old one drains, the new one is meant."""
    drains = KnownModel(a, num_serving=0, num_draining=1)
    assert ServedModels((drains, KnownModel(b, num_serving=1))).resolve() is b
    assert ServedModels((drains, KnownModel(b))).resolve() is a


def test_a_default_that_was_named_is_no_other(a: ServedModel, b: ServedModel) -> None:
    gone = ServedModels((KnownModel(a, num_serving=1), KnownModel(b)), default_name="b")
    assert gone.resolve() is b
    not_yet = dataclasses.replace(ServedModels.of(a), default_name="b")
    assert not_yet.resolve("a") is a and not_yet.default_or_none() is None
    with pytest.raises(NotReady, match="no worker of 'b'"):
        not_yet.resolve()


def test_the_newest_revision_with_a_worker_takes_new_requests(a: ServedModel, new_a: ServedModel) -> None:
    both = ServedModels.of(a, new_a)
    assert both.resolve("a") is both.resolve() is new_a
    back = ServedModels((KnownModel(a, num_serving=3), KnownModel(new_a, num_draining=1)))
    assert back.resolve("a") is back.resolve() is a
    assert ServedModels((KnownModel(a), KnownModel(new_a))).resolve("a") is new_a


def test_a_revision_by_its_first_digits(a: ServedModel, new_a: ServedModel, b: ServedModel) -> None:
    models = ServedModels.of(a, new_a, b)
    for model in (a, new_a):
        assert models.resolve(f"a@{model.fingerprint}") is models.resolve(f"a@{model.fingerprint[:7]}") is model
    listed = f"'a@{a.fingerprint[:12]}' and 'a@{new_a.fingerprint[:12]}' are"
    for name in (
        f"a@{a.fingerprint[:6]}",
        f"a@{a.fingerprint[:5]}",
        "a@",
        f"a@{b.fingerprint}",
    ):  # of both, too short, or of another name
        with pytest.raises(UnknownName, match=listed):
            models.resolve(name)
    with pytest.raises(UnknownName, match="'a' and 'b' are"):
        models.resolve(f"c@{a.fingerprint}")
    named_so = dataclasses.replace(b, name="a@main")
    assert ServedModels.of(a, named_so).resolve("a@main") is named_so


def test_what_goes_on_goes_on_with_its_own_model_or_not_at_all(a: ServedModel, new_a: ServedModel) -> None:
    models = ServedModels.of(a, new_a)
    assert models.resolve("a", a.fingerprint) is models.resolve("", a.fingerprint) is a
    assert models.resolve(f"a@{a.fingerprint[:8]}", a.fingerprint) is a
    with pytest.raises(UnknownName, match=f"model 'a' is {new_a.fingerprint} here; the request began with"):
        ServedModels.of(new_a).resolve("a", a.fingerprint)
    with pytest.raises(UnknownName, match="the request names 'b'"):
        models.resolve("b", a.fingerprint)


def test_who_is_awaited_is_refused_for_now_and_everybody_else_for_good(
    a: ServedModel, new_a: ServedModel, b: ServedModel
) -> None:
    of_b = AwaitedModel(b.name, b.fingerprint)
    models = dataclasses.replace(ServedModels.of(a), awaited=frozenset({of_b, AwaitedModel("a", new_a.fingerprint)}))
    for name, fingerprint in (
        ("b", ""),
        (f"b@{b.fingerprint[:8]}", ""),
        ("b", b.fingerprint),
        ("", b.fingerprint),
        ("a", new_a.fingerprint),
    ):
        with pytest.raises(NotReady, match="not all workers have joined yet"):
            models.resolve(name, fingerprint)
    for name, fingerprint in (("c", ""), (f"b@{a.fingerprint}", ""), ("c", "cccccc"), ("b", a.fingerprint)):
        with pytest.raises(UnknownName):
            models.resolve(name, fingerprint)
    assert models.resolve("a") is a, "who is here waits for nobody"
    anyone = dataclasses.replace(ServedModels.of(a), awaited=frozenset({AwaitedModel()}))
    for name, fingerprint in (("c", ""), ("c", "cccccc")):
        with pytest.raises(NotReady):
            anyone.resolve(name, fingerprint)
    with pytest.raises(UnknownName, match="the request names 'b'"):
        anyone.resolve("b", a.fingerprint)
    assert anyone.without_counts().awaited == decode_models(encode_models(anyone), lambda _: a).awaited


def test_texts_hear_of_what_decides_and_of_nothing_else(a: ServedModel) -> None:
    def counted(num_serving: int, num_draining: int = 0) -> ServedModels:
        return ServedModels((KnownModel(a, num_serving, num_draining),)).without_counts()

    assert counted(1) == counted(2, 5) != counted(0, 1)


def test_names_are_for_all_or_for_one_and_the_first_alias_is_the_default() -> None:
    names = ModelNames.parse(["big=org/large", "rest", "small=org/tiny"])
    assert [names.model(own) for own in ("org/large", "org/tiny", "x")] == ["big", "small", "rest"]
    assert names.default == "big" and not ModelNames.parse(["rest"]).default
    assert ModelNames.parse([]).model("x") == "x"


@pytest.mark.parametrize("entries", [["=x"], ["a="], [""], ["a=x", "b=x"], ["a", "b"]])
def test_names_that_say_nothing_or_two_things_are_errors(entries: list[str]) -> None:
    with pytest.raises(ValueError, match="served_model_name has"):
        ModelNames.parse(entries)
