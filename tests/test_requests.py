"""requests.py on SGLang's own sampling parameters, normalized and verified as its tokenizer process does."""

from types import SimpleNamespace

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ddtree_patch import requests

VOCABULARY = 1000


def request(custom_logit_processor=None, return_hidden_states=False, return_sampling_mask=False, **params):
    sampling = SamplingParams(**{"temperature": 0, **params})
    sampling.normalize(SimpleNamespace(encode=lambda text, add_special_tokens: [ord(c) for c in text]))
    sampling.verify(VOCABULARY)
    return SimpleNamespace(
        sampling_params=sampling,
        custom_logit_processor=custom_logit_processor,
        return_hidden_states=return_hidden_states,
        return_sampling_mask=return_sampling_mask,
    )


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0, "top_p": 0.5, "top_k": 20},
        {"temperature": 0.7, "top_k": 1},
        {"temperature": 1e-9},
        {"max_new_tokens": 1},
        {"max_new_tokens": None},
        {"stop": ["\n"], "stop_token_ids": [2], "ignore_eos": True},
        {"logit_bias": {"5": -100.0}},
        {"n": 3},
        {"beam_width": 1},
        {"frequency_penalty": None, "presence_penalty": 0.0, "repetition_penalty": 1.0},
        {"json_schema": "", "regex": "", "ebnf": ""},
    ],
    ids=str,
)
def test_a_greedy_request_is_served(params):
    assert requests.refusal(request(**params)) is None


@pytest.mark.parametrize(
    ("asked", "feature"),
    [
        ({"temperature": 0.7}, "temperature > 0"),
        ({"temperature": None}, "temperature > 0"),
        ({"temperature": 1.0, "top_k": 2}, "temperature > 0"),
        ({"temperature": 1.0, "top_p": 1e-6}, "temperature > 0"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": -0.1}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_new_tokens": 1}, "min_new_tokens"),
        ({"beam_width": 2}, "beam_width"),
        ({"json_schema": '{"type": "object"}'}, "json_schema"),
        ({"regex": "a+"}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"custom_logit_processor": "x"}, "custom_logit_processor"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"return_sampling_mask": True}, "return_sampling_mask"),
    ],
    ids=lambda value: str(value),
)
def test_what_changes_the_targets_choice_is_refused_by_name(asked, feature):
    reason = requests.refusal(request(**asked))
    assert reason is not None
    assert feature in reason
    assert "DDTREE" in reason
    assert "\n" not in reason


def test_a_sampled_request_is_told_how_to_be_served():
    assert "with temperature 0" in requests.refusal(request(temperature=0.7))


@pytest.mark.parametrize("algorithm", [None, "DFLASH", "EAGLE"])
def test_another_algorithm_keeps_its_own_rules(monkeypatch, algorithm):
    monkeypatch.setattr(requests, "get_spec", lambda: SimpleNamespace(speculative_algorithm=algorithm))
    sampled = request(temperature=0.7)
    assert requests.validate_request(lambda req, overlap: (req, overlap), sampled, True) == (sampled, True)


def test_a_ddtree_server_asks_its_own_rules_alone(monkeypatch):
    monkeypatch.setattr(requests, "get_spec", lambda: SimpleNamespace(speculative_algorithm="DDTREE"))

    def stock(req, overlap):
        raise AssertionError("stock rules of DFLASH asked")

    assert requests.validate_request(stock, request(), True) is None
    assert "temperature" in requests.validate_request(stock, request(temperature=0.7), False)
