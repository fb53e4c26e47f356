"""The drafter's trainer: what it learns from, and that what it measures is what a server would do."""

import json
import math
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

from sglang_ddtree_patch import model_catalog

REPOSITORY = Path(__file__).resolve().parents[2]
# Its modules are scripts beside each other, not part of the package.
sys.path.insert(0, str(REPOSITORY / "launch" / "training"))

import acceptance  # noqa: E402
import answers  # noqa: E402
import draft_steps  # noqa: E402
import drafter as drafting  # noqa: E402
import drafter_arguments  # noqa: E402
import fit as fitting  # noqa: E402
import head_loss  # noqa: E402
import kept_features  # noqa: E402
import prompts as prompting  # noqa: E402
import questions  # noqa: E402
import sampled_text  # noqa: E402
import targets  # noqa: E402
import text_batches  # noqa: E402
import train_drafter  # noqa: E402
import validation  # noqa: E402
from best_first import best_first  # noqa: E402
from hf_target import HFTarget  # noqa: E402
from optimizers import muon  # noqa: E402

TARGET = model_catalog.path("tiny-gqa") / "target"


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return HFTarget(TARGET, "cpu")


@pytest.fixture(scope="module")
def model(target):
    return target.model()


def new_drafter(target: HFTarget) -> drafting.Drafter:
    torch.manual_seed(0)
    config = drafting.draft_config(
        target.config,
        mask=target.mask_token(None),
        feature_layers=(0, 1, 2),
        block=4,
        layers=1,
        intermediate=32,
    )
    return drafting.Drafter(config)


def test_a_block_sees_what_stands_before_its_anchor_and_nothing_after(target, model):
    drafter, table = new_drafter(target), model.get_input_embeddings().weight
    ids = torch.randint(8, 700, (2, 20))
    anchors = torch.tensor([[5, 9], [3, 12]])
    context = targets.features(model, ids)
    before = drafter(context, ids, anchors, table)
    changed, features = ids.clone(), context.clone()
    changed[0, 6:], features[0, 5:] = 9, 0.0  # behind the first anchor of the first sequence
    after = drafter(features, changed, anchors, table)
    assert torch.allclose(before[0, 0], after[0, 0], atol=1e-6)
    assert not torch.allclose(before[0, 1], after[0, 1], atol=1e-3)
    assert torch.allclose(before[1], after[1], atol=1e-6)
    # Sequences and blocks side by side give what each gives alone.
    alone = drafter(context[1:], ids[1:], anchors[1:, 1:], table)
    assert torch.allclose(alone[0, 0], before[1, 1], atol=1e-5)


def test_blocks_in_parts_are_what_they_are_under_one_mask(target, model, monkeypatch):
    drafter, table = new_drafter(target), model.get_input_embeddings().weight
    ids, anchors = torch.randint(8, 700, (2, 20)), torch.randint(2, 16, (2, 6))
    context, found = targets.features(model, ids), []
    for most in (6, 2, 4):  # one part, three, and one again as 4 does not divide 6
        monkeypatch.setattr(drafting, "SIDE_BY_SIDE", most)
        found.append(drafter(context, ids, anchors, table))
    assert torch.allclose(found[0], found[1], atol=1e-5)
    assert torch.equal(found[0], found[2])


def test_the_committed_drafter_is_as_good_here_as_on_a_server(target, model):
    folder = model_catalog.path("tiny-gqa") / "draft"
    drafter = drafting.Drafter(json.loads((folder / "config.json").read_text()))
    drafter.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    prompt = target.tokenizer("def close(self):\n    '''")["input_ids"]
    ids = targets.greedy(model, torch.tensor([prompt]), 112)[0].tolist()
    text = acceptance.Text("code", ids, len(prompt), len(prompt) + 96)
    found = acceptance.evaluate(model, drafter.eval(), [text], (0, 1, 2), "cpu")["accept_length"]["all"]
    assert found["chain"] == pytest.approx(1.711, abs=0.1)
    assert found["tree_32"] == pytest.approx(2.3, abs=0.1)


