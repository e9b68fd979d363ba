"""What a framework puts in megatron-core's place, and what that does to a defect, by made-up frameworks.

Each is a package `verl` beside megatron-core 0.19.2, whose label smoothing over tensor parallel ranks takes
`exp_logits.size(-1)` for the vocabulary; the framework's own code does, or does not.
"""

import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from bundle.environment.packages import InstalledPackages
from bundle.environment.search import build_search_path
from bundle.patches.audit import Audit, AuditedDefect, DefectStatus, audit
from bundle.patches.megatron_core import load_review_table, resolve_core_path_or_version
from tests.patches.trees import Release

DEFECT = "label-smoothing-over-ranks"
CLASS = "megatron.core.tensor_parallel.cross_entropy import _VocabParallelCrossEntropy"
MENDED = """
def forward(ctx, logits, target, label_smoothing=0.0):
    vocab_size = exp_logits.size(-1) * get_tensor_model_parallel_world_size()
"""
COPIED = """
def forward(ctx, logits, target, label_smoothing=0.0):
    vocab_size = exp_logits.size(-1)
"""
UNFAMILIAR = """
def forward(ctx, logits, target, label_smoothing=0.0):
    return own_kernel(logits, target, label_smoothing)
"""
PUT = "_VocabParallelCrossEntropy.forward = forward\n"


def audited(tmp: Path, megatron: Path, files: Mapping[str, str]) -> Audit:
    """The audit of that megatron beside a framework with these files."""
    package = tmp / "verl"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, text in files.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(textwrap.dedent(text))
    stack = InstalledPackages(build_search_path([str(tmp)], "", tmp))
    return audit(
        resolve_core_path_or_version(str(megatron), load_review_table()), load_review_table(), stack, None
    )


def standing(
    tmp: Path, megatron: Path, files: Mapping[str, str], entry: str = DEFECT
) -> AuditedDefect | None:
    found = audited(tmp, megatron, files)
    assert [package.name for package in found.frameworks] == ["verl"]
    return next((defect for defect in found.defects if defect.entry.id == entry), None)


def inside(code: str, calls: str = "") -> str:
    """A file that puts the code in place inside a function, and what calls that."""
    body = f"from {CLASS}\n{code}\n{PUT}"
    return f"def apply_patch():\n{textwrap.indent(body, '    ')}\n{calls}"


PLACES = {
    "on import": ({"a.py": f"from {CLASS}\n{MENDED}\n{PUT}"}, "verl/a.py:6, on import"),
    "by a function that an import calls": (
        {"a.py": inside(MENDED), "__init__.py": "from .a import apply_patch\napply_patch()\n"},
        "on import",
    ),
    "by functions that call one another": (
        {"a.py": inside(MENDED, "def all_of_them():\n    apply_patch()\n\nall_of_them()\n")},
        "on import",
    ),
    "by a function that the framework calls": (
        {
            "a.py": inside(MENDED),
            "b.py": "def train():\n    from verl.a import apply_patch\n    apply_patch()\n",
        },
        "verl/b.py:3",
    ),
    "for a class of models": (
        {
            "a.py": inside(MENDED),
            "b.py": """
                from verl.a import apply_patch
                def train(config):
                    if isinstance(config, MLATransformerConfig):
                        apply_patch()
            """,
        },
        "verl/b.py:5",
    ),
    "once only": (
        {
            "a.py": f"from {CLASS}\n{MENDED}\nif not getattr(_VocabParallelCrossEntropy, 'done', False):\n"
            f"    {PUT}"
        },
        "on import",
    ),
    "from another file": (
        {"code.py": MENDED, "a.py": f"from {CLASS}\nfrom .code import forward as ours\n{PUT[:-8]}ours\n"},
        "on import",
    ),
    "by setattr": (
        {"a.py": f"from {CLASS}\n{MENDED}\nsetattr(_VocabParallelCrossEntropy, 'forward', forward)\n"},
        "on import",
    ),
    "as a static method": (
        {"a.py": f"from {CLASS}\n{MENDED}\n{PUT[:-8]}staticmethod(forward)\n"},
        "on import",
    ),
    "through its module": (
        {"a.py": f"import megatron.core.tensor_parallel.cross_entropy as loss\n{MENDED}\nloss.{PUT}"},
        "on import",
    ),
    "through a module that is asked for by name": (
        {
            "a.py": "import importlib\n"
            "loss = importlib.import_module('megatron.core.tensor_parallel.cross_entropy')\n"
            f"{MENDED}\nloss.{PUT}"
        },
        "on import",
    ),
}


