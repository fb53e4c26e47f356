"""Generate with the toy engine beside this file: a list of settings as JSON in, what became of each out.

The guesses stand for a good drafter: the true continuation, which plain decoding tells, behind decoys, and
now and then nothing that is true.
"""

import json
import sys

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.toy import VOCABULARY
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.dflash_worker import DFlashWorker

PROMPT_LENS = (1, 15, 16, 17, 40)
NEW_TOKENS = 48


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in PROMPT_LENS]


def prefill(runner: ModelRunner) -> tuple[ScheduleBatch, torch.Tensor]:
    """All prompts in the pool; the batch, and each request's next token."""
    reqs = [Req(prompt) for prompt in prompts()]
    batch = ScheduleBatch(reqs, runner.req_to_token_pool, runner.token_to_kv_pool_allocator)
    batch.req_pool_indices = torch.arange(len(reqs))
    batch.seq_lens = torch.tensor([len(req.origin_input_ids) for req in reqs])
    batch.input_ids = torch.tensor([token for req in reqs for token in req.origin_input_ids])
    batch.positions = torch.cat([torch.arange(n) for n in batch.seq_lens.tolist()])
    batch.out_cache_loc = batch.alloc(torch.zeros_like(batch.seq_lens), batch.seq_lens)
    last = batch.seq_lens.cumsum(0) - 1
    tokens = runner.forward(batch)[last].argmax(-1)
    for req, token in zip(reqs, tokens.tolist(), strict=True):
        req.output_ids.append(token)
    return batch, tokens


def decode(settings: dict) -> list[list[int]]:
    """Plain decoding, a token a round."""
    runner = ModelRunner(ServerArgs(**settings))
    batch, tokens = prefill(runner)
    batch.forward_mode = ForwardMode.DECODE
    for _ in range(NEW_TOKENS + 16):
        batch.input_ids, batch.positions = tokens, batch.seq_lens.clone()
        batch.out_cache_loc = batch.alloc(batch.seq_lens, batch.seq_lens + 1)
        batch.seq_lens = batch.seq_lens + 1
        tokens = runner.forward(batch).argmax(-1)
        for req, token in zip(batch.reqs, tokens.tolist(), strict=True):
            req.output_ids.append(token)
    return [req.output_ids for req in batch.reqs]


def generate(settings: dict, truth: list[list[int]]) -> dict:
    """Speculative decoding until every request has its tokens."""
    server_args = ServerArgs(**settings)
    runner = ModelRunner(server_args)
    batch, tokens = prefill(runner)

    def guesses(request: int, length: int) -> list[list[int]]:
        done = length - PROMPT_LENS[request] + 1
        ahead = truth[request][done : done + server_args.speculative_num_draft_tokens]
        is_tree = settings["speculative_algorithm"] == "DDTREE"
        levels = []
        for depth, token in enumerate(ahead):
            decoys = [(token + 1 + k) % VOCABULARY for k in range((length + depth) % 3)]
            is_wrong = (length + depth) % 7 == 6
            best = (token + 9) % VOCABULARY if is_wrong else token
            levels.append([*decoys, best] if is_tree else [best])
        return levels

    worker = DFlashWorker(server_args, runner, guesses)
    rounds = 0
    while min(len(req.output_ids) for req in batch.reqs) < NEW_TOKENS:
        tokens, _ = worker.forward_batch_generation(batch, tokens)
        rounds += 1
    table = runner.req_to_token_pool.req_to_token
    allocator = runner.token_to_kv_pool_allocator
    for request, length in enumerate(batch.seq_lens.tolist()):
        allocator.free(table[request, :length].long())
    return {
        "tokens": [req.output_ids[:NEW_TOKENS] for req in batch.reqs],
        "rounds": rounds,
        "leaked_pages": allocator.initial_pages - len(allocator.free_pages),
    }


def outcome(settings: dict, truth: list[list[int]]) -> dict:
    try:
        generated = generate(settings, truth)
    except (ValueError, RuntimeError) as error:
        return {"error": str(error)}
    is_right = generated.pop("tokens") == [tokens[:NEW_TOKENS] for tokens in truth]
    return {**generated, "is_right": is_right}


if __name__ == "__main__":
    truth = decode({"attention_backend": "triton"})
    print(json.dumps([outcome(settings, truth) for settings in json.loads(sys.argv[1])]))