def test_positions_past_a_text_and_tokens_of_padding_count_nothing(target, model):
    drafter = new_drafter(target)
    ids, anchors = torch.randint(8, 700, (1, 12)), torch.tensor([[9]])
    context = targets.features(model, ids)
    loss = drafting.draft_loss(drafter, model, context, ids, anchors, torch.tensor([12]))
    longer = torch.cat([ids, torch.full((1, 5), 3)], dim=1)
    padded = drafting.draft_loss(
        drafter, model, targets.features(model, longer), longer, anchors, torch.tensor([12])
    )
    assert torch.allclose(loss, padded, atol=1e-5)
    counted = drafting.draft_loss(drafter, model, targets.features(model, longer), longer, anchors)
    assert abs(counted - padded) > 1e-3


def test_padded_prompts_are_continued_as_each_would_be_alone(target, model):
    prompts = [
        target.tokenizer(text)["input_ids"] for text in ("def close(self):\n", "class Queue:\n    '''A")
    ]
    assert len(prompts[0]) != len(prompts[1])
    together = answers.continue_batch(model, prompts, [0.0, 0.0], 24, target.end_ids, "cpu")
    for prompt, found in zip(prompts, together, strict=True):
        alone = targets.greedy(model, torch.tensor([prompt]), 24)[0, len(prompt) :].tolist()
        assert found == answers.cut(alone, target.end_ids)


def test_sampled_rows_follow_the_targets_distribution(target, model):
    torch.manual_seed(0)
    prompt = target.tokenizer("def ")["input_ids"]
    rows = answers.continue_batch(model, [prompt] * 4000, [1.0] * 4000, 1, target.end_ids, "cpu")
    expected = model(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)
    found = torch.bincount(torch.tensor(rows)[:, 0], minlength=len(expected)) / 4000
    assert (found - expected).abs().max() < 5 * math.sqrt(0.25 / 4000)
    assert expected.max() < 0.9


class CountedServer:
    """Stands for a server: knows how many calls it has at once, and whether it runs."""

    is_broken = False
    all: ClassVar[list["CountedServer"]] = []

    def __init__(self, flags, environment, grace):
        self.flags, self.ready_seconds = flags, 1.0
        self.is_running, self.calls, self.most, self.lock = False, 0, 0, threading.Lock()
        self.all.append(self)

    def __enter__(self):
        if self.is_broken and len(self.all) == 3 and self is self.all[1]:
            raise RuntimeError("no memory")
        self.is_running = True
        return self

    def __exit__(self, kind, *error):
        self.is_running = False

    def post_json(self, path, payload, timeout):
        assert self.is_running
        with self.lock:
            self.calls += 1
            self.most = max(self.most, self.calls)
        time.sleep(0.05)
        with self.lock:
            self.calls -= 1
        return [{"output_ids": ids[::-1]} for ids in payload["input_ids"]]


def test_servers_share_the_calls_and_end_together(monkeypatch):
    monkeypatch.setattr(answers, "ServerProcess", CountedServer)
    monkeypatch.setattr(CountedServer, "all", [])
    answerer = answers.ServedAnswers(Path("target"), {2}, "cuda", servers=3)
    with answerer as answer, ThreadPoolExecutor(answerer.at_once) as pool:
        futures = [pool.submit(answer, [[index, 1]], [0.0], 4) for index in range(2 * answerer.at_once)]
        assert [future.result() for future in futures] == [[[1, index]] for index in range(len(futures))]
        assert all(server.is_running for server in CountedServer.all)
    assert [server.most for server in CountedServer.all] == [answers.CALLS] * 3
    assert not any(server.is_running for server in CountedServer.all)

    CountedServer.all.clear()
    monkeypatch.setattr(CountedServer, "is_broken", True)
    answerer = answers.ServedAnswers(Path("target"), {2}, "cuda", servers=3)
    with pytest.raises(RuntimeError, match="no memory"):
        answerer.__enter__()
    assert not any(server.is_running for server in CountedServer.all)


def test_batches_hold_every_prompt_once_and_stay_in_bounds():
    prompts = [[i] * (1 + i * 7 % 50) for i in range(200)]
    groups = list(sampled_text.batches(prompts, 10, 300, 16))
    assert sorted(p for group in groups for p in group) == sorted(prompts)
    assert all(len(g) <= 16 and (len(g) == 1 or len(g) * (max(map(len, g)) + 10) <= 300) for g in groups)


def texts_of(sizes: list[int], first: int = 3) -> text_batches.Texts:
    return text_batches.Texts([(first, [8 + size % 600] * size) for size in sizes], "cpu")


