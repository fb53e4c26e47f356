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
    return outside_vocabulary(request)


def outside_vocabulary(request: Any) -> str | None:
    """What of `request` the model has no logits or embedding for, or None. SGLang would try, and end."""
    vocabulary, params = request.vocab_size, request.sampling_params
    if request.logprob.top_logprobs_num > vocabulary:
        asked = request.logprob.top_logprobs_num
        return f"top_logprobs_num {asked} is more than the {vocabulary} tokens of the model."
    tokens = {}
    if request.multimodal_inputs is None:  # images take places numbered past the vocabulary
        tokens["input_ids"] = request.origin_input_ids
    if params.min_new_tokens > 0:  # makes stop tokens impossible for a while
        tokens["stop_token_ids"] = params.stop_token_ids or ()
    for name, ids in tokens.items():
        if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
            token = next(token for token in ids if not 0 <= token < vocabulary)
            return f"{name} holds {token}, and the model's tokens go from 0 to {vocabulary - 1}."
    return None


def validate_request(original: Any, req: Any, enable_overlap: bool) -> str | None:
    """Around `validate_dflash_request`: a DDTREE server asks its own rules, any other the stock ones."""
    if get_spec().speculative_algorithm == ALGORITHM:
        reason = refusal(req)
        if reason is not None:
            # SGLang still prefills a token of it, by its parameters, before it answers.
            req.sampling_params.min_new_tokens = 0
        return reason
    return original(req, enable_overlap)