@pytest.mark.parametrize("how", PLACES)
def test_a_mended_defect_is_known_wherever_it_is_mended(how: str, release: Release, tmp_path: Path, messages):
    files, says = PLACES[how]
    defect = standing(tmp_path, release("0.19.2"), files)
    assert defect is not None and defect.status is DefectStatus.MENDED and not defect.is_silent_and_present
    assert "verl/a.py:" in defect.reason and says in defect.reason
    messages(defect.reason)


CONDITIONS = {
    "nobody calls it": ({"a.py": inside(MENDED)}, "apply_patch()"),
    "by a setting": (
        {
            "a.py": inside(MENDED),
            "b.py": "from verl.a import apply_patch\nif config.smooth:\n    apply_patch()\n",
        },
        "if config.smooth",
    ),
    "by a version": (
        {"a.py": f"from {CLASS}\n{MENDED}\nif version < '0.17':\n    {PUT}"},
        "if version < '0.17'",
    ),
    "otherwise": (
        {"a.py": f"from {CLASS}\n{MENDED}\nif settings.plain:\n    pass\nelse:\n    {PUT}"},
        "if not settings.plain",
    ),
    "by a registry": (
        {"a.py": f"@register_patch('loss', backend='megatron')\n{inside(MENDED)}"},
        "@register_patch('loss'",
    ),
    "a namesake of another file is called": (
        {"a.py": inside(MENDED), "b.py": "def apply_patch():\n    pass\n\napply_patch()\n"},
        "apply_patch()",
    ),
    "a namesake is called": (
        {"a.py": inside(MENDED), "b.py": "from torch.other import apply_patch\napply_patch()\n"},
        "apply_patch()",
    ),
}


@pytest.mark.parametrize("how", CONDITIONS)
def test_what_is_mended_under_a_condition_is_said_with_it(
    how: str, release: Release, tmp_path: Path, messages
):
    files, says = CONDITIONS[how]
    defect = standing(tmp_path, release("0.19.2"), files)
    assert (
        defect is not None and defect.status is DefectStatus.CONDITIONAL and not defect.is_silent_and_present
    )
    assert says.replace("not settings", "not (settings") in defect.reason
    messages(defect.reason)


UNMENDED = {
    "its own code has it": (f"from {CLASS}\n{COPIED}\n{PUT}", DefectStatus.PRESENT, "verl/a.py:"),
    "another class": (f"from torch.nn import CrossEntropyLoss as Loss\n{MENDED}\nLoss.forward = forward\n",
                      DefectStatus.PRESENT, ""),
    "an object of its own": (f"from {CLASS}\n{MENDED}\nclass Own:\n    def __init__(self):\n"
                             "        self.forward = forward\n", DefectStatus.PRESENT, ""),
    "only spoken of": (f'"""{PUT}"""\nfrom {CLASS}\n{MENDED}\n', DefectStatus.PRESENT, ""),
    "no Python": (f"from {CLASS}\n{MENDED}\n{PUT}\nthis is no Python\n", DefectStatus.PRESENT, ""),
    "unfamiliar code": (f"from {CLASS}\n{UNFAMILIAR}\n{PUT}", DefectStatus.UNKNOWN, "verl/a.py:"),
    "unfamiliar code at times": (f"from {CLASS}\n{UNFAMILIAR}\nif debug:\n    {PUT}", DefectStatus.PRESENT,
                                 "if debug"),
    "code from elsewhere": (f"from {CLASS}\nfrom own import forward\n{PUT}", DefectStatus.UNKNOWN,
                            "verl/a.py:"),
}  # fmt: skip


