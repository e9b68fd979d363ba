"""`mcore-bundle pretrain`: one command from a checkpoint and data to a trained model."""

from bundle.cli.tasks import build_app

app = build_app("pretrain", "Train a model on text, by flags alone: plan, check the data, train, export.")
