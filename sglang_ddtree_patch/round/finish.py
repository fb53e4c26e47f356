"""A round's tokens end an answer where they would have ended it one at a time.

SGLang looks for stops once behind a round: for stop strings in the order of the request, then for stop
tokens, so that of two stops within one round the later may win. Its window of text for stop strings is the
wider by the round's tokens, so that it finds some which plain decoding overlooks. Here a round in which
anything could stop is said again token by token, and SGLang's own rule is asked after each. What lies behind
the stop stays in `output_ids` for SGLang's accounting, which cuts at `finished_len`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import get_spec

from sglang_ddtree_patch.settings import ALGORITHM

# What a tokenizer writes for a part of a character: text around it may be another with the next token.
UNDECIDED = "\N{REPLACEMENT CHARACTER}"


def finish_where_plain_decoding_would(original: Callable, request: Any, new_accepted_len: int = 1) -> None:
    """Around `Req.update_finish_state`, once `new_accepted_len` tokens of a round stand in `output_ids`."""
    if (
        new_accepted_len < 2
        or get_spec().speculative_algorithm != ALGORITHM
        or request.finished()
        or request.to_finish
    ):
        original(request, new_accepted_len)
        return
    said = request.output_ids[-new_accepted_len:]
    if _may_finish(request, said):
        _finish_by_token(original, request, said)


def _may_finish(request: Any, said: Any) -> bool:
    """Whether a round could hold a stop; no only where there is none for certain."""
    params = request.sampling_params
    if len(request.output_ids) >= params.max_new_tokens or params.stop_regex_strs:
        return True
    if request.grammar is not None and request.grammar.is_terminated():
        return True
    if request._check_vocab_boundary_finish(said) or request._check_token_based_finish(said):
        request.finished_reason = request.finished_len = None
        return True
    if not params.stop_strs:
        return False
    text = request.tail_str(len(said))
    return UNDECIDED in text or any(stop in text or UNDECIDED in stop for stop in params.stop_strs)


def _finish_by_token(original: Callable, request: Any, said: Any) -> None:
    del request.output_ids[-len(said) :]
    # It has been walked to the round's end: the round was cut behind the token that ended it, if one did.
    grammar, request.grammar = request.grammar, None
    for count, token in enumerate(said, start=1):
        if count == len(said):
            request.grammar = grammar
        request.output_ids.append(token)
        original(request)
        if request.finished():
            if request.finished_len is None:
                request.finished_len = len(request.output_ids)
            # Counted before, over the whole round.
            request.reasoning_tokens = min(request.reasoning_tokens, request.finished_len)
            request.output_ids.extend(said[count:])
            break
    request.grammar = grammar


def continue_from_what_was_shown(original: Callable, last: Any, *call: Any, **named: Any) -> Any:
    """Around `Session._concat_token_arrays`: a session goes on behind the stop of its last answer."""
    if get_spec().speculative_algorithm == ALGORITHM:
        last.output_ids = last.output_ids_through_stop
    return original(last, *call, **named)
