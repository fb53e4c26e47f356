"""Which requests a DDTREE server takes; the others get HTTP 400 with the reason, never wrong text.

Greedy requests are served exactly. What changes the target's choice along a path (sampling, penalties,
grammar) needs a rule for every branch of the tree, and is refused until there is one.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_spec

from sglang_ddtree_patch.settings import ALGORITHM


def refusal(request: Any) -> str | None:
    """Why `request` (SGLang's Req) cannot be served, or None if it can."""
    params = request.sampling_params
    refused = {
        "sampling (temperature > 0, which is also the default of the OpenAI API)": params.top_k != 1,
        "frequency_penalty": params.frequency_penalty != 0.0,
        "presence_penalty": params.presence_penalty != 0.0,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "min_new_tokens": params.min_new_tokens > 0,
        "beam_width > 1": params.beam_width not in (None, 1),
        "json_schema (what response_format asks for)": params.json_schema is not None,
        "regex": params.regex is not None,
        "ebnf": params.ebnf is not None,
        "structural_tag": params.structural_tag is not None,
        "custom_logit_processor": request.custom_logit_processor is not None,
        "return_hidden_states": request.return_hidden_states,
        "return_sampling_mask": request.return_sampling_mask,
    }
    for feature, is_asked in refused.items():
        if is_asked:
            return (
                f"{ALGORITHM} speculative decoding does not support {feature} yet: "
                "send greedy requests without it, with temperature 0."
            )
    return None


def validate_request(original: Any, req: Any, enable_overlap: bool) -> str | None:
    """Around `validate_dflash_request`: a DDTREE server asks its own rules, any other the stock ones."""
    if get_spec().speculative_algorithm == ALGORITHM:
        return refusal(req)
    return original(req, enable_overlap)
