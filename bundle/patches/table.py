"""The reviewed list of megatron-core releases: fingerprints of every target, and where each defect is.

releases.json is written by `python -m tools.patches.review` and checked in. A fingerprint in it was looked at
together with the wrappers; a release in it is decided without having its source at hand. REVIEWED is code of
single targets between releases that was read with the wrappers, where nobody has read the other code of the
commit; a fingerprint is that of the code, or of the signature where the replacement is reviewed by it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bundle.patches.entry import Presence

SHIPPED = Path(__file__).with_name("releases.json")
# name -> value -> the references that have it, in one string: a line of the file for each value
Listing = Mapping[str, Mapping[str, str]]
_LISTINGS = ("targets", "signatures", "defects", "modules")  # the fields of a Table, and of the file


@dataclass(frozen=True)
class Table:
    """What was read in every reviewed reference: a release ("0.16.1") or a commit ("0.16.2+0123abcd4567")."""

    references: tuple[str, ...]  # oldest first
    targets: Listing  # target -> fingerprint of its code -> references
    signatures: Listing  # target -> fingerprint of its signature -> references
    defects: Listing  # id of a patch or trap -> presence -> references
    modules: Listing  # module that was read -> digest of its file -> references

    def fingerprint(self, target: str, reference: str, *, by_signature: bool = False) -> str | None:
        """The target's fingerprint in a reference; None where it does not have the target."""
        return _value(self._known(target, by_signature), reference)

    def defect(self, entry: str, reference: str) -> Presence:
        """What was found in a reference; UNKNOWN for an entry that the reference was not read for."""
        return Presence(_value(self.defects.get(entry, {}), reference) or Presence.UNKNOWN)

    def reviewed(self, target: str, fingerprint: str, *, by_signature: bool = False) -> tuple[str, ...]:
        """The references in which this code, or signature, of the target was reviewed."""
        return tuple(self._known(target, by_signature).get(fingerprint, "").split())

    def _known(self, target: str, by_signature: bool) -> Mapping[str, str]:
        return (self.signatures if by_signature else self.targets).get(target, {})

    def matching(self, digests: Mapping[str, str]) -> str | None:
        """The newest reference whose every module that was read has this digest ("" is no such module)."""
        left = set(self.references)
        for module, known in self.modules.items():
            having = known.get(digests[module])
            if having is not None:
                left &= set(having.split())
            elif digests[module]:
                return None
            else:
                left -= {reference for references in known.values() for reference in references.split()}
        return next((reference for reference in reversed(self.references) if reference in left), None)


def _value(known: Mapping[str, str], reference: str) -> str | None:
    return next((value for value, references in known.items() if reference in references.split()), None)


@cache
def load() -> Table:
    """The list that is shipped with the package."""
    return parse(SHIPPED.read_text("utf-8"))


def parse(text: str) -> Table:
    """The table of a releases.json."""
    document = json.loads(text)
    return Table(tuple(document["references"].split()), *(document[listing] for listing in _LISTINGS))


def write(table: Table, path: Path) -> None:
    """Writes the table as releases.json."""
    document = {
        "references": " ".join(table.references),
        **{listing: getattr(table, listing) for listing in _LISTINGS},
    }
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def merged(tables: Iterable[Table], order: Iterable[str]) -> Table:
    """One table of several, each of other references, in the order given."""
    tables, references = list(tables), tuple(order)
    return Table(
        references,
        *(_merged([getattr(table, listing) for table in tables], references) for listing in _LISTINGS),
    )


def _merged(listings: list[Listing], order: tuple[str, ...]) -> Listing:
    rank = {reference: position for position, reference in enumerate(order)}
    collected: dict[str, dict[str, set[str]]] = {}
    for listing in listings:
        for name, known in listing.items():
            for value, references in known.items():
                kept = set(references.split()) & set(rank)
                if kept:
                    collected.setdefault(name, {}).setdefault(value, set()).update(kept)
    return {
        name: {
            value: " ".join(sorted(references, key=rank.__getitem__))
            for value, references in sorted(
                known.items(), key=lambda item: min(map(rank.__getitem__, item[1]))
            )
        }
        for name, known in sorted(collected.items())
    }


