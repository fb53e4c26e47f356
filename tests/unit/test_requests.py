"""requests.py on SGLang's own sampling parameters, normalized and verified as its tokenizer process does."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ddtree_patch.sampling import requests

VOCABULARY = 1000


def request(
    custom_logit_processor=None, return_hidden_states=False, return_sampling_mask=False, input_ids=(0, 999),
    multimodal_inputs=None, top_logprobs_num=0, **params,
):  # fmt: skip
    sampling = SamplingParams(**{"temperature": 0, **params})
    sampling.normalize(SimpleNamespace(encode=lambda text, add_special_tokens: [ord(c) for c in text]))
    sampling.verify(VOCABULARY)
    return SimpleNamespace(
        sampling_params=sampling,
        custom_logit_processor=custom_logit_processor,
        return_hidden_states=return_hidden_states,
        return_sampling_mask=return_sampling_mask,
        origin_input_ids=list(input_ids),
        multimodal_inputs=multimodal_inputs,
        vocab_size=VOCABULARY,
        logprob=SimpleNamespace(top_logprobs_num=top_logprobs_num),
    )


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0, "top_p": 0.5, "top_k": 20},
        {"temperature": 1e-9},
        {"temperature": None},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "sampling_seed": -1},
        {"max_new_tokens": None},
        {"stop": ["\n"], "stop_token_ids": [2], "ignore_eos": True},
        {"logit_bias": {"5": -100.0}},
        {"n": 3},
        {"beam_width": 1},
        {"frequency_penalty": 0.1, "presence_penalty": -0.1, "repetition_penalty": 1.1, "min_new_tokens": 1},
        {"json_schema": '{"type": "object"}'},
        {"regex": "a+"},
        {"ebnf": 'root ::= "a"'},
        {"structural_tag": "{}"},
        {"custom_logit_processor": "x"},
    ],
    ids=str,
)
def test_what_the_round_can_do_is_served(params):
    assert requests.refusal(request(**params)) is None


@pytest.mark.parametrize(
    ("asked", "feature"),
    [
        ({"beam_width": 2}, "beam_width"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"return_sampling_mask": True}, "return_sampling_mask"),
        ({"temperature": 0.7, "sampling_seed": -(2**63)}, "sampling_seed -9223372036854775808"),
    ],
    ids=lambda value: str(value),
)
def test_what_it_cannot_is_refused_by_name(asked, feature):
    reason = requests.refusal(request(**asked))
    assert reason is not None
    assert feature in reason
    assert "DDTREE" in reason
    assert "send the request without it" in reason
    assert "\n" not in reason


@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**40])
def test_a_token_that_the_model_does_not_have_is_refused_by_number(token):
    words = f"holds {token}, and the model's tokens go from 0 to 999."
    assert requests.refusal(request(input_ids=[5, token, 7])) == f"input_ids {words}"
    waiting = request(stop_token_ids=[token, 7], min_new_tokens=1)
    assert requests.refusal(waiting) == f"stop_token_ids {words}"
    assert requests.refusal(request(stop_token_ids=[token])) is None


def test_more_top_log_probs_than_tokens_are_refused():
    assert requests.refusal(request(top_logprobs_num=VOCABULARY)) is None
    reason = requests.refusal(request(top_logprobs_num=VOCABULARY + 1))
    assert reason == "top_logprobs_num 1001 is more than the 1000 tokens of the model."


def test_the_places_of_images_are_no_tokens():
    assert requests.refusal(request(input_ids=[5, 2**40], multimodal_inputs=object())) is None


@pytest.mark.parametrize("algorithm", [None, "DFLASH", "EAGLE"])
def test_another_algorithm_keeps_its_own_rules(monkeypatch, algorithm):
    monkeypatch.setattr(requests, "get_spec", lambda: SimpleNamespace(speculative_algorithm=algorithm))
    asked = request(beam_width=2)
    assert requests.validate_request(lambda req, overlap: (req, overlap), asked, True) == (asked, True)


def test_a_ddtree_server_asks_its_own_rules_alone(monkeypatch):
    monkeypatch.setattr(requests, "get_spec", lambda: SimpleNamespace(speculative_algorithm="DDTREE"))

    def stock(req, overlap):
        raise AssertionError("stock rules of DFLASH asked")

    assert requests.validate_request(stock, request(), True) is None
    assert "beam_width" in requests.validate_request(stock, request(beam_width=2), False)


def test_a_number_that_sglang_cannot_hold_is_refused():
    assert requests.refusal(request(temperature=1, top_k=2**31 - 1)) is None
    reason = requests.refusal(request(temperature=1, top_k=2**31))
    assert reason == "top_k 2147483648 is more than 2147483647: send -1 for all tokens."


def test_a_processor_gets_its_parameters_as_an_object():
    for params in (None, {"a": 1}):
        assert requests.refusal(request(custom_logit_processor="x", custom_params=params)) is None
    reason = requests.refusal(request(custom_logit_processor="x", custom_params=[1]))
    assert reason == "custom_params is a list, and a custom_logit_processor reads an object: send one."
    assert requests.refusal(request(custom_params=[1])) is None


@pytest.mark.parametrize("algorithm", ["DDTREE", None])
def test_a_refused_request_asks_for_nothing(monkeypatch, algorithm):
    monkeypatch.setattr(requests, "get_spec", lambda: SimpleNamespace(speculative_algorithm=algorithm))
    refused = request(
        stop_token_ids=[VOCABULARY], min_new_tokens=3, top_k=2**31, temperature=1, custom_params=[1],
        custom_logit_processor="x",
    )  # fmt: skip
    asked = refused.sampling_params
    requests.disarm(None, refused, "a reason")
    if algorithm is None:
        assert refused.sampling_params is asked
        assert refused.custom_logit_processor == "x"
        return
    assert requests.refusal(refused) is None
    assert refused.sampling_params.is_normalized
    assert not refused.sampling_params.min_new_tokens
    assert refused.custom_logit_processor is None


@pytest.mark.parametrize(
    ("algorithm", "return_logprob", "start", "is_refused"),
    [("DDTREE", True, -7, True), ("DDTREE", True, -1, False), ("DDTREE", True, 0, False),
     ("DDTREE", False, -7, False), (None, True, -7, False)],
)  # fmt: skip
def test_log_probs_begin_at_a_place_in_the_prompt(monkeypatch, algorithm, return_logprob, start, is_refused):
    monkeypatch.setattr(requests, "get_spec", lambda: SimpleNamespace(speculative_algorithm=algorithm))
    asked = GenerateReqInput(input_ids=[5], return_logprob=return_logprob, logprob_start_len=start)
    if not is_refused:
        requests.check_values(None, None, asked, [5])
        return
    with pytest.raises(ValueError, match="logprob_start_len -7 is no place in the prompt: send 0 "):
        requests.check_values(None, None, asked, [5])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"top_logprobs_num": []}, "top_logprobs_num is a list: send a whole number."),
        ({"logprob_start_len": [1], "return_logprob": True}, "logprob_start_len is a list: send a whole"),
        ({"session_params": {"id": ["x"]}}, "the session's id is a list: send a string."),
    ],
)
def test_values_that_sglang_cannot_compare_or_look_up_are_refused(monkeypatch, values, reason):
    monkeypatch.setattr(requests, "get_spec", lambda: SimpleNamespace(speculative_algorithm="DDTREE"))
    with pytest.raises(ValueError, match=reason):
        requests.check_values(None, None, GenerateReqInput(input_ids=[5], **values), [5])
    requests.check_values(None, None, GenerateReqInput(input_ids=[5], session_params={"id": None}), [5])
