"""CONTRIBUTING.md: what it names is there, and each how-to leads where it says, with made-up things."""

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest
import typer
from packaging.version import Version
from typer.testing import CliRunner

from bundle import architectures, cli
from bundle.architectures import families, published_names
from bundle.architectures.architecture import Architecture
from bundle.architectures.config import ConfigKeys
from bundle.architectures.tensors import Tensors
from bundle.cli import launch, options
from bundle.cli.launch import submission
from bundle.cli.request import CURRENT_ENVIRONMENT_RECORD, JobRequest, Machines, expand_options, plan_job
from bundle.environment import doctor
from bundle.environment.doctor import check_packages
from bundle.environment.hardware import detect
from bundle.environment.machine import DetectedValue
from bundle.environment.packages import MegatronCode
from bundle.errors import ExitCode, TargetUnavailable, UsageError
from bundle.launch import job as job_file
from bundle.patches import plan as patch_plan
from bundle.patches.entry import (
    NO_CALLER_ASSUMPTION,
    DefectKind,
    Patch,
    PatchAction,
    Presence,
    build_signature_replacement,
    detect_in_definitions,
)
from bundle.patches.megatron_core import ReviewTable, load_review_table, resolve_core_path_or_version
from bundle.patches.plan import survey_patches
from bundle.patches.scaffold import create_bundle_patch_files
from bundle.planning import build_plan
from bundle.planning.problems import FEATURE_BY_FAMILY, MegatronFeature, find_missing_feature
from bundle.recipe import Recipe
from bundle.targets.options import Restarts
from bundle.targets.states import JobState, ListedJob, Target, find_exit_code, yield_polled_states
from bundle.verification.check import Gap, Observation, Status, build_check, judge
from tests.command import capture_bundle
from tests.environment.machines import recorded
from tests.environment.trees import LITERALS, install_megatron, install_torch, stack_of
from tests.matrix import fetch
from tests.patches.trees import written
from tests.planning.jobs import QWEN2_TIED, job
from tools import models
from tools.patches import page as patches_page
from tools.patches import review

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^\$ (.*?)(?: +#.*)?$", PAGE, re.MULTILINE)
TEXT = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", TEXT, re.MULTILINE))
HOW_TOS = {title: body for title, body in SECTIONS.items() if re.search(r"^1\. ", body, re.MULTILINE)}
PATH = re.compile(
    r"(?:bundle|tests|tools|docs|benchmarks)(?:/[\w-]+)+(?:/|\.\w+)?|(?<![\w/.-])[\w-]+\.(?:toml|json|md)"
)
PLACEHOLDER = re.compile(r"\b[A-Z]+\b|_ID\b|_NAME\b|_VERB\b")
MADE = {"matrix.json"}  # what a run writes
CODE = re.compile(r"`([^`]+)`")


def find_paths(text: str) -> set[str]:
    """Return the paths of the repository in code and links."""
    spans = [*CODE.findall(text), *re.findall(r"\]\(([^)#]+)", text)]
    paths = {path for span in spans for path in PATH.findall(re.sub(r"\.cache/\S*", "", span))}
    return paths - MADE


# The page itself.


def test_there_are_five_how_tos_of_at_most_ten_steps():
    assert len(HOW_TOS) == 5
    for title, body in HOW_TOS.items():
        steps = [int(number) for number in re.findall(r"^(\d+)\. ", body, re.MULTILINE)]
        assert steps == list(range(1, len(steps) + 1)) and 5 <= len(steps) <= 10, title


def test_every_path_on_the_page_is_there():
    paths = find_paths(TEXT)
    assert len(paths) > 50
    for path in paths:
        place = ROOT / path
        if PLACEHOLDER.search(path):  # what somebody adds: its folder, or that of the rooms
            place = ROOT / path.partition("/")[0] if "ROOM" in path else place.parent
        assert place.exists(), path


def test_every_name_that_the_page_places_in_a_file_is_bound_there():
    pairs = re.findall(r"`(\w+)`(?: and `(\w+)`)?\s+in\s+`([\w/]+\.py)`", TEXT)
    assert len(pairs) > 20
    for *names, file in pairs:
        bound = set()
        for node in ast.parse((ROOT / file).read_text()).body:
            targets = [*getattr(node, "targets", []), getattr(node, "target", None)]
            bound |= {getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)}
        assert set(filter(None, names)) <= bound, (names, file)


