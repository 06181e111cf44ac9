"""Every example in a docstring of `octavo`, run as it stands: a tiny model has the name of a real one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import octavo
from octavo import LLM, BeamSearchParams, Client, LLMEngine, SamplingParams, TokensPrompt
from tests.integration.fake_inference import FakeServer
from tests.tiny_models import make_tiny_llama

# What users call first.
MUST_HAVE_ONE: set[Any] = {LLM, LLM.chat, LLM.beam_search, LLMEngine, Client, SamplingParams.clone}
pytestmark = pytest.mark.usefixtures("forked_workers")


def examples() -> dict[str, doctest.DocTest]:
    """By the full name of what they are an example of."""
    finder, found = doctest.DocTestFinder(exclude_empty=True), {}
    for module in pkgutil.walk_packages(octavo.__path__, "octavo."):
        if not module.name.endswith("__main__"):
            for each in finder.find(importlib.import_module(module.name)):
                if each.examples:
                    found[each.name] = each
    return found


EXAMPLES = examples()


def test_what_users_call_first_has_an_example() -> None:
    assert {f"{each.__module__}.{each.__qualname__}" for each in MUST_HAVE_ONE} <= set(EXAMPLES)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What examples call, with a model and an address that are there."""
    model = str(make_tiny_llama(tmp_path_factory.mktemp("tiny")))
    small: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory": 0.02}
    started: list[LLM | LLMEngine] = []

    def start(kind: type[LLM] | type[LLMEngine], name: str, **options: Any) -> LLM | LLMEngine:
        assert name == "smollm2-135m-instruct"
        started.append(kind(model, **small, **options))
        return started[-1]

    def client(address: str) -> Client:
        assert address == "127.0.0.1:50051"
        return Client(server.address)

    with FakeServer() as server:
        llm = start(LLM, "smollm2-135m-instruct")
        names = {"LLM": partial(start, LLM), "LLMEngine": partial(start, LLMEngine), "Client": client, "llm": llm}
        params = {"SamplingParams": SamplingParams, "BeamSearchParams": BeamSearchParams}
        yield names | params | {"TokensPrompt": TokensPrompt}
    for each in started:
        each.shutdown()


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_does_what_it_says(name: str, names: dict[str, Any]) -> None:
    test = EXAMPLES[name]
    test.globs = {**test.globs, **names}
    printed: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=printed.append)
    assert results.attempted and not results.failed, "".join(printed)
