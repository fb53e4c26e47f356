"""What a server is asked for."""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass
class ServerArgs:
    attention_backend: str | None = None
    page_size: int | None = None
    speculative_algorithm: str | None = None
    speculative_num_draft_tokens: int = 8

    def __post_init__(self):
        if self.page_size is None:
            self.page_size = 1
        if self.speculative_algorithm is not None:
            self._handle_speculative_decoding()
        if self.attention_backend is None:
            self.attention_backend = "flash"

    def _handle_speculative_decoding(self):
        if self.speculative_algorithm == "DDTREE":
            if self.attention_backend is None:
                self.attention_backend = "triton"
            if self.attention_backend not in ("triton",):
                logger.error("Tree masks reach no other backend.")
                raise ValueError(
                    "DDTREE serves with --attention-backend triton alone, not "
                    f"{self.attention_backend}: the others skip the tree mask."
                )