def test_every_target_of_make_and_every_module_on_the_page_is_there():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?<![\w-])make ([a-z][\w-]*)", " ".join([*CODE.findall(TEXT), *SHOWN])))
    assert len(targets) > 10
    assert targets <= set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    modules = set(re.findall(r"python -m ([\w.]+)", TEXT))
    assert {"tools.patches.review", "tests.matrix.fetch"} <= modules
    assert [name for name in modules if find_spec(name) is None] == []
    variables = set(re.findall(r"`([A-Z_]+)=", TEXT)) - {"FAMILIES_RECORD", "BUNDLE_RELEASES"}
    assert [name for name in variables if not re.search(rf"^{name}\s*\?=", makefile, re.MULTILINE)] == []


def test_every_verb_and_every_anchor_on_the_page_is_there():
    for words in re.findall(r"`mcore-bundle ([a-z]+)(?: ([a-z]+))?", TEXT):
        verb, command = words
        commands = typer.main.get_command(cli._import_verb_module(verb).app)
        assert verb in cli.VERB_SUMMARIES and (not command or command in getattr(commands, "commands", {}))
    for page, anchor in re.findall(r"\]\(([\w/.]*)#([\w-]+)\)", TEXT):
        text = (ROOT / page).read_text() if page else TEXT
        titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_every_mark_that_the_page_names_is_one_of_pytest():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    marks = {mark.partition(":")[0] for mark in settings["markers"]}
    named = set(re.findall(r"mark\s+`(\w+)`", TEXT))
    assert {"world", "processes", "slow", "clusters"} <= named <= marks


# A model family.

PAPER_TENSORS = ("paper.embed_tokens.weight", "paper.layers.0.self_attn.q_proj.bias")
CONFIG = {**QWEN2_TIED, "model_type": "paper"}


def paper(keys: ConfigKeys) -> Architecture:
    """Return what a config of the made-up family describes: Qwen2 with a factor that is refused."""
    keys.add_violation_unless("paper_scale", 1, reason="no factor is computed")
    return Architecture("paper", **families._read_decoder(keys, qkv_bias=True))


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(architectures.FAMILIES, paper.__name__, paper)
    names = published_names.PublishedNames("PaperForCausalLM", decoder_prefix="paper.")
    monkeypatch.setitem(published_names.PUBLISHED_NAMES, paper.__name__, names)
    return paper.__name__


def test_a_family_that_is_not_registered_is_refused():
    with pytest.raises(UsageError) as error:
        architectures.from_config(CONFIG)
    assert "paper" in error.value.violations[0]


