"""The contract: it holds on the installed SGLang, it is complete, and a changed SGLang is caught in words."""

import ast
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang_wheels import unpack

from sglang_ddtree_patch.contract import CONTRACT, SUPPORTED_VERSION, Attribute, Use
from sglang_ddtree_patch.contract_check import (
    Module,
    check,
    check_installed_sglang,
    check_releases,
    installed_release,
    parameter_names,
)
from sglang_ddtree_patch.releases import NEWEST, RELEASES, SUPPORTED_VERSIONS, Release

REPOSITORY = Path(__file__).resolve().parents[2]
SGLANG = Path(next(iter(find_spec("sglang").submodule_search_locations)))
PACKAGE = sorted((REPOSITORY / "sglang_ddtree_patch").glob("**/*.py"))
KERNELS = sorted((REPOSITORY / "kernels").glob("**/*.py"))

# Our class for each SGLang class the table says we override.
SUBCLASSES = {
    "speculative.spec_registry.CustomSpecAlgo": ("algorithm.py", "DDTreeAlgorithm"),
    "speculative.spec_info.SpeculativeAlgorithm": ("algorithm.py", "DDTreeAlgorithm"),
    "speculative.dflash_worker_v2.DFlashWorkerV2": ("round/worker.py", "DDTreeWorker"),
    "speculative.dflash_info_v2.DFlashDraftInputV2": ("round/verify_input.py", "DDTreeDraftInput"),
    "managers.utils.GenerationBatchResult": ("round/result.py", "RoundResult"),
    "layers.sampler.Sampler": ("sampling/seeded_sampler.py", "SeededSampler"),
    "layers.attention.base_attn_backend.AttentionBackend": ("attention/backend.py", "DDTreeVerifyBackend"),
    "platforms.interface.SRTPlatform": ("cpu/platform.py", "DDTreeCpuPlatform"),
    "platforms.device_mixin.DeviceMixin": ("cpu/platform.py", "DDTreeCpuPlatform"),
    "mem_cache.memory_pool.MHATokenToKVPool": ("cpu/kv_pool.py", "CpuMHATokenToKVPool"),
}
PASSES_EVERYTHING_ON = ("*args", "**kwargs")


def entry(path: str) -> Attribute:
    (found,) = [attribute for attribute in CONTRACT if attribute.path == f"sglang.srt.{path}"]
    return found


def release_with(*entries: Attribute) -> Release:
    """The newest release, held to these entries alone."""
    return replace(NEWEST, contract=entries)


def belongs_to(attribute: Attribute, owners: list[str]) -> bool:
    return attribute.path.removeprefix("sglang.srt.").rpartition(".")[0] in owners


def our_class(owner: str) -> ast.ClassDef:
    file, name = SUBCLASSES[owner]
    tree = ast.parse((REPOSITORY / "sglang_ddtree_patch" / file).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def imported_names(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of everything a file takes from SGLang; a whole module has the name ""."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "sglang":
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "sglang")


def test_the_contract_holds_on_the_installed_sglang():
    check_installed_sglang.cache_clear()
    started = time.process_time()
    report = check_installed_sglang()
    assert [str(mismatch) for mismatch in report.mismatches] == []
    assert report.version == report.release.version == version("sglang")
    assert time.process_time() - started < 5


def test_the_table_names_an_attribute_once():
    paths = [attribute.path for attribute in CONTRACT]
    assert sorted(paths) == sorted(set(paths))


@pytest.mark.parametrize("path", [a.path for a in CONTRACT if a.use is Use.OVERRIDE])
def test_an_override_has_the_parameters_of_the_table(path):
    attribute = entry(path.removeprefix("sglang.srt."))
    owner, _, name = path.removeprefix("sglang.srt.").rpartition(".")
    body = {}
    for node in our_class(owner).body:
        if isinstance(node, ast.FunctionDef):
            body[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            body[node.target.id] = node
        elif isinstance(node, ast.Assign):
            body |= {target.id: node for target in node.targets}
    assert name in body, f"{path} is not overridden"
    if attribute.parameters is None:
        return
    ours = parameter_names(body[name])
    # More of our own may stand between the engine's and its **kwargs (the backend's rotary parts).
    named = [parameter for parameter in attribute.parameters if not parameter.startswith("*")]
    if ours != PASSES_EVERYTHING_ON:
        assert list(ours[: len(named)]) == named
        extra = [p for p in ours[len(named) :] if not p.startswith("*")]
        assert not extra or "**kwargs" in attribute.parameters, extra
        defaults = len(body[name].args.defaults)
        assert defaults >= len(extra), "a parameter of our own needs a default"
        assert ("**kwargs" in ours) == ("**kwargs" in attribute.parameters)


@pytest.mark.parametrize("owner", SUBCLASSES)
def test_every_method_that_hides_an_engine_method_stands_in_the_table(owner):
    """A method we override without knowing would change with the engine unseen."""
    module, _, name = owner.rpartition(".")
    engine = Module.read(SGLANG, f"sglang.srt.{module}").names[name]
    theirs = {node.name for node in ast.walk(engine) if isinstance(node, ast.FunctionDef)}
    ours = {node.name for node in our_class(owner).body if isinstance(node, ast.FunctionDef)}
    # Two engine classes may stand behind one of ours.
    owners = [other for other, ours_too in SUBCLASSES.items() if ours_too == SUBCLASSES[owner]]
    table = {a.name.rpartition(".")[2] for a in CONTRACT if belongs_to(a, owners)}
    assert (ours & theirs) - table - {"__init__", "__getattr__"} == set()


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: path.name)
def test_every_name_taken_from_sglang_stands_in_the_table(path):
    table = {attribute.path for attribute in CONTRACT}
    for module, name in imported_names(path):
        full = f"{module}.{name}"
        assert any(known == full or known.startswith(f"{full}.") for known in table), full


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: path.name)
def test_every_function_hooked_by_name_stands_in_the_table(path):
    if path.name in ("contract.py", "releases.py"):
        return
    hooked = {attribute.path for attribute in CONTRACT if attribute.use is Use.HOOK}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and re.fullmatch(r"sglang\.srt(\.\w+)+", str(node.value)):
            assert node.value in hooked


