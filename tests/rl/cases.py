"""The policy losses that are compared with their references, by name."""

from tests.rl.references import Case

CASES = {
    "ppo": Case(),
    "ppo two bounds": Case(low=0.2, high=0.28),
    "dual clip": Case(low=0.1, high=0.1, dual=1.2),
    "entropy and k2": Case(entropy=0.3, kl=0.7),
    "k3": Case(kl=0.5, kl_kind="k3", mean="sequence"),
    "constant divisor": Case(high=0.28, divisor=57.0, entropy=0.01),
    "gspo": Case("gspo", 0.03, 0.04, mean="sequence"),
    "gspo, corrected, kl": Case(
        "gspo", 0.03, 0.04, mean="sequence", correction="mask", level="sequence", bounds=(0.4, 4.0), kl=0.1
    ),
    "cispo": Case("cispo", 1.0, 0.28),
    "cispo two bounds": Case("cispo", 0.1, 0.1, mean="sequence"),
    "tis": Case(correction="truncate", bounds=(0.0, 1.2)),
    "tis of sequences": Case(correction="truncate", level="sequence", bounds=(0.0, 1.5)),
    "icepop": Case(correction="mask", bounds=(0.7, 1.4)),
    "icepop with veto": Case(correction="mask", bounds=(0.5, 5.0), veto=0.5, mean="sequence"),
    "mis of sequences": Case(correction="mask", level="sequence", bounds=(0.5, 2.0)),
    "mis by the geometric mean": Case(correction="mask", level="geometric", bounds=(0.93, 1.05), veto=0.4),
}
