"""Which requests a DDTREE server takes; the others get HTTP 400 with the reason, never wrong text."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.runtime_context import get_spec
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ddtree_patch.settings import ALGORITHM, UNSEEDED

MOST_TOP_K = 2**31 - 1  # SGLang keeps it as int32


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
    return outside_vocabulary(request) or unusable(request)


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


def unusable(request: Any) -> str | None:
    """A value of `request` that SGLang takes and then ends at, or None."""
    params = request.sampling_params
    if params.top_k > MOST_TOP_K:
        return f"top_k {params.top_k} is more than {MOST_TOP_K}: send -1 for all tokens."
    if request.custom_logit_processor is not None and not isinstance(params.custom_params, dict | None):
        given = type(params.custom_params).__name__
        return f"custom_params is a {given}, and a custom_logit_processor reads an object: send one."
    return None


def validate_request(original: Any, req: Any, enable_overlap: bool) -> str | None:
    """Around `validate_dflash_request`: a DDTREE server asks its own rules, any other the stock ones."""
    if get_spec().speculative_algorithm == ALGORITHM:
        return refusal(req)
    return original(req, enable_overlap)


def disarm(result: None, request: Any, *reason: Any, **named: Any) -> None:
    """After `Req.set_finish_with_abort`: a refused request asks for nothing.

    SGLang still prefills a token of it before it answers, by its parameters, for which it may be refused.
    """
    if get_spec().speculative_algorithm == ALGORITHM:
        request.sampling_params = SamplingParams(max_new_tokens=1, temperature=0.0)
        request.sampling_params.normalize(None)
        request.custom_logit_processor = None


def check_values(result: None, manager: Any, asked: Any, input_ids: Any) -> None:
    """After `TokenizerManager._validate_one_request`, whose errors are HTTP 400.

    What would end a scheduler before it asks our rules, or is given to its request behind them.

    Raises:
        ValueError: a number that is none, a `logprob_start_len` that is no place in a prompt, or a session
            that is named by no string.
    """
    if get_spec().speculative_algorithm != ALGORITHM or not isinstance(asked, GenerateReqInput):
        return
    numbers = {"top_logprobs_num": asked.top_logprobs_num, "logprob_start_len": asked.logprob_start_len}
    for name, value in numbers.items():
        if not isinstance(value, int | None):
            raise ValueError(f"{name} is a {type(value).__name__}: send a whole number.")
    if asked.return_logprob and asked.logprob_start_len < -1:
        raise ValueError(
            f"logprob_start_len {asked.logprob_start_len} is no place in the prompt: send 0 for log-probs of "
            "all its tokens, -1 for none."
        )
    session = asked.session_params
    if isinstance(session, dict) and not isinstance(session.get("id"), str | None):
        raise ValueError(f"the session's id is a {type(session['id']).__name__}: send a string.")