def test_a_registered_family_is_read_from_its_config_and_its_tensors_have_the_published_names(
    family: str, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    read = architectures.from_config(architectures.read_config(tmp_path))
    assert read.model_type == family and read.qkv_bias and read.tied_embeddings
    assert (read.num_layers, read.hidden_size) == (CONFIG["num_hidden_layers"], CONFIG["hidden_size"])
    published = {name for tensor in Tensors(read) for name in tensor.published_names}
    assert {*PAPER_TENSORS} <= published
    assert not [name for name in published if not name.startswith("paper.")]


def test_a_registered_family_is_planned_like_any_other(family: str):
    ours, known = (
        build_plan(job(config), backend="cpu", hardware_name="cpu", mcore="0.16.1")
        for config in (CONFIG, QWEN2_TIED)
    )
    assert ours.recipe.architecture.model_type == family
    assert not ours.problems and ours.memory == known.memory


@pytest.mark.parametrize(("key", "value"), [("paper_scale", 2), ("paper_scales", 1)])
def test_what_the_reader_refuses_and_what_it_does_not_read_is_a_violation(family: str, key: str, value: int):
    with pytest.raises(UsageError) as error:
        architectures.from_config(CONFIG | {key: value})
    (violation,) = error.value.violations
    assert violation.startswith(key)


def test_a_family_that_a_release_cannot_compute_is_missing_a_feature_there(family: str, monkeypatch):
    feature = FEATURE_BY_FAMILY["gpt_oss"]
    monkeypatch.setitem(FEATURE_BY_FAMILY, family, MegatronFeature("paper", feature.predicate))
    codes = [MegatronCode(Version(release)) for release in ("0.12.3", "0.19.2")]
    assert [find_missing_feature(family, code) is None for code in codes] == [False, True]


def test_the_page_of_models_asks_for_the_models_of_a_family(family: str, monkeypatch):
    monkeypatch.setattr("tools.models.SUPPORTED_FAMILIES", (*architectures.SUPPORTED_FAMILIES, family))
    with pytest.raises(KeyError, match=family):
        models.markdown()
    monkeypatch.setitem(models.MODELS, family, "Paper-7B")
    rows = [line for line in models.markdown().splitlines() if line.startswith(f"| `{family}`")]
    assert rows and all("Paper-7B" in row for row in rows)


# A patch of megatron-core.

MODULE = "megatron.core.paper"
TARGET = f"{MODULE}:Paper.count"
WRONG, MENDED = "return total - 1", "return total"
SOURCE = "class Paper:\n    def count(self, total):\n        {}\n"


@detect_in_definitions(TARGET)
def _defect(method):
    return Presence.from_matches(
        method.has_pattern("return total - 1"), absent=method.has_pattern("return total")
    )


PATCH = Patch(
    id="paper-count",
    replacements=(build_signature_replacement(TARGET, "paper:mended"),),
    why="one is missing",
    upstream="made up",
    range="<0.17",
    defect=_defect,
    kind=DefectKind.SILENT,
    assumes=NO_CALLER_ASSUMPTION,
)


def build_tree(root: Path, version: str, statement: str) -> Path:
    numbers = LITERALS.format(*version.split("."))
    written(root, {MODULE: SOURCE.format(statement), "megatron.core.package_info": numbers})
    info = root / f"megatron_core-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n")
    return root