def test_anchors_lie_in_the_answers_and_have_a_token_after_them():
    texts = texts_of([5, 9, 30, 31, 200])
    for seed in range(50):
        torch.manual_seed(seed)
        for plan in text_batches.plan_epoch(texts.row_lengths, torch.arange(5), 512, 16, "cpu"):
            batch = texts.gather(plan)
            assert (batch.anchors >= 3).all()
            assert (batch.anchors <= batch.lengths[:, None] - 2).all()
            assert batch.lengths.tolist() == texts.sizes[batch.texts].tolist()
            for row, length in enumerate(batch.lengths.tolist()):
                assert (batch.ids[row, :length] == 8 + length % 600).all()


def test_anchors_come_to_every_place_of_an_answer():
    texts = texts_of([40])
    seen = set()
    for _ in range(200):
        (plan,) = text_batches.plan_epoch(texts.row_lengths, torch.arange(1), 128, 4, "cpu")
        seen |= set(texts.gather(plan).anchors.flatten().tolist())
    assert seen == set(range(3, 39))


def test_an_epoch_holds_every_text_once_in_few_shapes():
    sizes = torch.randint(10, 3000, (500,), generator=torch.Generator().manual_seed(1))
    members, row_lengths = torch.arange(100, 500), [text_batches.row_length(size) for size in sizes.tolist()]
    plans = text_batches.plan_epoch(row_lengths, members, 8192, 64, "cpu")
    found = [index for plan in plans for index in plan.texts.tolist()]
    assert set(found) == set(members.tolist())
    # Only the batch of the longest is filled up.
    assert len(found) - len(members) < len(max(plans, key=lambda plan: plan.length).texts)
    assert all(sizes[plan.texts].max() <= plan.length for plan in plans)
    assert {len(plan.texts) * plan.length for plan in plans} == {8192, 6144}
    assert {len(plan.texts) * plan.blocks for plan in plans} == {64}
    again = text_batches.plan_epoch(row_lengths, members, 8192, 64, "cpu")
    assert [index for plan in again for index in plan.texts.tolist()] != found


def test_kept_features_are_the_targets_and_texts_past_the_room_are_read_anew(target, model, capsys):
    pairs = [(2, torch.randint(8, 700, (size,)).tolist()) for size in (20, 50, 90, 130, 25, 60)]
    texts = text_batches.Texts(pairs, "cpu")
    kept = kept_features.KeptFeatures(model, (0, 2), texts)
    bytes_each = 2 * model.config.hidden_size * 4
    kept.keep(int(texts.ends[3]) * bytes_each + 1, 256)
    assert kept.count == 4
    assert "4 of 6 texts" in capsys.readouterr().out
    draws = text_batches.endless(texts, kept.count, 512, 8)
    kinds = set()
    for _ in range(12):
        plan, is_kept = next(draws)
        assert is_kept == bool((plan.texts < 4).all()) == bool((plan.texts < 4).any())
        batch = texts.gather(plan)
        found, anew = kept.of(batch, is_kept), targets.features(model, batch.ids, (0, 2))
        for row, length in enumerate(batch.lengths.tolist()):
            assert torch.allclose(found[row, :length], anew[row, :length], atol=1e-4)
        kinds.add(is_kept)
    assert kinds == {True, False}


