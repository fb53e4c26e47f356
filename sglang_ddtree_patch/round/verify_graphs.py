"""CUDA graphs of target verify for every width that a round may take.

A runner of SGLang's holds the graphs of one width, by batch size, and refuses a batch of any other; its own
adaptive speculation exchanges runners in the same way. They share inputs, outputs and graph memory, as only
one of them runs at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sglang.srt.runtime_context import get_spec

logger = logging.getLogger(__name__)


class VerifyGraphs:
    """The graph runners of a target (SGLang's ModelRunner), which has captured the largest width's itself."""

    def __init__(self, target: Any, widths: Sequence[int]):
        """
        Args:
            target: its ``decode_cuda_graph_runner`` is of the largest width; None where none is captured.
            widths: ascending.
        """
        self._target = target
        largest = target.decode_cuda_graph_runner
        self._largest = widths[-1]
        self._runners = {self._largest: largest}
        self._in_use = largest
        if largest is None:
            return
        # Wide ones first: what is captured later fits into their memory.
        for width in reversed(widths[:-1]):
            with get_spec().override(speculative_num_draft_tokens=width):
                self._runners[width] = type(largest)(target, speculative_num_draft_tokens=width)
        logger.info("DDTREE: CUDA graphs of verify for widths %s.", ", ".join(map(str, widths)))

    def use(self, width: int) -> None:
        """Let the target's next verify run the graphs of a width, if there are any."""
        captured = self._target.decode_cuda_graph_runner
        if captured is not self._in_use:
            # SGLang has captured anew, as it can be asked to with new weights. What our graphs read of the
            # old weights, or of the attention backend, may be gone; only its own graphs are right now.
            self._runners = {self._largest: captured}
            logger.warning(
                "DDTREE: SGLang has captured its CUDA graphs anew; verify runs those, of width %d, and every "
                "other width and the commits without graphs, until the server is started again.",
                self._largest,
            )
        self._in_use = self._target.decode_cuda_graph_runner = self._runners.get(width)