@pytest.fixture
def catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up patch alone, as a module of `_MODULES_IN_WRAP_ORDER` would bring it."""
    for module, names in (
        (patch_plan, ("PATCHES", "TRAPS", "SEAMS")),
        (review, ("PATCHES", "SEAMS", "ENTRIES")),
        (patches_page, ("PATCHES", "TRAPS", "SEAMS")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, (PATCH,) if name in ("PATCHES", "ENTRIES") else ())


def decide_about(tree: Path, table: ReviewTable, tmp_path: Path) -> PatchAction:
    core = resolve_core_path_or_version(str(tree), table)
    (decision,) = survey_patches(core, table, stack_of(tmp_path), backend="cpu").decisions
    assert decision.id == PATCH.id
    return decision.action


def test_a_patch_is_drift_until_its_release_is_read_and_is_then_applied(catalogue, tmp_path: Path):
    trees = {
        version: build_tree(tmp_path / version, version, statement)
        for version, statement in (("0.16.1", WRONG), ("0.17.0", MENDED))
    }
    before = review.read({})
    assert decide_about(trees["0.16.1"], before, tmp_path) is PatchAction.DRIFT
    assert decide_about(trees["0.17.0"], before, tmp_path) is PatchAction.SKIP
    new = review.read(trees)
    assert [line for line in review.changes(before, new) if TARGET in line]
    file = tmp_path / "releases.json"
    review.record(review.combined(before, new), file)
    after = review.merged([new], json.loads(file.read_text())["references"].split())
    assert [after.find_presence(PATCH.id, version) for version in trees] == [
        Presence.PRESENT,
        Presence.ABSENT,
    ]
    assert decide_about(trees["0.16.1"], after, tmp_path) is PatchAction.APPLY
    assert decide_about(trees["0.17.0"], after, tmp_path) is PatchAction.SKIP


def test_code_that_is_neither_wrong_nor_mended_is_drift(catalogue, tmp_path: Path):
    tree = build_tree(tmp_path / "tree", "0.16.2", "return count(total)")
    assert decide_about(tree, review.read({}), tmp_path) is PatchAction.DRIFT


def test_a_check_fails_until_the_replacement_mends_the_defect():
    check = build_check("paper:measure", Gap(1e-2))
    without, mended = [Observation(gap=0.5)], [Observation(gap=0.0)]
    assert judge(PATCH.id, check, without, without).status is Status.FAILED
    assert judge(PATCH.id, check, without, mended).status is Status.PROVEN
    assert judge(PATCH.id, check, mended, mended).status is Status.FAILED  # nothing is shown


def test_the_page_of_patches_has_a_section_for_a_patch(catalogue):
    assert f"### {PATCH.id}\n" in patches_page.markdown()
    assert patches_page.fixed_in(PATCH) == "0.17.0"


def test_the_how_to_names_every_file_that_the_steps_of_patches_new_name(tmp_path: Path):
    (tmp_path / "bundle/patches/catalogue").mkdir(parents=True)
    steps = create_bundle_patch_files(PATCH.id, tmp_path)
    files = set(re.findall(r"(?:bundle|tests|docs)/[\w/]+\.(?:py|md)", steps))
    named = {
        path.replace("AREA", "paper_count").replace("ID", "paper_count")
        for path in find_paths(HOW_TOS["Add a patch of megatron-core"])
    }
    assert len(files) == 9
    assert files <= named
    commands = set(re.findall(r"python -m (tools\S+|tests\.matrix\S+)", steps))
    how_to = HOW_TOS["Add a patch of megatron-core"]
    assert commands <= set(re.findall(r"python -m ([\w.]+)", how_to))


# A launch target.


@dataclass(frozen=True)
class PaperOptions:
    """What the made-up scheduler is told."""

    tray: Annotated[str, typer.Option(help="Choose a tray.")] = "upper"
    restarts: Restarts = 0
    python: str = "python3"  # no option: the verb chooses it


class PaperTarget(ModuleType):
    """The module of a scheduler that runs a job in three questions, and ends it with code 6."""

    def __init__(self) -> None:
        super().__init__("paper")
        self.jobs: dict[str, list[str]] = {}
        self.stopped: list[str] = []

    def submit(self, job: job_file.Job, options: PaperOptions) -> str:
        arguments = job_file.build_train_arguments(job, Path("job.json"), restarts=options.restarts)
        name = str(len(self.jobs) + 1)
        self.jobs[name] = [options.tray, *arguments]
        self.answers = [JobState("PENDING", "no tray", None), JobState("RUNNING", "", None)]
        return name

    def query_state(self, name: str) -> JobState:
        if name not in self.jobs:
            raise TargetUnavailable(f"no job {name}")
        return self.answers.pop(0) if self.answers else JobState("FAILED", "code 6", 6)

    def list_jobs(self) -> Iterator[ListedJob]:
        for name in self.jobs:
            yield ListedJob(name, "RUNNING", False, Path("runs/demo"))

    def read_log(self, name: str) -> str:
        return " ".join(self.jobs[name])

    def follow(self, name: str) -> Iterator[str]:
        for state in yield_polled_states(lambda: self.query_state(name), 0):
            yield f"{state.name}\n"

    def wait(self, name: str) -> int:
        return find_exit_code(yield_polled_states(lambda: self.query_state(name), 0))

    def request_stop(self, name: str) -> None:
        self.stopped.append(name)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> PaperTarget:
    made = PaperTarget()
    monkeypatch.setitem(submission.TARGETS_WITH_JOB_ID_PATTERNS, "paper", (made, r"[0-9]+"))

    def print_job(
        recipe: options.Recipe,
        request: JobRequest,
        machines: Machines,
        *,
        paper_options: PaperOptions,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the words, and stop.")] = False,
        detach: submission.Detach = False,
    ) -> None:
        decided = submission.decide_job_with_local_paths(
            recipe, request, machines, CURRENT_ENVIRONMENT_RECORD, checks_paths=not dry_run
        )
        if dry_run:
            print(paper_options.tray, *job_file.build_train_arguments(decided, Path("job.json")))
            return
        submission.print_handle_or_follow_job(f"paper:{made.submit(decided, paper_options)}", detach=detach)

    monkeypatch.setattr(launch.app, "registered_commands", list(launch.app.registered_commands))
    launch.app.command("paper")(expand_options(print_job))
    return made


def run_launch(*words: str) -> tuple[int, str, BaseException | None]:
    done = CliRunner().invoke(launch.app, words)
    return done.exit_code, done.stdout, done.exception


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    return ("paper", "demo", "--backend=cpu", "--mcore=0.16.1", f"--run-directory={tmp_path / 'run'}")


def test_a_target_that_is_not_registered_has_no_handle():
    with pytest.raises(UsageError):
        submission.find_target("paper:1")


def test_a_dry_run_of_a_target_hands_nothing_over(target: PaperTarget, words):
    code, printed, _ = run_launch(*words, "--dry-run", "--tray=lower")
    assert code == 0 and printed.split() == ["lower", "train", "--job=job.json"]
    assert target.jobs == {}


def test_a_job_is_handed_over_with_its_options_and_is_asked_about_by_its_handle(target: PaperTarget, words):
    code, printed, _ = run_launch(*words, "--detach", "--restarts=2")
    assert (code, printed) == (0, "paper:1\n")
    assert target.jobs == {"1": ["upper", "train", "--job=job.json", "--restarts=2"]}
    assert run_launch("status", "paper:1")[1].split() == ["paper:1", "PENDING", "(no", "tray)"]
    assert ["paper:1", "RUNNING", "runs/demo"] in [
        line.split() for line in run_launch("list")[1].splitlines()
    ]
    assert run_launch("logs", "paper:1")[1].split() == target.jobs["1"]
    assert run_launch("stop", "paper:1")[0] == 0 and target.stopped == ["1"]
    assert run_launch("wait", "paper:1")[0] == 6
    code, _, error = run_launch("status", "paper:2")
    assert isinstance(error, TargetUnavailable) and error.code == ExitCode.LAUNCH_UNAVAILABLE
    assert isinstance(run_launch("status", "paper:x")[2], UsageError)


def test_a_target_ends_with_the_code_of_the_job(target: PaperTarget, words):
    code, printed, _ = run_launch(*words)
    assert code == 6 and printed.split() == ["PENDING", "RUNNING", "FAILED"]


def test_a_recipe_that_cannot_run_is_refused_before_it_is_handed_over(target: PaperTarget, words):
    _, _, error = run_launch(*words, "--set=parallel.tp=7")
    assert isinstance(error, UsageError) and target.jobs == {}


def test_the_functions_of_a_target_are_those_that_the_how_to_names():
    protocol = {name for name in vars(Target) if not name.startswith("_")}
    assert protocol <= set(CODE.findall(HOW_TOS["Add a launch target"]))


# A verb of the command line.


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A verb that counts the steps of a recipe, in a module that only its running imports."""
    module = ModuleType("bundle.cli.count")
    app = typer.Typer(rich_markup_mode=None, add_completion=False)

    def count(recipe: options.Recipe, request: JobRequest, as_json: options.JSON_OPTION = False) -> None:
        """Print how many steps a recipe has."""
        read: Recipe = request.load_recipe(recipe)
        if read.train.steps == 37:
            raise UsageError("train.steps: 37 is not allowed", ["train.steps"])
        plan_job(read, request)
        print(json.dumps({"steps": read.train.steps}) if as_json else read.train.steps)

    app.command()(expand_options(count))
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.VERB_SUMMARIES, "count", "Count the steps of a recipe.")
    cli._import_verb_module.cache_clear()
    yield "count"
    cli._import_verb_module.cache_clear()