# target -> fingerprint -> (a commit, what differs)
REVIEWED: dict[str, dict[str, tuple[str, str]]] = {
    "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors": {
        "dc90ac74c2e4f42f": ("cd974f8d6b", "0.12.3 with cp_group given to the rotary function"),
        "dbab46b6d6482f08": (
            "0bbb642d75",
            "the batch dimension is dropped before the up projection, as in 0.13",
        ),
        "bbee65da4989413b": ("f6b042b6ca", "the checkpoint of the up projection knows FP8"),
        "21ab05f6768e7bf9": ("9c1a535155", "0.13 but for when the rotary dimensions are gathered"),
        "a40b003a0a6466ca": ("ae63c413d6", "the gather asks for sequence parallelism too"),
        "43e1828387cc9df4": (
            "53ef953e40",
            "0.13 with padded boundaries; YaRN and the slice are as they were",
        ),
    },
    "megatron.core.transformer.moe.router:TopKRouter.routing": {
        "eba134e718f84d13": ("62122196e7", "0.12 with a group given to the gather"),
        "7fa23cd5ad0ae371": ("fa384d200e", "0.15 with the counting of tokens in a method of its own"),
        "89aa983419098750": ("0b6714ec87", "the same with a padding mask for the balancing losses"),
    },
    "megatron.core.transformer.moe.moe_layer:MoELayer.forward": {
        "d3317c9afbbbd378": ("8baf01408a", "intermediate_tensors, which the wrapper passes on"),
        "ec63fcac441bd0d6": ("0b6714ec87", "padding_mask, which the wrapper passes on"),
        "4ef5f03d8df4d34e": ("fe729e927c", "input_ids, which the wrapper passes on"),
        "a556867d919d3ff0": ("7f9175207d", "a further argument, which the wrapper passes on"),
    },
    "megatron.core.transformer.multi_latent_attention:MLASelfAttention.__init__": {
        "b94058caf9edacf2": ("a00e9443ca", "pp_layer_offset, which the wrappers pass on"),
        "8334fbbd212dba26": ("bf4e1db32f", "pp_layer_offset and is_mtp_layer, passed on"),
        "4f07454e1d9b9570": ("2f1004963d", "the same and name, passed on"),
    },
    "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd": {
        "a3cd0de00726f883": ("b0eb9143c3", "the interleaving of latent attention by another name"),
        "577060de2434f7e2": ("bf4e1db32f", "two arguments more, which the rows are turned with"),
    },
    "megatron.core.transformer.attention:apply_rotary_pos_emb": {
        "82f7e839aa05ea25": ("e4ba3a30f2", "max_seqlen, of no use without boundaries"),
        "cb8d7a4128e7a664": ("bf4e1db32f", "two arguments more, which the wrapper passes on"),
    },
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock.forward": {
        "4ef32e0d0d0c1dee": ("2e5516872a", "mhc_multistream, which the wrapper passes on"),
        "6f2201115418cd62": ("2f1004963d", "padding_mask, which the wrapper passes on"),
        "8205b8ea89d83c77": ("cae55c1f09", "sequence_roll_context, which the wrapper passes on"),
    },
    "megatron.core.extensions.transformer_engine:TELinear.__init__": {
        "50721449c3fc6583": ("f6a3ba5432", "tp_group without symmetric_ar_type; parallel_mode by name")
    },
    "megatron.core.transformer.attention:CrossAttention.__init__": {
        "b7170cc88758a3b0": ("d48bd6be0a", "is_mtp_layer, which the wrapper passes on"),
        "3fb0d84eada46fe1": ("bf4e1db32f", "the same without pp_layer_offset"),
    },
    "megatron.core.ssm.gated_delta_net:GatedDeltaNet.__init__": {
        "4b734168ee77ad19": ("d48bd6be0a", "the parameters of the releases, annotated in another way"),
        "6c19578b914b6b76": ("d98e8a64dd", "the parameters of the releases, annotated in another way"),
        "95ff411c4c542ad5": ("a935008a5f", "further arguments, which the wrapper passes on"),
        "6878e4605cad900a": ("2f1004963d", "name and further arguments, passed on"),
    },
    "megatron.core.transformer.moe.router:switch_load_balancing_loss_func": {
        "36d25232b5e788e9": ("03e09154ee", "0.16 without a mask, which the wrapper passes on"),
        "7531873e09d626a2": ("7f9175207d", "0.16 for counts in tensors, which the wrapper takes as well"),
    },
    "megatron.core.pipeline_parallel.schedules:forward_step": {
        "5362d2962c25e004": ("6551940184", "0.14 without cp_group_size: config is found by its name"),
    },
    "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss": {
        "2c2a244679e4d819": ("0c6c1176fb", "0.14 without cp_group_size: config is found by its name"),
    },
}
