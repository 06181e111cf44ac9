"""What a core tells its frontends about itself: whether it is ready, its models, and their tokenizers' files."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from protos import frontend_pb2
from scheduler_svc.frontends.frontend_links import FrontendLinks
from scheduler_svc.models.model_description import encode_models
from scheduler_svc.models.served_model import ServedModel
from scheduler_svc.models.served_models import ServedModels


class ToldState:
    """`folder`: where tokenizers lie, as frontends on this machine find them."""

    def __init__(self, links: FrontendLinks, folder: Path) -> None:
        self._links = links
        self._folder = folder
        self._state = frontend_pb2.CoreState()

    async def show(self, is_ready: bool, models: ServedModels) -> None:
        """Writes tokenizers that are new to the folder, then tells every frontend."""
        await asyncio.to_thread(self._keep_tokenizers, models)
        self._state.models.CopyFrom(encode_models(models, self._tokenizer_folder))
        self._state.is_ready = is_ready
        self._links.set_state(self._state)

    def drain(self) -> None:
        """Tells every frontend to take no new requests, for good."""
        self._state.is_draining = True
        self._links.set_state(self._state)

    def break_off(self, is_broken_off: bool) -> None:
        """Whether there are requests that go on elsewhere."""
        self._state.is_broken_off = is_broken_off
        self._links.set_state(self._state)

    def _tokenizer_folder(self, model: ServedModel) -> Path:
        return self._folder / f"tokenizer-{model.fingerprint}"

    def _keep_tokenizers(self, models: ServedModels) -> None:
        """The files of those that are served, and of no others."""
        folders = {self._tokenizer_folder(each.model): each.model.tokenizer for each in models.known}
        for folder in set(self._folder.glob("tokenizer-*")) - folders.keys():
            shutil.rmtree(folder, ignore_errors=True)
        for folder, tokenizer in folders.items():
            if not folder.exists():
                tokenizer.save(folder)