def test_a_verb_that_is_not_registered_is_a_usage_error():
    assert capture_bundle("count", "demo")[0] == ExitCode.USAGE


def test_a_verb_is_listed_and_runs_with_the_options_that_verbs_share(verb: str):
    code, listed = capture_bundle("--help")
    assert code == 0 and f"  {verb} " in listed and cli.VERB_SUMMARIES[verb] in listed
    words = (verb, "demo", "--backend=cpu", "--mcore=0.16.1", "--set=train.steps=27")
    assert capture_bundle(*words) == (0, "27\n")
    code, printed = capture_bundle(*words, "--json")
    assert (code, json.loads(printed)) == (0, {"steps": 27})


def test_a_verb_ends_with_the_code_of_the_exception_and_names_the_key(verb: str):
    code, printed = capture_bundle(verb, "demo", "--set=train.steps=37")
    assert code == ExitCode.USAGE and "- train.steps" in printed
    assert capture_bundle(verb, "demo", "--no-such-option")[0] == ExitCode.USAGE


def test_a_verb_without_an_app_of_that_name_does_not_run(verb: str, monkeypatch):
    monkeypatch.delattr(sys.modules["bundle.cli.count"], "app")
    with pytest.raises(AttributeError):
        cli.app(["count", "demo"], prog_name="mcore-bundle")