@pytest.mark.parametrize("soft", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_the_loss_of_the_head_is_cross_entropy_and_so_is_its_gradient(rows, soft, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    hidden, said = torch.randn(rows, 12, generator=generator), torch.randn(rows, 12, generator=generator)
    hidden.requires_grad_()
    head = torch.randn(50, 12, generator=generator)
    truth, share = torch.randint(0, 50, (rows,), generator=generator), torch.rand(rows, generator=generator)
    label = (1 - soft) * torch.nn.functional.one_hot(truth, 50) + soft * (said @ head.T).softmax(-1)
    each = torch.nn.functional.cross_entropy(hidden @ head.T, label, reduction="none")
    expected = (each * share).sum()
    (gradient,) = torch.autograd.grad(2 * expected, hidden)
    monkeypatch.setattr(head_loss, "MOST_LOGITS", 50 * 9)  # 9 rows at once
    found = head_loss.head_loss(hidden, head, truth, share, said, soft)
    assert torch.allclose(found, expected, atol=1e-4)
    assert torch.allclose(torch.autograd.grad(2 * found, hidden)[0], gradient, atol=1e-5)


def test_soft_labels_are_the_targets_own_at_each_token_of_the_block(target, model):
    """A drafter whose head input is the target's has no more to learn where the labels are all soft."""
    drafter = new_drafter(target)
    ids, anchors = torch.randint(8, 700, (2, 30)), torch.tensor([[5, 9], [3, 12]])
    found = targets.features(model, ids, (0, 1, 2, model.config.num_hidden_layers - 1))
    width = drafter.fc.in_features
    logits = torch.nn.functional.linear(found[..., width:], model.get_output_embeddings().weight)
    assert torch.allclose(logits, model(input_ids=ids).logits, atol=1e-4)
    places = (anchors[:, :, None] + torch.arange(3)).flatten(1)  # of what the target says about the next
    perfect = found[..., width:].gather(1, places[:, :, None].expand(-1, -1, 128)).view(2, 2, 3, 128)
    perfect = torch.cat([perfect[:, :, :1], perfect], dim=2).requires_grad_()
    drafter.forward = lambda features, ids, anchors, table: perfect

    def pull(soft: float) -> float:
        loss = drafting.draft_loss(
            drafter, model, found[..., :width], ids, anchors, None, found[..., width:], soft
        )
        return torch.autograd.grad(loss, perfect)[0].norm().item()

    assert pull(1.0) < 1e-5 < 1e-2 < pull(0.5) < pull(0.0)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_compiled_pieces_learn_the_same_and_are_compiled_for_few_shapes(target, model, is_mixed, monkeypatch):
    """The graphs that a GPU gets, run by PyTorch's own operators: no compiler is needed here."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    config = drafting.draft_config(
        target.config,
        mask=target.mask_token(None),
        feature_layers=(0, 1, 2),
        block=4,
        layers=3,
        intermediate=32,
    )
    torch.manual_seed(0)
    plain, compiled = drafting.Drafter(config), drafting.Drafter(config)
    compiled.load_state_dict(plain.state_dict())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled.compile_pieces("aot_eager")
    score = torch.compile(head_loss.score_rows, dynamic=False, backend="aot_eager")
    texts = text_batches.Texts(
        [(3, torch.randint(8, 700, (size,)).tolist()) for size in (20, 150, 150, 200, 300)], "cpu"
    )
    shapes = set()
    for index in (0, 1, 3, 4):
        (plan,) = text_batches.plan_epoch(texts.row_lengths, torch.tensor([index]), 512, 8, "cpu")
        batch = texts.gather(plan)
        shapes.add(batch.ids.shape)
        context = targets.features(model, batch.ids, (0, 1, 2)).detach()
        said = targets.features(model, batch.ids, (3,)).detach()
        losses = []
        for drafter, rule in ((plain, head_loss.score_rows), (compiled, score)):
            drafter.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
                loss = drafting.draft_loss(
                    drafter, model, context, batch.ids, batch.anchors, batch.lengths, said, 0.5, rule
                )
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=2e-2 if is_mixed else 1e-5)
        for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
            assert (a.grad - b.grad).norm() <= (5e-2 if is_mixed else 1e-4) * a.grad.norm()
    assert len(shapes) == 4
    # project and finish twice, as the first layer's input needs no gradient; the context's pieces once for
    # each of the two sizes; the end and the loss.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 10
    assert not torch._dynamo.utils.counters["graph_break"]


def test_questions_are_the_different_ones_that_ended(target, monkeypatch):
    end = next(iter(target.end_ids))
    opening = target.opening_ids()
    assert opening
    whole = target.prompt_ids({"kind": "question", "text": "What is a list?"})
    assert whole[: len(opening)] == opening
    monkeypatch.setattr(questions, "STARTS", ("", "Why is"))
    why = target.tokenizer("Why is", add_special_tokens=False)["input_ids"]
    said = [target.tokenizer(text)["input_ids"] for text in (" a list of numbers?", " a file closed?")]
    calls = []

    def answer(prompts, temperatures, new_tokens):
        calls.append(len(prompts))
        assert all(prompt in (opening, opening + why) for prompt in prompts)
        # Of opening and opening + why in turn; the first call begins with the opening, the second does not.
        return [said[0] + [end], said[0] + [end], said[1] + [end], said[1][:-1], [end]][: len(prompts)]

    made = questions.ask(answer, 2, target, 13, 5)
    assert sorted(calls) == [3, 5, 5]
    assert {prompt["text"] for prompt in made} == {
        *("a list of numbers?", "Why is a list of numbers?", "a file closed?", "Why is a file closed?"),
    }
    assert len(made) == 4
    assert {prompt["kind"] for prompt in made} == {"question"}
    assert questions.ask(answer, 2, target, 13, 5, until=time.time()) == []
    assert len(calls) == 3


def test_prompts_together_are_what_each_is_alone(target):
    prompts = [
        {"kind": kind, "text": text}
        for kind, text in (("chat", "What is a list?"), ("text", "def a"), ("code", "Sort a list."))
    ]
    together = target.prompts_ids(prompts)
    assert together == [target.prompt_ids(prompt) for prompt in prompts]
    assert together[1] == target.tokenizer("def a")["input_ids"]
    assert together[0][: len(target.opening_ids())] == target.opening_ids()
    assert target.prompts_ids([]) == []


def test_a_loss_that_is_no_number_ends_the_training_and_is_not_kept(target, model, tmp_path):
    drafter = new_drafter(target)

    def loss_of(step: int, progress: float) -> torch.Tensor:
        return sum(p.sum() for p in drafter.parameters()) * (math.nan if step >= 17 else 1.0)

    budget = fitting.Budget(100, 10.0)
    with pytest.raises(SystemExit, match="the loss is nan at step 34"):
        fitting.fit("t", drafter, loss_of, muon(drafter, 0.02, "cpu"), budget, tmp_path / "c.pt", "cpu")
    assert not (tmp_path / "c.pt").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        *(["--device", "tpu"], ["--layers", "0"], ["--block", "1"], ["--longest", "0"]),
        *(["--batch-rows", "0"], ["--minutes", "nan"], ["--target", "nowhere"], ["--prompts", "few"]),
        *(["--eval-prompts", "nowhere.json"], ["--out", __file__], ["--soft", "1.5"]),
    ],
)
def test_what_no_run_can_be_asked_is_one_line(wrong, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["t", "--target", str(TARGET), "--out", "x", *wrong])
    with pytest.raises(SystemExit) as raised:
        drafter_arguments.parse()
    assert raised.value.code == 2
    assert wrong[0] in capsys.readouterr().err.splitlines()[-1]


def test_a_run_is_not_taken_up_with_other_settings(tmp_path):
    path, settings = tmp_path / "settings.json", {"block": 16, "features": [1, 2]}
    drafter_arguments.hold_to_settings(path, settings)
    drafter_arguments.hold_to_settings(path, dict(settings))
    with pytest.raises(SystemExit, match="begun with another block: 16 there, 8 now"):
        drafter_arguments.hold_to_settings(path, {**settings, "block": 8})


def test_own_text_goes_on_where_it_ended(target, model, tmp_path, monkeypatch):
    groups = [[target.tokenizer(text)["input_ids"]] for text in ("def a", "def b", "def c")]

    def write(until: float) -> None:
        began = time.time()
        with answers.PlainAnswers(lambda: model, target.end_ids, "cpu") as answer:
            sampled_text.write_own_text(answer, 1, groups, tmp_path, 16, minutes=5, until=until, began=began)

    with pytest.raises(fitting.Unfinished, match="0 of 3"):
        write(until=0)
    now = time.time()
    clock = iter([now, now])  # and from then on a minute later
    with monkeypatch.context() as patched:
        patched.setattr(sampled_text.time, "time", lambda: next(clock, now + 60))
        with pytest.raises(fitting.Unfinished, match="1 of 3"):
            write(until=now + 30)
    write(until=time.time() + 60)
    pieces = {path: path.stat().st_mtime_ns for path in tmp_path.glob("piece-*.pt")}
    assert len(pieces) == 3
    write(until=0)  # finished: nothing is asked again
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in pieces.items())
    assert all(
        ids[:first] in [p for g in groups for p in g] for first, ids in sampled_text.read_own_text(tmp_path)
    )


def test_training_lowers_the_loss_and_goes_on_from_its_checkpoint(target, model, tmp_path):
    drafter, ids = new_drafter(target), torch.randint(8, 60, (4, 24))
    context, anchors = targets.features(model, ids), torch.arange(2, 18).expand(4, -1)

    def loss_of(step: int, progress: float) -> torch.Tensor:
        return drafting.draft_loss(drafter, model, context, ids, anchors)

    def run(steps: int, until: float = math.inf):
        budget = fitting.Budget(steps, 10.0, warmup=5)
        return fitting.fit(
            "t", drafter, loss_of, muon(drafter, 0.02, "cpu"), budget, tmp_path / "c.pt", "cpu", until
        )

    first = loss_of(0, 0.0).item()
    with pytest.raises(fitting.Unfinished):
        run(102, until=0)
    outcome = run(102)
    assert outcome.steps == 102
    assert outcome.loss < 0.5 * first


def test_a_training_ends_as_it_was_when_it_was_best(target, model, tmp_path, monkeypatch, capsys):
    """And that is known to a run which takes it up."""
    drafter = new_drafter(target)
    marks, losses = [], iter([3.0, 1.0, 2.0, 2.0, 2.0])

    def loss_of(step: int, progress: float) -> torch.Tensor:
        return sum(p.square().sum() for p in drafter.parameters())

    def judge() -> dict[str, float]:
        marks.append({name: t.clone() for name, t in drafter.state_dict().items()})
        return {"loss": next(losses), "accept": len(marks)}

    def run(until: float):
        budget, checkpoint = fitting.Budget(85, 10.0, warmup=5), tmp_path / "c.pt"
        return fitting.fit(
            "t", drafter, loss_of, muon(drafter, 0.02, "cpu"), budget, checkpoint, "cpu", until, judge=judge
        )

    monkeypatch.setattr(fitting, "SAVE_SECONDS", -1)  # at every look
    began = time.time()
    times = iter([began] * 3)  # over at the third look
    with monkeypatch.context() as patched:
        patched.setattr(fitting.time, "time", lambda: next(times, began + 9))
        with pytest.raises(fitting.Unfinished):
            run(began + 5)
    outcome = run(math.inf)
    assert outcome.judged == {"loss": 1.0, "accept": 2}
    assert len(marks) == 4  # not when time was over
    assert all(torch.equal(t, marks[1][name]) for name, t in drafter.state_dict().items())
    assert not torch.equal(marks[1]["fc.weight"], marks[-1]["fc.weight"])
    assert capsys.readouterr().out.count("(the best)") == 2


def test_what_is_held_back_is_never_learnt_and_judged_as_a_server_would(target, model):
    texts = [(3, torch.randint(8, 600, (size,)).tolist()) for size in range(30, 130)]
    learned, held = validation.split(texts, most=8)
    assert len(held) == 2
    assert sorted(map(str, learned + held)) == sorted(map(str, texts))
    assert validation.split(texts, most=8) == (learned, held)
    folder = model_catalog.path("tiny-gqa") / "draft"
    drafter = drafting.Drafter(json.loads((folder / "config.json").read_text()))
    drafter.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    prompt = target.tokenizer("def close(self):\n    '''")["input_ids"]
    ids = targets.greedy(model, torch.tensor([prompt]), 112)[0].tolist()
    before = torch.get_rng_state()
    judge = validation.Validation(drafter, model, (0, 1, 2), [(len(prompt), ids)], 128, 400, "cpu")
    assert torch.equal(before, torch.get_rng_state())
    found = judge()
    assert found == judge()
    # The mean of what acceptance.py finds at the same anchors.
    text = acceptance.Text("code", ids, len(prompt), len(ids) - 1)
    _, tokens = acceptance.draft_everywhere(model, drafter, text, (0, 1, 2), 1, "cpu")
    truth = acceptance.truth_after(text, tokens.shape[1], "cpu")
    accepted = acceptance.chain_accepted(tokens, truth)
    (batch,) = judge._batches
    at = (batch.anchors[0] - len(prompt)).tolist()
    assert len(set(at)) > len(accepted) // 2
    assert found["accept"] == pytest.approx(sum(accepted[i] for i in at) / len(at), abs=1e-3)
    right = (tokens[:, 0, 0] == truth[:, 1]).tolist()
    assert found["first"] == pytest.approx(sum(right[i] for i in at) / len(at), abs=1e-3)
    loss = drafting.draft_loss(
        drafter, model, targets.features(model, batch.ids), batch.ids, batch.anchors, batch.lengths
    )
    assert found["loss"] == pytest.approx(loss.item(), abs=1e-3)


def test_steps_lower_the_loss_and_leave_no_hidden_states_behind(target, model, tmp_path, capsys):
    torch.manual_seed(0)
    drafter = new_drafter(target)
    texts = [(2, torch.randint(8, 40, (size,)).tolist()) for size in (20, 40, 90, 200)]
    steps = draft_steps.DraftSteps(drafter, model, (0, 1, 2), texts, 512, 16, 0.5, "cpu")
    first, alive = steps(0, 0.0).item(), weakref.ref(steps)
    optimizers, budget = muon(drafter, 0.02, "cpu"), fitting.Budget(51, 10.0, warmup=5)
    outcome = fitting.fit("t", drafter, steps, optimizers, budget, tmp_path / "c.pt", "cpu", drafted=48)
    assert outcome.loss < 0.9 * first
    said = capsys.readouterr().out
    assert "4 of 4 texts are kept" in said
    assert "drafted tokens/s" in said
    del steps
    assert alive() is None  # at once, without a garbage collection


def test_accept_lengths_are_those_of_the_papers_trees():
    generator = torch.Generator().manual_seed(0)
    anchors, depths, candidates, width = 40, 5, 4, 9
    log_probs = torch.randn(anchors, depths, candidates, generator=generator).log_softmax(-1)
    log_probs = log_probs.sort(dim=-1, descending=True).values
    tokens = torch.stack(
        [torch.randperm(6, generator=generator)[:candidates] for _ in range(anchors * depths)]
    )
    tokens = tokens.view(anchors, depths, candidates)
    truth = torch.randint(0, 6, (anchors, depths + 1), generator=generator)
    truth[0, 3:] = acceptance.NO_TOKEN
    found = acceptance.accepted(log_probs, tokens, truth, width)
    for row in range(anchors):
        paths = [node.ranks for node in best_first(log_probs[row].numpy(), tokens[row].numpy(), width)]
        spoken = {tuple(int(tokens[row, d, r]) for d, r in enumerate(path)) for path in paths}
        text = tuple(truth[row, 1:].tolist())
        assert found[row] == max((d for d in range(depths + 1) if d == 0 or text[:d] in spoken), default=0)
    assert sum(found) > 0
    chain = acceptance.chain_accepted(tokens, truth)
    assert all(a <= b for a, b in zip(chain, acceptance.accepted(log_probs, tokens, truth, 200), strict=True))


def test_rounds_jump_over_what_they_accepted_and_the_bonus_token():
    assert list(acceptance.rounds([2, 9, 9, 0, 1, 9, 0])) == [2, 0, 1, 0]


def test_prompts_are_many_different_and_none_is_judged_by():
    documents = ["A line of text.\n" * 50, "Another page.\n" * 80]
    made = prompting.make_prompts(3000, documents=documents)
    assert made == prompting.make_prompts(3000, documents=documents)
    assert {prompt["kind"] for prompt in made} == set(prompting.SHARES)
    assert len({prompt["text"] for prompt in made}) == len(made) >= 2500
    assert not [prompt for prompt in made if "{" in prompt["text"] or "  " in prompt["text"]]
    files = sorted((REPOSITORY / "launch" / "bench").glob("prompts*.json"))
    judged = {prompt["text"] for file in files for prompt in json.loads(file.read_text())}
    assert len(judged) == 68
    assert not judged & {prompt["text"] for prompt in made}


def test_the_mask_token_has_no_other_role_and_the_last_layer_feeds_nobody(target):
    assert target.mask_token(None) == ("<|mask|>", 3)
    with pytest.raises(SystemExit, match="--mask-token"):
        target.mask_token("no such token")
    assert target.feature_layers(5) == (0, 1, 2)
    with pytest.raises(ValueError, match="last layer"):
        drafting.draft_config(
            target.config, mask=("x", 1), feature_layers=(3,), block=4, layers=1, intermediate=8
        )


def test_a_loss_that_is_no_number_is_not_the_best_for_long(capsys):
    model = torch.nn.Linear(1, 1)
    best = None
    for loss in (math.nan, 1.0, math.nan, 2.0):
        best = fitting.better_of(best, {"loss": loss}, model, "train")
    assert best["judged"] == {"loss": 1.0}


def test_who_stops_while_servers_answer_does_not_wait_for_them():
    ended = threading.Event()
    started = time.monotonic()
    with answers.callers(1) as pool:
        pool.submit(ended.wait, 60)
        waiting = pool.submit(ended.wait, 60)
    assert waiting.cancelled()
    assert time.monotonic() - started < 30
    ended.set()


@pytest.mark.parametrize(("own", "left"), [(0, 20), (5, 15), (8, 12), (9, 12), (60, 12)])
def test_training_has_its_share_of_the_minutes_however_long_own_text_took(own, left):
    assert train_drafter.training_minutes(20, own) == pytest.approx(left)
