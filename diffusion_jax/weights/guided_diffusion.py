"""Map this project's names of UNet layers to torch names in OpenAI's guided-diffusion.

LDM and NeMo use the same torch names.
"""

from collections.abc import Mapping, Sequence

from diffusion_jax.weights.torch_weights import NameRules, rename


def places(num_blocks: Sequence[int], attends: Sequence[bool]) -> dict[str, str]:
    """Return the torch name of each UNet block, keyed by this project's name of the block.

    For example, "down_0_0_res" maps to "input_blocks.1.0".

    Args:
        num_blocks: The number of blocks per level.
        attends: Whether each level has attention.
    """
    names, index, last = {}, 1, len(num_blocks) - 1  # input_blocks.0 is the first convolution.
    for level, count in enumerate(num_blocks):
        for i in range(count):
            names |= _block(f"down_{level}_{i}", f"input_blocks.{index}", attends[level])
            index += 1
        if level < last:
            names[f"down_{level}_resample"] = f"input_blocks.{index}.0"
            index += 1
    parts = enumerate(("mid_res_0", "mid_attn", "mid_res_1"))
    names |= {part: f"middle_block.{n}" for n, part in parts}
    index = 0
    for level in reversed(range(len(num_blocks))):
        for i in range(num_blocks[level] + 1):
            names |= _block(f"up_{level}_{i}", f"output_blocks.{index}", attends[level])
            if level > 0 and i == num_blocks[level]:
                names[f"up_{level}_resample"] = f"output_blocks.{index}.{1 + attends[level]}"
            index += 1
    return names


def layer_name(path: str, places: Mapping[str, str], ends: NameRules, inside: NameRules, halve: str = "op") -> str:
    """Return the torch name of a UNet layer.

    Args:
        path: The layer's path in our params.
        places: The torch name of each block, as returned by the function `places`.
        ends: Rules that rename layers outside of blocks.
        inside: Rules that rename layers within a block.
        halve: The torch name of the convolution in a downsampling block.
    """
    block, _, layer = path.partition("/")
    if block not in places:
        return rename(path, ends)
    resample = halve if block.startswith("down") else "conv"
    return f"{places[block]}.{rename(layer, inside) if layer else resample}"


def _block(path: str, torch: str, attends: bool) -> dict[str, str]:
    return {f"{path}_res": f"{torch}.0"} | ({f"{path}_attn": f"{torch}.1"} if attends else {})