@pytest.mark.parametrize("how", UNMENDED)
def test_what_does_not_mend_is_not_taken_for_it(how: str, release: Release, tmp_path: Path, messages):
    text, expected, says = UNMENDED[how]
    defect = standing(tmp_path, release("0.19.2"), {"a.py": text})
    assert defect is not None and defect.status is expected and says in defect.reason
    assert bool(defect.reason) == bool(says) == bool(defect.patched_by)
    if says:
        messages(defect.reason)


BIAS = "from megatron.core.transformer.moe.router import TopKRouter\n"
AROUND = """
def patch():
    current = TopKRouter._maintain_float32_expert_bias
    def _maintain_float32_expert_bias(self):
        current(self)
    TopKRouter._maintain_float32_expert_bias = _maintain_float32_expert_bias
"""


def test_who_wraps_what_our_patch_would_wrap_may_mend_it(release: Release, tmp_path: Path, messages):
    always = {"a.py": f"{BIAS}{AROUND}\npatch()\n"}
    defect = standing(tmp_path, release("0.19.2"), always, "expert-bias-counts")
    assert defect is not None and defect.status is DefectStatus.UNKNOWN
    (wrapper,) = defect.patched_by
    assert wrapper.name in defect.reason and not defect.has_patch
    messages(defect.reason)


def test_who_wraps_it_under_a_condition_leaves_it_there(release: Release, tmp_path: Path):
    at_times = {"a.py": f"{BIAS}{AROUND}\nif debug:\n    patch()\n"}
    defect = standing(tmp_path, release("0.19.2"), at_times, "expert-bias-counts")
    assert defect is not None and defect.is_silent_and_present and "if debug" in defect.reason


BRIDGES = """
from megatron.core.transformer.moe.router import TopKRouter
import torch

MARK = "compatible"

def _patch():
    current_apply_expert_bias = TopKRouter._apply_expert_bias
    if getattr(current_apply_expert_bias, MARK, False):
        return

    def _apply_expert_bias(self, routing_map, padding_mask=None):
        current_apply_expert_bias(self, routing_map, padding_mask=padding_mask)

    TopKRouter._apply_expert_bias = _apply_expert_bias
_patch()
"""


def test_a_wrapper_is_known_by_its_code_and_not_by_its_name(release: Release, tmp_path: Path):
    """Megatron-Bridge's own mends this defect (tests/history has it); one that does nothing does not."""
    defect = standing(tmp_path, release("0.19.2"), {"a.py": BRIDGES}, "padding-mask-expert-bias")
    assert defect is not None and defect.status is DefectStatus.UNKNOWN


def test_a_framework_can_bring_a_defect_that_the_release_has_not(release: Release, tmp_path: Path, messages):
    entry = "cuda-norm-of-whole-weights"  # mended in 0.17
    text = """
    from megatron.core.extensions.transformer_engine import TELinear
    def __init__(self, input_size, output_size):
        setattr(param, "sequence_parallel", True)
    TELinear.__init__ = __init__
    """
    (tmp_path / "plain").mkdir()
    (tmp_path / "brought").mkdir()
    assert standing(tmp_path / "plain", release("0.19.2"), {}, entry) is None
    defect = standing(tmp_path / "brought", release("0.19.2"), {"a.py": text}, entry)
    assert defect is not None and defect.is_silent_and_present and defect.patched_by
    messages(defect.reason)


