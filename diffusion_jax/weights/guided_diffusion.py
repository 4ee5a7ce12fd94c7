"""The numbers of blocks in OpenAI's guided-diffusion UNet, which LDM's and NeMo's files keep."""

from collections.abc import Mapping, Sequence

from diffusion_jax.weights.torch_weights import Rules, rename


def places(num_blocks: Sequence[int], attends: Sequence[bool]) -> dict[str, str]:
    """Torch's name of each block ("down_0_1_attn": "input_blocks.2.1"), in the order of use.

    Both arguments have an entry a level. input_blocks.0 is the first convolution.
    """
    names, at, last = {}, 1, len(num_blocks) - 1
    for level, count in enumerate(num_blocks):
        for i in range(count):
            names |= _block(f"down_{level}_{i}", f"input_blocks.{at}", attends[level])
            at += 1
        if level < last:
            names[f"down_{level}_resample"] = f"input_blocks.{at}.0"
            at += 1
    parts = enumerate(("mid_res_0", "mid_attn", "mid_res_1"))
    names |= {part: f"middle_block.{n}" for n, part in parts}
    at = 0
    for level in reversed(range(len(num_blocks))):
        for i in range(num_blocks[level] + 1):
            names |= _block(f"up_{level}_{i}", f"output_blocks.{at}", attends[level])
            if level > 0 and i == num_blocks[level]:
                names[f"up_{level}_resample"] = f"output_blocks.{at}.{1 + attends[level]}"
            at += 1
    return names


def layer_name(
    path: str, places: Mapping[str, str], ends: Rules, inside: Rules, halve: str = "op"
) -> str:
    """Torch's name of a layer: `inside` are rules for those of blocks, `ends` for all others.

    `halve` is what torch calls a convolution that halves the sides and is a block by itself.
    """
    block, _, rest = path.partition("/")
    if block not in places:
        return rename(path, ends)
    resample = halve if block.startswith("down") else "conv"
    return f"{places[block]}.{rename(rest, inside) if rest else resample}"


def _block(path: str, torch: str, attends: bool) -> dict[str, str]:
    return {f"{path}_res": f"{torch}.0"} | ({f"{path}_attn": f"{torch}.1"} if attends else {})
