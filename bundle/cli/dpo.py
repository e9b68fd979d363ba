"""`mcore-bundle dpo`: one command from a checkpoint and data to a trained model."""

from bundle.cli.tasks import build_app

app = build_app("dpo", "Train a model on preferences, by flags alone: plan, check the data, train, export.")
