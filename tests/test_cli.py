"""The command line as a user meets it."""

import subprocess

import pytest

from bundle import __version__
from bundle.cli import VERB_SUMMARIES
from tests.command import run_bundle


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return run_bundle(*args, timeout=60)


def test_help_names_the_program():
    result = run("--help")
    assert result.returncode == 0
    assert "Megatron-Core" in result.stdout


def test_the_version_is_the_package_s():
    assert run("--version").stdout == f"mcore-bundle {__version__}\n"


def test_no_verb_is_a_usage_error_that_lists_them():
    result = run()
    assert result.returncode == 2
    assert result.stderr == run("--help").stdout


def test_unknown_verb_is_a_usage_error_that_names_those_there_are():
    result = run("nonsense")
    assert result.returncode == 2
    assert "no command 'nonsense'" in result.stderr
    assert all(f"- {verb}: " in result.stderr for verb in VERB_SUMMARIES)


def test_a_verb_s_help_names_the_whole_command():
    result = run("patches", "plan", "--help")
    assert result.returncode == 0
    assert result.stdout.split()[1:4] == ["mcore-bundle", "patches", "plan"]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("mcore-bundle re", ["recipes", "report", "resolve"]),
        ("mcore-bundle recipes sc", ["schema"]),
        ("mcore-bundle plan --mc", ["--mcore"]),
    ],
)
def test_a_shell_completes_verbs_and_options(words, offered):
    asked = {
        "_MCORE_BUNDLE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    ran = run_bundle(program=("-c", "from bundle.cli import main; main()"), environment=asked)
    assert ran.stdout.split() == offered, ran.stderr


def test_a_verb_is_listed_as_its_own_help_says():
    listed = run("--help").stdout
    for verb, what in VERB_SUMMARIES.items():
        assert f"  {verb} " in listed and what.split()[0] in listed
        assert run(verb, "--help").returncode == 0


def test_only_the_program_itself_offers_to_install_completion():
    assert "--install-completion" in run("--help").stdout
    assert not [verb for verb in VERB_SUMMARIES if "completion" in run(verb, "--help").stdout]


def test_the_help_of_train_names_the_tasks_that_it_trains():
    assert all(task in run("train", "--help").stdout for task in ("pre-training", "SFT", "DPO"))