@pytest.mark.parametrize("file", ["arguments.py", "algorithm.py", "plugin.py"])
def test_every_server_argument_read_stands_in_the_table(file):
    known = set(entry("arg_groups.field_order.POSITIONAL_FIELD_ORDER").members)
    source = (REPOSITORY / "sglang_ddtree_patch" / file).read_text()
    assert set(re.findall(r"\bcfg\.(\w+)", source)) - known == set()
    declared = re.findall(r'^ +"(\w+)": .*,$', source, re.MULTILINE)
    assert set(declared) - known == set()


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_kernels_import_no_sglang(path):
    assert list(imported_names(path)) == []


# A changed SGLang.

CHANGES = {
    "a renamed parameter": (
        "speculative.dflash_info.DFlashVerifyInput.prepare_for_verify",
        "speculative/dflash_info.py",
        r"(def prepare_for_verify\(\s*self,\s*)batch\b",
        r"\1schedule_batch",
        "found (schedule_batch, ",
    ),
    "a parameter more": (
        "lora.layers.unwrap_lora_layer",
        "lora/layers.py",
        r"def unwrap_lora_layer\(",
        "def unwrap_lora_layer(depth, ",
        "found (depth, module)",
    ),
    "a deleted function": (
        "models.dflash.candidate_topk", "models/dflash.py", r"def candidate_topk\(", "def topk(",
        "found nothing of that name",
    ),
    "a function that became a constant": (
        "runtime_context.get_spec", "runtime_context.py", r"\ndef get_spec\(\)", "\nget_spec = 1\ndef x()",
        "found something that is not a function",
    ),
    "a dropped member": (
        "arg_groups.resolution_hooks._OVERRIDABLE_HOOKS",
        "arg_groups/resolution_hooks.py",
        r'"handle_speculative_decoding",',
        "",
        "found no handle_speculative_decoding",
    ),
    "a lost enum value": (
        "speculative.spec_tp_sync.SpecTpSyncSite.DFLASH_ACCEPT_GREEDY",
        "speculative/spec_tp_sync.py",
        r"DFLASH_ACCEPT_GREEDY",
        "DFLASH_ACCEPT",
        "found nothing of that name",
    ),
    "an attribute no longer set in __init__": (
        "speculative.dflash_worker_v2.DFlashWorkerV2._mask_token_id",
        "speculative/dflash_worker_v2.py",
        r"_mask_token_id",
        "_mask_id",
        "found nothing of that name",
    ),
}


@pytest.mark.parametrize(("path", "file", "old", "new", "found"), CHANGES.values(), ids=CHANGES)
def test_a_changed_sglang_is_refused_with_attribute_version_and_fix(path, file, old, new, found, tmp_path):
    target = tmp_path / "srt" / file
    target.parent.mkdir(parents=True)
    shutil.copy(SGLANG / "srt" / file, target)
    assert check(tmp_path, "9.9.9", release_with(entry(path))).mismatches == ()
    source = target.read_text()
    changed = re.sub(old, new, source)
    assert changed != source
    target.write_text(changed)
    report = check(tmp_path, "9.9.9", release_with(entry(path)))
    assert len(report.mismatches) == 1
    summary = report.summary()
    assert f"sglang.srt.{path}: expected " in summary
    assert found in summary
    assert "SGLang 9.9.9" in summary
    assert f"pip install sglang=={SUPPORTED_VERSION}" in summary
    assert "\n" not in summary


