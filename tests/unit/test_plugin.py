"""plugin.py and errors.py: loading twice, loading beside an SGLang that does not match, one-line errors."""

import subprocess
import sys

import pytest

from sglang_ddtree_patch.errors import ConfigurationError

# Notes what the plugin registers, without importing what it registers it with.
RECORD = """
import sys, types
from sglang_ddtree_patch import plugin
calls = []
plugin._register = lambda: calls.append("register")
plugin._register_refusal = lambda report: calls.append("refusal")
"""
MISMATCH = """
from sglang_ddtree_patch.contract import CONTRACT
from sglang_ddtree_patch.contract_check import ContractReport, Mismatch
report = ContractReport("9.9.9", (Mismatch(CONTRACT[0], "nothing of that name"),))
plugin.check_installed_sglang = lambda: report
"""
MATCH = """
from sglang_ddtree_patch.contract_check import ContractReport
plugin.check_installed_sglang = lambda: ContractReport("0.5.23", ())
"""


def run(code: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_loading_twice_registers_once():
    result = run(f"{RECORD}{MATCH}\nplugin.load(); plugin.load(); print(calls)")
    assert result.stdout.strip() == "['register']", result.stderr


def test_an_sglang_that_does_not_match_gets_the_refusal_alone_and_is_told_why():
    result = run(f"{RECORD}{MISMATCH}\nplugin.load(); print(calls, 'sglang' in sys.modules)")
    assert result.stdout.strip() == "['refusal'] False", result.stderr
    assert "SGLang 9.9.9 does not match" in result.stderr


def test_importing_the_plugin_imports_neither_sglang_nor_torch():
    result = run("import sys, sglang_ddtree_patch.plugin; print({'sglang', 'torch'} & set(sys.modules))")
    assert result.stdout.strip() == "set()", result.stderr


HOOK = """
import sys
from sglang_ddtree_patch.errors import ConfigurationError, report_configuration_errors_in_one_line
report_configuration_errors_in_one_line(); report_configuration_errors_in_one_line()
"""


def test_a_configuration_error_ends_in_one_line_and_exit_code_one():
    result = run(f"{HOOK}\nraise ConfigurationError('--page-size 3 is not possible: type --page-size 4')")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == (
        "sglang-ddtree-patch: error: --page-size 3 is not possible: type --page-size 4\n"
    )


@pytest.mark.parametrize("error", ["ValueError('x')", "KeyError('x')", "RuntimeError('x')"])
def test_other_errors_keep_their_traceback(error):
    with_hook, without = run(f"{HOOK}\nraise {error}"), run(f"raise {error}")
    assert (with_hook.returncode, without.returncode) == (1, 1)
    assert "Traceback" in with_hook.stderr
    assert with_hook.stderr.splitlines()[-1] == without.stderr.splitlines()[-1]


def test_a_hook_that_was_there_before_still_sees_other_errors():
    before = "import sys\nsys.excepthook = lambda *error: print('earlier hook', error[0].__name__)"
    assert run(f"{before}{HOOK}\nraise KeyError('x')").stdout.strip() == "earlier hook KeyError"
    assert run(f"{before}{HOOK}\nraise ConfigurationError('x')").stdout == ""


def test_a_configuration_error_is_a_value_error_for_those_who_catch_one():
    assert issubclass(ConfigurationError, ValueError)