def test_a_function_that_others_have_imported_by_value_may_not_be_replaced_for_them(
    release: Release, tmp_path: Path, messages
):
    """router.py imports get_tokens_per_expert_and_token_count; who replaces it later does not reach it."""
    text = """
    from megatron.core.transformer.moe import moe_utils
    def get_tokens_per_expert_and_token_count(routing_map, reduce_group, with_padding_mask=False):
        global_num_tokens = reduce_from_tensor_model_parallel_region(local_num_tokens.clone(), reduce_group)
        return local_num_tokens
    moe_utils.get_tokens_per_expert_and_token_count = get_tokens_per_expert_and_token_count
    """
    defect = standing(tmp_path, release("0.19.2"), {"a.py": text}, "padding-mask-own-count")
    assert defect is not None and defect.status is DefectStatus.CONDITIONAL
    assert "moe/router.py" in defect.reason
    messages(defect.reason)


GPT = "from megatron.core.models.gpt.gpt_model import GPTModel\n"
OF_AN_OBJECT = """
def unwrapped(model):
    if isinstance(model, GPTModel):
        return model
    return model.language_model

def patch(model):
    model = unwrapped(model)
    model._postprocess = ours.__get__(model, model.__class__)
"""
LABELS = """
def ours(self, hidden_states, labels, mtp_in_postprocess=None):
    if mtp_in_postprocess and labels is not None:
        hidden_states = self.mtp(hidden_states=hidden_states)
"""
NO_LABELS = (
    LABELS.replace(" and labels is not None", "")
    + "    return process_mtp_loss(hidden_states, labels, input_ids=input_ids)\n"
)
CALLED = "def train(config, model):\n    if config.mtp:\n        patch(model)\n"
OBJECTS = {
    "its function does not have it": (GPT + LABELS + OF_AN_OBJECT + CALLED, DefectStatus.CONDITIONAL),
    "made by types": (
        GPT + LABELS + OF_AN_OBJECT.replace("ours.__get__(model,", "MethodType(ours, model)  # (") + CALLED,
        DefectStatus.CONDITIONAL,
    ),
    "asked in the same function": (
        GPT + LABELS + "def patch(model):\n    if isinstance(model, GPTModel):\n"
        "        model._postprocess = ours.__get__(model)\n" + CALLED,
        DefectStatus.CONDITIONAL,
    ),
    "its function has it as well": (GPT + NO_LABELS + OF_AN_OBJECT + CALLED, DefectStatus.PRESENT),
    "of another class": (
        "from torch.nn import Module as GPTModel\n" + LABELS + OF_AN_OBJECT + CALLED,
        DefectStatus.PRESENT,
    ),
    "asked elsewhere": (GPT + LABELS + OF_AN_OBJECT.replace("unwrapped(model)\n", "model\n") + CALLED,
                        DefectStatus.PRESENT),
    "bound to another": (GPT + LABELS + OF_AN_OBJECT.replace("__get__(model", "__get__(other") + CALLED,
                         DefectStatus.PRESENT),
}  # fmt: skip


@pytest.mark.parametrize("how", OBJECTS)
def test_a_method_of_one_object_is_replaced_for_that_object(
    how: str, release: Release, tmp_path: Path, messages
):
    """As verl does with its actor's models: the others keep what the class has."""
    text, expected = OBJECTS[how]
    defect = standing(tmp_path, release("0.19.2"), {"a.py": text}, "mtp-labels-from-input")
    assert defect is not None and defect.status is expected
    if expected is DefectStatus.CONDITIONAL:
        assert "GPTModel._postprocess" in defect.reason and "verl/a.py:" in defect.reason
        messages(defect.reason)


def test_a_method_of_every_object_that_an_import_has_is_still_theirs_alone(release: Release, tmp_path: Path):
    text = GPT + LABELS + OF_AN_OBJECT + "patch(registry['model'])\n"
    defect = standing(tmp_path, release("0.19.2"), {"a.py": text}, "mtp-labels-from-input")
    assert defect is not None and defect.status is DefectStatus.CONDITIONAL
