"""What makes a checkpoint that of another model, and what may change between runs of one."""

from dataclasses import replace

import pytest

from bundle.architectures import from_config
from bundle.architectures.identity import dump_architecture, list_changes

CONFIG = {
    "model_type": "mixtral", "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "router_aux_loss_coef": 0.02,
}  # fmt: skip


def test_a_model_is_its_own():
    architecture = from_config(CONFIG)
    assert list_changes(dump_architecture(architecture), architecture, "the checkpoint") == []


@pytest.mark.parametrize(
    "balanced", [{"router_aux_loss_coef": 0.5}, {"output_router_logits": True}, {"router_aux_loss_coef": 0.0}]
)
def test_how_experts_are_balanced_makes_no_other_model(balanced):
    assert (
        list_changes(dump_architecture(from_config(CONFIG)), from_config(CONFIG | balanced), "the checkpoint")
        == []
    )


def test_a_recipe_may_balance_where_the_config_does_not():
    pretrained = from_config(CONFIG)
    assert pretrained.moe is not None and pretrained.moe.unused_aux_loss_coeff == 0.02
    asked = replace(pretrained.moe, aux_loss_coeff=0.001, unused_aux_loss_coeff=0.0)
    assert list_changes(dump_architecture(pretrained), replace(pretrained, moe=asked), "the checkpoint") == []


def test_another_number_of_experts_for_a_token_is_told(messages):
    other = from_config(CONFIG | {"num_experts_per_tok": 3})
    (change,) = list_changes(dump_architecture(from_config(CONFIG)), other, "the checkpoint")
    assert change.startswith("moe.topk: 2 ") and " 3 " in change
    messages(change)
