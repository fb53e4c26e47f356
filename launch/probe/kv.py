"""KV bytes that a step of a running server reads, from its models' configs where they can be found."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch.doctor.models import ModelConfig, read_config
from sglang_ddtree_patch.launch.kv_bytes import element_bytes, kv_bytes_a_step
from sglang_ddtree_patch.launch.probe.server import ServerFacts

# Their drafter reads its KV once a round; others run several times, or keep none.
ONE_FORWARD_DRAFTERS = ("DFLASH", "DDTREE")


@dataclass
class KvBytes:
    """What is known of a server's models. lacks: what is not, a sentence each."""

    facts: ServerFacts
    target: ModelConfig | None = None
    draft: ModelConfig | None = None
    lacks: list[str] = field(default_factory=list)

    def of_a_step(self, context: int) -> int | None:
        """Bytes that one GPU reads of target and drafter; None without the target's config."""
        if self.target is None:
            return None
        info, gpus = self.facts.info, self.facts.attention_gpus
        read = kv_bytes_a_step(self.target, context, self._element("kv_cache_dtype", self.target), gpus)
        if self.draft is not None:
            window = info.get("speculative_draft_window_size") or context
            kind = "speculative_draft_kv_cache_dtype"
            element = self._element(kind if info.get(kind) else "kv_cache_dtype", self.draft)
            read += kv_bytes_a_step(self.draft, min(context, window), element, gpus)
        return read

    def _element(self, kind: str, model: ModelConfig) -> int:
        info = self.facts.info
        flags = {"--kv-cache-dtype": info.get(kind) or "auto", "--dtype": info.get("dtype") or "auto"}
        return element_bytes(model, flags)


def find_models(facts: ServerFacts, model: str | None, draft: str | None) -> KvBytes:
    """Configs where the server says they are, or where the command line does.

    Raises:
        ConfigurationError: one that was named on the command line cannot be read.
    """
    kv = KvBytes(facts)
    kv.target = _find(kv, "--model", model, model or facts.info["model_path"])
    reads_once = facts.algorithm in ONE_FORWARD_DRAFTERS
    drafter = draft or (facts.info.get("speculative_draft_model_path") if reads_once else None)
    if drafter:
        kv.draft = _find(kv, "--draft", draft, drafter)
    elif facts.algorithm is not None:
        kv.lacks.append(f"KV of the drafter: how often {facts.algorithm} reads it is not known here")
    try:
        kv.of_a_step(1)
    except ConfigurationError as error:
        kv.target = None
        kv.lacks.append(f"KV bytes: {error}")
    return kv


def _find(kv: KvBytes, option: str, given: str | None, path: str) -> ModelConfig | None:
    try:
        return read_config(path)
    except ConfigurationError:
        if given:
            raise
        what = "KV bytes" if option == "--model" else "KV of the drafter"
        kv.lacks.append(f"{what}: {path} has no config here, name one with {option}")
        return None