def test_a_missing_module_is_said_once_for_each_of_its_attributes(tmp_path):
    report = check(tmp_path, "9.9.9")
    assert len(report.mismatches) == len(CONTRACT)
    assert {mismatch.found for mismatch in report.mismatches} == {"no such module"}
    assert f"and {len(CONTRACT) - 3} more" in report.summary()


@pytest.mark.parametrize("data", [b"x = 'caf\xe9'\n", b"x = 1\0\n", b"def\n"])
def test_a_module_that_is_no_python_is_named(data, tmp_path):
    (tmp_path / "module.py").write_bytes(data)
    with pytest.raises(SyntaxError, match=r"module\.py is no Python: "):
        Module.read(tmp_path, "sglang.module")


def test_a_mismatch_among_many_names_only_itself(tmp_path):
    (tmp_path / "srt" / "models").mkdir(parents=True)
    (tmp_path / "srt" / "speculative").symlink_to(SGLANG / "srt" / "speculative")
    source = (SGLANG / "srt" / "models" / "dflash.py").read_text()
    (tmp_path / "srt" / "models" / "dflash.py").write_text(source.replace("def candidate_topk(", "def topk("))
    entries = [a for a in CONTRACT if re.match(r"sglang\.srt\.(models|speculative)\.", a.path)]
    assert len(entries) > 30
    (mismatch,) = check(tmp_path, "9.9.9", release_with(*entries)).mismatches
    assert mismatch.attribute.path == "sglang.srt.models.dflash.candidate_topk"


@pytest.mark.parametrize("spec", [None, ModuleSpec("sglang", None)], ids=["nothing", "a file sglang.py"])
def test_no_sglang_at_all_says_what_to_install(monkeypatch, spec):
    check_installed_sglang.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'sglang-ddtree-patch\[sglang\]'"):
        check_installed_sglang()


# Other releases, as their wheels ship them.


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """The package folders of the two releases before the newest."""
    folder = tmp_path_factory.mktemp("wheels")
    return {version: unpack(version, folder / version, ".py") / "sglang" for version in ("0.5.22", "0.5.21")}


@pytest.mark.parametrize("version", [*SUPPORTED_VERSIONS, "of unknown version"])
def test_every_release_that_ddtree_serves_on_fulfils_its_contract(wheels, version):
    package = wheels.get(version, SGLANG)
    report = check_releases(package, version)
    assert [str(mismatch) for mismatch in report.mismatches] == []
    assert report.release.version == (version if version in SUPPORTED_VERSIONS else NEWEST.version)


def test_a_checkout_that_names_no_version_is_told_by_its_sources(wheels):
    assert check_releases(wheels["0.5.22"], "of unknown version").release.version == "0.5.22"


def test_a_release_is_not_taken_for_another(wheels):
    """Each contract fails on the other release's sources, so the right one was found for what it says."""
    newest, older = RELEASES
    assert check(wheels["0.5.22"], "0.5.22", newest).mismatches
    assert check(SGLANG, SUPPORTED_VERSION, older).mismatches


def test_a_release_before_those_is_refused_by_attribute(wheels):
    report = check_releases(wheels["0.5.21"], "0.5.21")
    missing = {mismatch.attribute.path for mismatch in report.mismatches}
    assert "sglang.srt.mem_cache.kv_loc_plan.KVLocPlan.bind" in missing
    assert len(missing) > 20
    assert f"pip install sglang=={SUPPORTED_VERSION}" in report.summary()


def test_the_release_in_use_is_the_installed_one():
    assert installed_release().version == version("sglang")


# What releases differ in.


def test_an_exchanged_entry_is_one_of_the_newest_contract():
    for release in RELEASES[1:]:
        left_out = {a.path for a in CONTRACT} - {a.path for a in release.contract}
        added = {a.path for a in release.contract} - {a.path for a in CONTRACT}
        assert len(CONTRACT) - len(release.contract) == len(left_out) - len(added)


class Shards:
    """Stands for a logits processor that may leave each rank its part of the vocabulary."""

    def is_deferred_shard(self, logits):
        return logits == "part"

    def finish_deferred_gather(self, logits):
        return "whole"


def test_logits_are_gathered_where_a_release_leaves_that_to_the_worker():
    newest, older = RELEASES
    worker = SimpleNamespace(_target_logits_processor=Shards())
    assert [newest.whole_logits(worker, given) for given in ("part", "all")] == ["whole", "all"]
    assert newest.whole_logits(SimpleNamespace(_target_logits_processor=None), "all") == "all"
    assert older.whole_logits(SimpleNamespace(), "all") == "all"


def test_the_drafters_place_and_block_verification_are_read_where_a_release_has_them():
    newest, older = RELEASES
    assert newest.draft_layout(SimpleNamespace(draft_parallel_layout="place")) == "place"
    assert older.draft_layout(SimpleNamespace(draft_owns_attention=False)) is False
    assert newest.verifies_blocks(SimpleNamespace(speculative_use_block_verification=True))
    assert not older.verifies_blocks(SimpleNamespace())
