"""`mcore-bundle sft`: one command from a checkpoint and data to a trained model."""

from bundle.cli.tasks import build_app

app = build_app(
    "sft", "Fine-tune a model on conversations, by flags alone: plan, check the data, train, export."
)
