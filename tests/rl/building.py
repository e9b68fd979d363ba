"""The package's settings and micro-batches from plain cases and answers."""

from typing import Any

import torch

from bundle.engine.microbatch import MicroBatch, from_packing, from_rows
from bundle.packing.packing import Packing
from bundle.recipe.alignment import Alignment
from bundle.rl.corrections import Correction
from bundle.rl.objectives import PolicyLossSettings
from tests.rl.references import Answer, Case

VALUES = {
    "advantages": "advantages",
    "old_log_probs": "old",
    "rollout_log_probs": "rollout",
    "reference_log_probs": "reference",
}


def settings(case: Case) -> PolicyLossSettings:
    correction: Any = None
    if case.correction:
        kind: Any = case.correction
        level: Any = case.level
        correction = Correction(kind, level, *case.bounds, veto=case.veto)
    names: Any = {"kind": case.kind, "kl_kind": case.kl_kind}
    return PolicyLossSettings(
        clip=(case.low, case.high),
        dual_clip=case.dual,
        entropy=case.entropy,
        kl=case.kl,
        correction=correction,
        **names,
    )


def micro_batch(
    answers: list[Answer],
    alignment: Alignment,
    mean: Any,
    *,
    rank: int = 0,
    length: int | None = None,
    mtp_layers: int = 0,
    dtype: torch.dtype = torch.float32,
    rows: bool = False,
) -> MicroBatch:
    """A pack (thd), rows padded to one length (bshd), or `rows` of equal length as they are."""

    def join(name: str) -> torch.Tensor:
        return torch.cat([getattr(one, name) for one in answers]).to(dtype)

    ids = torch.cat([one.tokens[:-1] for one in answers])
    labels = torch.cat([one.tokens[1:] for one in answers])
    mask, values = join("learned"), {name: join(field) for name, field in VALUES.items()}
    options: Any = {"mtp_layers": mtp_layers, "mean": mean}
    lengths = [len(one.learned) for one in answers]
    if rows:
        shape = (len(answers), lengths[0])
        ids, labels, mask = (one.view(shape) for one in (ids, labels, mask))
        options["extra_tensors"] = {name: value.view(shape) for name, value in values.items()}
        return from_rows(ids, labels, mask, cp=alignment.cp, rank=rank, **options)
    packing = Packing.from_lengths(lengths, alignment, rank=rank, length=length)
    return from_packing(ids, labels, mask, packing, extra_tensors=values, **options)
