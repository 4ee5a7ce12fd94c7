"""Stable Diffusion's UNet and VAE in numpy, with LDM's names and layouts (NCHW, OIHW).

An independent, slow and simple version in float64, to compare the real one with.
"""

import numpy as np

from tests.imagen_jax.numpy_unet import Weights, conv, gelu, group_norm, layer_norm, linear, silu, softmax


def unet(config, w, x, t, ctx, norm_groups=32):
    """Compute LDM's UNetModel, [B, out_channels, H, W]."""
    net = Weights(w)
    width, mult = config["model_channels"], config["channel_mult"]
    blocks = config["num_res_blocks"]
    blocks = [blocks] * len(mult) if isinstance(blocks, int) else blocks
    attends = lambda level: 2**level in config["attention_resolutions"]

    def heads(c):
        per_head = config.get("num_head_channels", -1)
        return config["num_heads"] if per_head == -1 else c // per_head

    def block(name, h):
        h = _res(net / f"{name}.0", h, e, norm_groups)
        return transform(f"{name}.1", h) if f"{name}.1.norm.weight" in net else h

    def transform(name, h):
        return _transformer(net / name, h, ctx, heads(h.shape[1]))

    half = width // 2
    angles = t[:, None] * np.exp(-np.log(10000) * np.arange(half) / half)
    e = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    e = linear(net / "time_embed.2", silu(linear(net / "time_embed.0", e)))

    h = conv(net / "input_blocks.0.0", x)
    skips, at = [h], 1
    for level in range(len(mult)):
        for _ in range(blocks[level]):
            assert (f"input_blocks.{at}.1.norm.weight" in net) == attends(level)
            h = block(f"input_blocks.{at}", h)
            skips.append(h)
            at += 1
        if level < len(mult) - 1:
            h = conv(net / f"input_blocks.{at}.0.op", h, stride=2)
            skips.append(h)
            at += 1
    h = _res(net / "middle_block.0", h, e, norm_groups)
    h = transform("middle_block.1", h)
    h = _res(net / "middle_block.2", h, e, norm_groups)
    at = 0
    for level in reversed(range(len(mult))):
        for i in range(blocks[level] + 1):
            h = block(f"output_blocks.{at}", np.concatenate([h, skips.pop()], axis=1))
            if level and i == blocks[level]:
                h = h.repeat(2, axis=2).repeat(2, axis=3)
                h = conv(net / f"output_blocks.{at}.{1 + attends(level)}.conv", h)
            at += 1
    y = conv(net / "out.2", silu(group_norm(net / "out.0", h, norm_groups, 1e-5)))
    assert net.unread() == set()
    return y


def encode(config, w, x):
    """Return (input of quant_conv, moments), each [B, 8, h, w]."""
    net, levels = Weights(w), len(config["ch_mult"])
    h = conv(net / "encoder.conv_in", x)
    for level in range(levels):
        for i in range(config["num_res_blocks"]):
            h = _vae_res(net / f"encoder.down.{level}.block.{i}", h)
        if level < levels - 1:
            h = np.pad(h, ((0, 0), (0, 0), (0, 1), (0, 1)))
            h = conv(net / f"encoder.down.{level}.downsample.conv", h, stride=2, pad=0)
    h = _vae_end(net / "encoder", _vae_middle(net / "encoder.mid", h))
    return h, conv(net / "quant_conv", h, pad=0)


def decode(config, w, z):
    """Return images, [B, 3, H, W]."""
    net = Weights(w)
    h = conv(net / "decoder.conv_in", conv(net / "post_quant_conv", z, pad=0))
    h = _vae_middle(net / "decoder.mid", h)
    for level in reversed(range(len(config["ch_mult"]))):
        for i in range(config["num_res_blocks"] + 1):
            h = _vae_res(net / f"decoder.up.{level}.block.{i}", h)
        if level:
            h = h.repeat(2, axis=2).repeat(2, axis=3)
            h = conv(net / f"decoder.up.{level}.upsample.conv", h)
    return _vae_end(net / "decoder", h)


def _attend(q, k, v, heads):
    """[B, T, C], [B, S, C] -> [B, T, C]"""
    split = lambda y: y.reshape(*y.shape[:2], heads, -1)
    logits = np.einsum("btnk,bsnk->bnts", split(q), split(k)) * (q.shape[-1] // heads) ** -0.5
    return np.einsum("bnts,bsnk->btnk", softmax(logits), split(v)).reshape(q.shape)


def _res(p, x, e, groups):
    h = conv(p / "in_layers.2", silu(group_norm(p / "in_layers.0", x, groups, 1e-5)))
    h = h + linear(p / "emb_layers.1", silu(e))[:, :, None, None]
    h = conv(p / "out_layers.3", silu(group_norm(p / "out_layers.0", h, groups, 1e-5)))
    return h + (conv(p / "skip_connection", x, pad=0) if "skip_connection.bias" in p else x)


def _transformer(p, x, ctx, heads):
    b, c = x.shape[:2]
    h = group_norm(p / "norm", x, 32, 1e-6).reshape(b, c, -1).swapaxes(1, 2)
    h, i = linear(p / "proj_in", h), 0
    while f"transformer_blocks.{i}.norm1.weight" in p:
        q = p / f"transformer_blocks.{i}"
        for name, norm, tokens in (("attn1", "norm1", None), ("attn2", "norm2", ctx)):
            y = layer_norm(q / norm, h)
            tokens = y if tokens is None else tokens
            pairs = (("q", y), ("k", tokens), ("v", tokens))
            parts = (linear(q / f"{name}.to_{n}", z) for n, z in pairs)
            h = h + linear(q / f"{name}.to_out.0", _attend(*parts, heads))
        gated = linear(q / "ff.net.0.proj", layer_norm(q / "norm3", h))
        value, gate = np.split(gated, 2, axis=-1)
        h, i = h + linear(q / "ff.net.2", value * gelu(gate)), i + 1
    return x + linear(p / "proj_out", h).swapaxes(1, 2).reshape(x.shape)


def _vae_res(p, x):
    h = conv(p / "conv1", silu(group_norm(p / "norm1", x, 32, 1e-6)))
    h = conv(p / "conv2", silu(group_norm(p / "norm2", h, 32, 1e-6)))
    return h + (conv(p / "nin_shortcut", x, pad=0) if "nin_shortcut.bias" in p else x)


def _vae_middle(p, x):
    h = _vae_res(p / "block_1", x)
    b, c = h.shape[:2]
    y = group_norm(p / "attn_1.norm", h, 32, 1e-6).reshape(b, c, -1).swapaxes(1, 2)
    out = _attend(*(linear(p / f"attn_1.{n}", y) for n in "qkv"), 1)
    h = h + linear(p / "attn_1.proj_out", out).swapaxes(1, 2).reshape(h.shape)
    return _vae_res(p / "block_2", h)


def _vae_end(p, x):
    return conv(p / "conv_out", silu(group_norm(p / "norm_out", x, 32, 1e-6)))
