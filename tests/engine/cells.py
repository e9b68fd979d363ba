"""What is compared: a tiny model in a layout of two or four ranks, with its input in some form."""

from dataclasses import dataclass

AGREES = 1e-5  # relative to the largest number of each tensor
# Of float32 with float64: an expert that few tokens choose is 1.02e-5 off, alike in every release.
AGREES_WITH_DOUBLES = 2e-5


@dataclass(frozen=True)
class Cell:
    """`model` names one of experiments.MODELS; without sizes the two ranks are data parallel.

    `form`: thd (packed, with padding and a tail), bshd (padded to one length), rows (of one length).
    """

    model: str
    layout: str = ""  # "tp", "cp", "pp vpp": each of size 2
    form: str = "thd"
    depths: int = 0
    mean: str = "token"
    objective: bool = False
    learned: float = 0.7  # of the tokens behind a prompt
    recompute: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """The recipe's section `parallel`."""
        return dict.fromkeys(self.layout.split(), 2)


def _cross(model: str, depths: int = 0) -> tuple[Cell, ...]:
    return tuple(Cell(model, layout, depths=depths) for layout in ("", "tp", "cp"))


GROUPS = {
    # packed = unpacked: every model in every layout
    "dense": _cross("dense"),
    "gqa": _cross("gqa"),
    "mla": _cross("mla"),
    "yarn": (Cell("dense yarn", "tp"), Cell("mla yarn", "cp")),
    "moe": _cross("moe"),
    "mtp": _cross("dense", depths=2),
    # .. in both at once, over four ranks
    "crossed": (
        *(Cell(model, "tp cp") for model in ("dense", "gqa", "mla", "moe")),
        Cell("dense", "tp cp", depths=2),
    ),
    # .. and each pair of a model and a layout once or more
    "pairs": (
        Cell("dense", "tp"),
        Cell("dense", "cp"),
        Cell("gqa", ""),
        Cell("gqa", "cp"),
        Cell("mla", "tp"),
        Cell("mla", "cp"),
        Cell("moe", ""),
        Cell("moe", "tp"),
    ),
    "mtp pairs": (Cell("dense", "tp", depths=2), Cell("dense", "cp", depths=2)),
    # multi-token prediction over ranks, for both means
    "means": (
        Cell("dense", "cp", "rows", depths=2),
        Cell("dense", "cp", "rows", depths=2, mean="sequence"),
        Cell("dense", "", "bshd", depths=2, mean="sequence"),
    ),
    "packed means": (Cell("dense", "cp", depths=2, mean="sequence"),),
    # log-probs, entropies, and an objective in the place of the main loss, beside the MTP losses
    "scores": (
        Cell("dense", "tp", "bshd", depths=1, objective=True),
        Cell("dense", "cp", "bshd", depths=1, mean="sequence", objective=True),
        Cell("dense", "pp", "bshd", depths=1, objective=True),
        Cell("dense", "pp vpp", "rows", depths=1, objective=True),
    ),
    # the losses that balance experts, in every layout and form, with few learned tokens
    "balancing": (
        *(Cell(m, layout, learned=0.25) for m in ("moe", "balanced") for layout in ("", "tp", "cp", "ep")),
        *(Cell("balanced", layout, "bshd", learned=0.25) for layout in ("", "cp", "ep")),
        *(Cell("moe", layout, "rows") for layout in ("tp", "cp")),
        *(Cell("balanced", layout, recompute=True) for layout in ("tp", "pp")),
        Cell("moe", "pp vpp", "bshd", mean="sequence", recompute=True),
    ),
    "balancing of prediction": (Cell("balanced", "cp", depths=1), Cell("balanced", "pp", depths=1)),
    "packed scores": (Cell("dense", "cp", depths=1, objective=True),),
}
