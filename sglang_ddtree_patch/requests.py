"""Which requests a DDTREE server takes; the others get HTTP 400 with the reason, never wrong text."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_spec

from sglang_ddtree_patch.settings import ALGORITHM, UNSEEDED


def refusal(request: Any) -> str | None:
    """Why `request` (SGLang's Req) cannot be served, or None if it can."""
    params = request.sampling_params
    refused = {
        "beam_width > 1": params.beam_width not in (None, 1),
        "return_hidden_states": request.return_hidden_states,
        "return_sampling_mask": request.return_sampling_mask,
        f"sampling_seed {UNSEEDED}": params.sampling_seed == UNSEEDED,
    }
    for feature, is_asked in refused.items():
        if is_asked:
            return (
                f"{ALGORITHM} speculative decoding does not support {feature} yet: "
                "send the request without it."
            )
    return None


def validate_request(original: Any, req: Any, enable_overlap: bool) -> str | None:
    """Around `validate_dflash_request`: a DDTREE server asks its own rules, any other the stock ones."""
    if get_spec().speculative_algorithm == ALGORITHM:
        return refusal(req)
    return original(req, enable_overlap)
