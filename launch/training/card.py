"""The model card of a trained drafter, from the numbers that its run measured."""

from __future__ import annotations


def model_card(target: str, config: dict, report: dict) -> str:
    """Markdown. `report` is the run's report.json with `own_text`, `train`, `packed_bytes`, `evaluation`."""
    own, train, judged = report["own_text"], report["train"], report["evaluation"]
    packed, unpacked = judged["packed"], judged["unpacked"]
    layers = ", ".join(map(str, config["dflash_config"]["target_layer_ids"]))
    lines = [
        f"# DFlash drafter for {target}",
        "",
        f"{train['parameters']:,} parameters: {config['num_hidden_layers']} layers, hidden "
        f"{config['hidden_size']}, MLP {config['intermediate_size']}, block {config['block_size']}; sees the "
        f"target's layers {layers}. Stored as int8 rows with scales, {report['packed_bytes'] / 1e6:.1f} MB; "
        "served in bf16.",
        "",
        f"**Data.** {own['answers']:,} answers of the target itself, {own['tokens']:,} tokens, all greedy, "
        "to questions that it made up and to prompts made by "
        "`launch/training/prompts.py` (chat, code, arithmetic, summaries, free text of a Python "
        "installation).",
        "",
        f"**Training.** {train['steps']:,} steps in {train['minutes']} minutes on {train['device']}, loss at "
        f"the end {train['loss']} (cross entropy, weighted by position, with labels partly the target's "
        f"distribution), {train['judged']['loss']} against the text alone where it was not learnt, "
        f"{own['seconds'] / 60:.1f} minutes for the answers.",
        "",
        f"**Accept length**, drafted tokens a round without the bonus token: {packed['prompts']} held-out "
        f"prompts, {judged['new_tokens']} greedy tokens each, {packed['top_k']} candidates a position, "
        f"{judged['dtype']}.",
        "",
        *table(packed["accept_length"]),
        "",
        "The same before the weights were rounded to int8:",
        "",
        *table({"all": unpacked["accept_length"]["all"]}),
        "",
    ]
    return "\n".join(lines)


def table(by_kind: dict[str, dict[str, float]]) -> list[str]:
    names = list(next(iter(by_kind.values())))
    head = ["prompts", *(name.replace("_", " ") for name in names)]
    rows = [[kind, *(f"{by[name]:.2f}" for name in names)] for kind, by in by_kind.items()]
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
