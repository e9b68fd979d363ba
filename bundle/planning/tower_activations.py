"""The activations of a vision tower: bytes that it saves of one patch for backward."""

from bundle.architectures import VisionArchitecture
from bundle.planning.head import ID_BYTES
from bundle.planning.size import FP32
from bundle.recipe.recipe import VisionSection


def count_activation_bytes_per_patch(
    vision: VisionArchitecture, element_bytes: int, training: VisionSection
) -> int:
    """Return the bytes that a tower keeps of one patch, by its trained parts.

    A number has `element_bytes` bytes. The bytes are read off the tensors that autograd saves in
    transformers' towers, with torch's own operations and attention. A frozen part keeps no inputs of its
    matrices, and nothing is kept before the first trained part.
    """
    width, heads, ffn = vision.hidden_size, vision.num_attention_heads, vision.ffn_hidden_size
    has_windows = vision.family == "qwen2_5_vl"
    if has_windows:
        norm, matrices = width * (FP32 + element_bytes) + FP32, 4
        projector_bytes, inputs = norm + 3 * width * element_bytes, 3 * width * element_bytes
        projector_alone = 4 * width * element_bytes + ID_BYTES // vision.patches_per_embedding
    else:
        norm, matrices = (width + 2) * element_bytes, 2
        projector_bytes = norm + 3 * width * element_bytes
        projector_bytes += len(vision.deepstack) * (
            3 * width * element_bytes + 2 * element_bytes // vision.patches_per_embedding
        )
        inputs = (1 + len(vision.deepstack)) * 2 * width * element_bytes
        # Inputs of mergers that nothing else keeps.
        projector_alone = (
            projector_bytes + len({*vision.deepstack} - {vision.num_layers - 1}) * width * element_bytes
        )
    if training.freeze_tower:
        return 0 if training.freeze_projector else projector_alone
    # Norms' outputs, queries, keys and values, before and after they are turned, and what attention gives.
    attention = 9 * width * element_bytes + heads * FP32
    rotation = 2 * (width // heads) * FP32  # cosines and sines, once for all blocks
    block = 2 * norm + attention + matrices * ffn * element_bytes
    positions = 0 if has_windows else 4 * (ID_BYTES + FP32)  # the four learned ones around a patch
    tower_bytes = vision.num_layers * block + positions + rotation + vision.values_per_patch * element_bytes
    return tower_bytes + projector_bytes - (inputs if training.freeze_projector else 0)