# A new minor of megatron-core.

NEXT = f"{doctor.SUPPORTED_MEGATRON[1]}.0"


def list_warnings(site: Path) -> list[str]:
    """Return the subjects of what `doctor` finds wrong with the packages there, triton apart."""
    machine = detect(machine=recorded("cgroup-v1"))
    findings = check_packages(stack_of(site), machine, DetectedValue(None, "no toolkit"), {})
    return [f.subject for f in findings if f.level != "ok" and f.subject != "triton"]


def test_the_supported_range_ends_behind_the_newest_reviewed_minor():
    oldest, beyond = doctor.SUPPORTED_MEGATRON
    minors = [Version(reference).release[:2] for reference in fetch.newest_of_each_minor()]
    assert minors[0] == oldest.release[:2]
    assert (minors[-1][0], minors[-1][1] + 1) == beyond.release[:2]


def test_a_new_minor_is_outside_until_the_range_is_extended(tmp_path: Path, monkeypatch):
    install_torch(tmp_path)
    install_megatron(tmp_path, NEXT)
    assert list_warnings(tmp_path) == ["megatron-core"]
    oldest, beyond = doctor.SUPPORTED_MEGATRON
    monkeypatch.setattr(doctor, "SUPPORTED_MEGATRON", (oldest, Version(f"{beyond.major}.{beyond.minor + 1}")))
    assert list_warnings(tmp_path) == []


def test_a_new_minor_is_read_recorded_and_then_fetched_with_the_others(tmp_path: Path, monkeypatch):
    tree = build_tree(tmp_path / NEXT, NEXT, MENDED)
    before, new = load_review_table(), review.read({NEXT: tree})
    assert [line for line in review.changes(before, new) if line.endswith(f" in {NEXT}")]
    file = tmp_path / "releases.json"
    review.record(review.combined(before, new), file)
    after = json.loads(file.read_text())["references"].split()
    assert after == [*before.references, NEXT]
    extended = review.merged([before, new], after)
    monkeypatch.setattr("bundle.patches.megatron_core.load_review_table", lambda: extended)
    assert fetch.named(["newest"]) == [NEXT] and fetch.named(["reviewed"]) == after
    assert fetch.newest_of_each_minor()[-1] == NEXT
    monkeypatch.setattr(patches_page, "load_review_table", lambda: extended)
    assert list(patches_page._minors())[-1] == NEXT.rpartition(".")[0]


@pytest.mark.parametrize(("published", "later"), [("0.99.1, 0.19.2, 0.12.0", ["0.99.1"]), ("0.12.0", [])])
def test_later_releases_are_those_behind_the_newest_reviewed_one(monkeypatch, published, later):
    class Listing:
        stdout = f"megatron-core (0.1)\nAvailable versions: {published}\n"

    monkeypatch.setattr("tests.matrix.fetch.subprocess.run", lambda *words, **options: Listing)
    assert fetch.named(["later"]) == later


def test_the_makefile_fetches_where_the_how_to_reads():
    body = HOW_TOS["Support a new minor of megatron-core"]
    makefile = (ROOT / "Makefile").read_text()
    (releases,) = re.findall(r"^RELEASES\s*\?= (\S+)$", makefile, re.MULTILINE)
    (records,) = re.findall(r"^RECORDS\s*\?= (\S+)$", makefile, re.MULTILINE)
    assert f"{releases}-later/VERSION" in body and f"{records}/matrix.json" in body
    folder = "$(RELEASES)-later"
    assert f" {folder} later\n" in makefile
