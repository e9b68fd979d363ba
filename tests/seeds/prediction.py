"""What happens to multi-token prediction in one forward pass, as numbers that a test can judge."""

from datetime import timedelta

import torch
import torch.distributed as dist

from bundle.engine import MicroBatch, Scores
from bundle.mcore.mtp import clear_logged_losses, read_local_losses
from bundle.verification.numbers import DENSE_HF_CONFIG, Bench
from tests.engine.experiments import EVEN, engine, gradients, micro_batches, recipe
from tests.engine.reference import texts

PATIENCE = 3  # seconds that a rank waits for another one


def falls(bench: Bench) -> float:
    """The MTP loss of the last step over that of the first, while an objective reads log-probabilities."""
    read: list[bool] = []

    def objective(_: MicroBatch, scores: Scores) -> torch.Tensor:
        read.append(bool((scores.log_probs < 0).all()) and bool((scores.entropy > 0).all()))
        return -scores.log_probs

    with engine(bench, recipe(DENSE_HF_CONFIG, {}, packed=False, layers=1, loss_scale=1.0)) as made:
        losses = []
        for _ in range(5):
            made.forward_backward(micro_batches(made, texts(EVEN), "rows", "token"), objective)
            made.step_optimizer()
            losses.append(made.take_losses().mtp[0])
    assert read and all(read)
    return losses[-1] / losses[0]


def reached(bench: Bench, detached: bool = False) -> float:
    """The largest gradient of trunk and embeddings by MTP alone: the main objective is zero everywhere."""
    options = {"detach_trunk": detached, "detach_embeddings": detached}
    with engine(
        bench, recipe(DENSE_HF_CONFIG, {}, packed=False, recompute=None, layers=1, **options)
    ) as made:
        batches = micro_batches(made, texts(EVEN), "rows", "token")
        made.forward_backward(batches, lambda _, scores: scores.log_probs * 0)
        found = {name: gradient for name, (gradient, _) in gradients(made).items()}
    assert all(found[name].any() for name in found if name.startswith("mtp.")), "MTP does not train"
    return float(max(found[name].abs().max() for name in found if not name.startswith("mtp.")))


def reached_detached(bench: Bench) -> float:
    """The same with both options."""
    return reached(bench, detached=True)


def logged(bench: Bench, alone: bool = False) -> float:
    """How far megatron's own log is from the mean of two ranks; `alone`: reduced by the first rank only."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    clear_logged_losses()
    with bench.open_layout(cp=2) as groups:
        both = dist.new_group([0, 1], timeout=timedelta(seconds=PATIENCE))
        rank = groups.cp.rank
        MTPLossLoggingHelper.save_loss_to_tracker(torch.tensor(1.0 + rank), 0, 1, avg_group=both)
        if rank == 0 or not alone:
            MTPLossLoggingHelper.reduce_loss_in_tracker()
            return abs(float(read_local_losses()) - 1.5)
        dist.barrier()  # the others go on, as verl's do: to the next collective
    return 0.0


def logged_alone(bench: Bench) -> float:
    """What the source rank sees when it reduces its metrics by itself."""
    return logged(bench, alone=True)
