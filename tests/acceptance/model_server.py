"""The embedded model behind a server in this process, so that its parts can be watched, and broken on purpose."""

from __future__ import annotations

from typing import Any

from tests.server.parrot import ParrotServer

from everystop.config import Config
from everystop.server.opening import Opening
from everystop.server.state import ServedModel


class ModelServer(ParrotServer):
    """As `ParrotServer`, with SmolLM2; `settings` are fields of `Config`, such as `max_num_seqs`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        defaults: dict[str, Any] = {"threads": 2, "max_model_len": 1024, "max_num_seqs": 32, "block_size": 32}
        self._opening = Opening(Config(port=0, **defaults | settings), f"http://127.0.0.1:{self.port}")

    def _load(self) -> ServedModel:
        model = self._opening.load()
        self.engine = model.engine  # type: ignore[assignment]
        self.scheduler = self.engine._scheduler
        self.num_blocks = model.num_blocks
        return model
