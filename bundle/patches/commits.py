"""Code between releases that was read with the wrappers: a commit that has it, and how it differs.

`python -m tools.patches.review` records whole trees; this is for one target of a commit whose other code
nobody has read. A fingerprint is that of the code, or of the signature where the replacement is reviewed by
it.
"""

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
