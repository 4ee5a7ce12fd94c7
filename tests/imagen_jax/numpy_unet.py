"""Imagen's UNets in numpy, with NeMo's names and layouts (NCHW, OIHW).

An independent, slow and plain implementation, in the precision of its weights. It
reads the config like NeMo, including defaults.
"""

import numpy as np
from scipy.special import erf

DEFAULTS = dict(
    num_res_blocks=3,
    channel_mult=[1, 2, 3, 4],
    per_head_channels=64,
    cond_dim=512,
    attention_type="fused",
    feature_pooling_type="attention",
    learned_sinu_pos_emb_dim=16,
    attention_resolutions=[8, 16, 32],
    use_null_token=False,
    init_conv_kernel_size=3,
    scale_shift_norm=True,
    resblock_updown=False,
    resample_with_conv=True,
    low_res_cond=False,
    noise_cond_aug=False,
)


EFFICIENT_DEFAULTS = DEFAULTS | dict(
    channel_mult=[1, 1, 2, 4, 8],
    num_resblocks=[1, 2, 4, 8, 8],
    atnn_enabled_at=[0, 0, 0, 0, 1],
    num_attn_heads=8,
    skip_connection_scaling=False,
)


def forward(config, weights, **inputs):
    """Return the output [B, 3, H, W] of the network that a NeMo config describes."""
    net = Weights(weights)
    regular = config.get("unet_type", "base") != "sr"
    o = (DEFAULTS if regular else EFFICIENT_DEFAULTS) | config["unet"]
    y = (_regular if regular else _efficient)(net, o, *_conditions(net, o, **inputs))
    assert net.unread() == set()
    return y


def _conditions(net, o, x, time, text_embed, text_mask, x_low_res=None, time_low_res=None):
    """Return (image with low-res image, time embedding, context, mask of the context)."""
    text_mask = text_mask.astype(bool)
    e = time_embed(net / "time_embed", o, time)
    if time_low_res is not None:
        e = e + time_embed(net / "lowres_time_embed", o, time_low_res)
    context = linear(net / "text_to_cond", text_embed)
    e = e + text_vector(net, o, text_embed, context)
    if o["use_null_token"]:
        token = np.repeat(net["null_text_embedding"], len(x), axis=0)
        context = np.concatenate([context, token], axis=1)
        text_mask = np.pad(text_mask, ((0, 0), (0, 1)), constant_values=True)
    if x_low_res is not None:
        x = np.concatenate([x, bicubic(x_low_res, *x.shape[2:]).astype(x.dtype)], axis=1)
    return x, e, context, text_mask


def _efficient(net, o, x, e, context, text_mask):
    deepest = len(o["channel_mult"]) - 1
    scale = 0.5**0.5 if o["skip_connection_scaling"] else 1

    def blocks(p, level, h):
        for i in range(max(o["num_resblocks"][level], 1)):
            block = p / f"blocks.{i}"
            branch = res_branch(block, o, h, e, last=2)
            h = branch + conv1x1(block / "shortcut", h) * scale
        if o["atnn_enabled_at"][level]:
            width = o["per_head_channels"]
            width = h.shape[1] // o["num_attn_heads"] if width == -1 else width
            attention = ATTENTION[o["attention_type"]]
            h = attention(p / "attention_layer", h, context, text_mask, width)
        return h

    h, skips = conv(net / "init_conv", x), []
    for level in range(deepest + 1):
        p = net / f"DBlocks.{level}"
        h = blocks(p, level, h if level == deepest else conv(p / "conv", h, stride=2))
        skips.append(h)
    for level in reversed(range(deepest + 1)):
        p = net / f"UBlocks.{level}"
        h = blocks(p, level, skips[level] + (0 if level == deepest else h))
        h = h if level == deepest else conv_transpose(p / "conv", h)
    return conv1x1(net / "out", h)


def _regular(net, o, x, e, context, text_mask):
    def attend(block, h):
        return ATTENTION[o["attention_type"]](block, h, context, text_mask, o["per_head_channels"])

    mult, blocks = o["channel_mult"], o["num_res_blocks"]
    counts = [blocks] * len(mult) if isinstance(blocks, int) else blocks
    factors = {o["image_size"] // res for res in o["attention_resolutions"]}
    h = conv(net / "init_conv.0", x)
    skips, n, factor = [h], 1, 1
    for level, count in enumerate(counts):
        for _ in range(count):
            h = res_block(net / f"input_blocks.{n}.0", o, h, e)
            if factor in factors:
                h = attend(net / f"input_blocks.{n}.1", h)
            skips.append(h)
            n += 1
        if level < len(mult) - 1:
            h = down(net / f"input_blocks.{n}.0", o, h, e)
            skips.append(h)
            n, factor = n + 1, factor * 2
    h = res_block(net / "middle_block.0", o, h, e)
    h = attend(net / "middle_block.1", h)
    h = res_block(net / "middle_block.2", o, h, e)
    n = 0
    for level in reversed(range(len(mult))):
        for i in range(counts[level] + 1):
            block, last = net / f"output_blocks.{n}", 1
            h = res_block(block / "0", o, np.concatenate([h, skips.pop()], axis=1), e)
            if factor in factors:
                h, last = attend(block / "1", h), 2
            if level and i == counts[level]:
                h = up(block / str(last), o, h, e)
                factor //= 2
            n += 1
    assert not skips
    return conv(net / "out.2", silu(group_norm(net / "out.0", h)))


class Weights:
    """The part of a state dict under a prefix, which records which arrays were read."""

    def __init__(self, arrays, prefix="", read=None):
        self.arrays, self.prefix = arrays, prefix
        self.read = set() if read is None else read

    def __truediv__(self, name):
        return Weights(self.arrays, f"{self.prefix}{name}.", self.read)

    def __getitem__(self, name):
        self.read.add(self.prefix + name)
        return self.arrays[self.prefix + name]

    def __contains__(self, name):
        return self.prefix + name in self.arrays

    def unread(self):
        return set(self.arrays) - self.read


def linear(p, x):
    y = x @ p["weight"].reshape(p["weight"].shape[:2]).T
    return y + p["bias"] if "bias" in p else y


def conv1x1(p, x):
    return np.moveaxis(linear(p, np.moveaxis(x, 1, -1)), -1, 1)


def conv(p, x, stride=1, pad=None):
    w = p["weight"]
    k = w.shape[-1]
    pad = (k - 1) // 2 if pad is None else pad  # 1 for kernels of size 3 and 4.
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (k, k), axis=(2, 3))
    y = np.tensordot(windows[:, :, ::stride, ::stride], w, ((1, 4, 5), (1, 2, 3)))
    return np.moveaxis(y + p["bias"], -1, 1)


def conv_transpose(p, x):
    """Transposed 4x4 convolution (stride 2, padding 1)."""
    w, (b, _, height, width) = p["weight"], x.shape
    out = np.zeros((b, w.shape[1], 2 * height + 2, 2 * width + 2), x.dtype)
    for i in range(4):
        for j in range(4):
            y = np.moveaxis(np.tensordot(x, w[:, :, i, j], (1, 0)), -1, 1)
            out[:, :, i : i + 2 * height : 2, j : j + 2 * width : 2] += y
    return out[:, :, 1:-1, 1:-1] + p["bias"][:, None, None]


def average_pool(x):
    return (x[..., ::2, ::2] + x[..., 1::2, ::2] + x[..., ::2, 1::2] + x[..., 1::2, 1::2]) / 4


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return x * (1 + erf(x / np.sqrt(2))) / 2


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def group_norm(p, x, number=32, eps=1e-5):
    groups = x.reshape(len(x), number, -1)
    groups = groups - groups.mean(-1, keepdims=True)
    groups = groups / np.sqrt((groups**2).mean(-1, keepdims=True) + eps)
    column = (-1,) + (1,) * (x.ndim - 2)
    return groups.reshape(x.shape) * p["weight"].reshape(column) + p["bias"].reshape(column)


def layer_norm(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["weight"] + p["bias"]


def time_embed(p, o, time):
    time = time[:, None]
    if o["learned_sinu_pos_emb_dim"]:
        angles = 2 * np.pi * time * p["0.weights"]
        h = np.concatenate([time, np.sin(angles), np.cos(angles)], axis=1)
    else:
        half = o["embed_dim"] // 2
        angles = time * 10000.0 ** (-np.arange(half) / half)
        h = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    return linear(p / "3", silu(linear(p / "1", h)))


def text_vector(net, o, text, context):
    pooled = context.mean(1)
    if o["feature_pooling_type"] == "attention":
        p = net / "attention_pooling"
        weights = softmax(linear(p / "0.W", text)[..., 0])
        pooled = linear(p / "2", layer_norm(p / "1", np.einsum("bl,bld->bd", weights, text)))
    p = net / "to_text_non_attn_cond"
    return linear(p / "3", silu(linear(p / "1", layer_norm(p / "0", pooled))))


def res_branch(p, o, x, e, resize=lambda name, x: x, *, last):
    """A residual block without its shortcut. `last` is the number of its second convolution."""
    h = conv(p / "in_layers.2", resize("h_upd", silu(group_norm(p / "in_layers.0", x))))
    e = linear(p / "emb_layers.1", silu(e))[:, :, None, None]
    if o["scale_shift_norm"]:
        scale, shift = np.split(e, 2, axis=1)
        h = group_norm(p / "out_layers.0", h) * (1 + scale) + shift
    else:
        h = group_norm(p / "out_layers.0", h + e)
    return conv(p / f"out_layers.{last}", silu(h))


def res_block(p, o, x, e, resize=lambda name, x: x):
    h = res_branch(p, o, x, e, resize, last=3)
    x = resize("x_upd", x)
    if "weight" in p / "skip_connection":
        x = conv1x1(p / "skip_connection", x)
    return x + h


def down(p, o, x, e):
    if o["resblock_updown"]:
        return res_block(p, o, x, e, lambda name, x: average_pool(x))
    return conv(p / "op", x, stride=2) if o["resample_with_conv"] else average_pool(x)


def up(p, o, x, e):
    if o["resblock_updown"]:
        return res_block(p, o, x, e, lambda name, x: conv_transpose(p / f"{name}.conv", x))
    return conv_transpose(p / "conv", x)


def weighted_mean(q, k, v, mask, head_dim):
    """Attention: q [B, C, T], k and v [B, C, S], mask [B, S] -> [B, C, T]; 0 if no key is valid."""
    q, k, v = (a.reshape(len(a), -1, head_dim, a.shape[-1]) for a in (q, k, v))
    logits = np.einsum("bnct,bncs->bnts", q, k) / np.sqrt(head_dim)
    some = mask.any(-1)[:, None, None, None]
    weights = softmax(np.where(mask[:, None, None] | ~some, logits, -np.inf)) * some
    return np.einsum("bnts,bncs->bnct", weights, v).reshape(len(q), -1, q.shape[-1])


def self_attention(p, x, context, mask, head_dim):
    flat = x.reshape(*x.shape[:2], -1)
    q, k, v = np.split(conv1x1(p / "qkv", group_norm(p / "norm", flat)), 3, axis=1)
    everything = np.ones((len(x), flat.shape[-1]), bool)
    out = weighted_mean(q, k, v, everything, head_dim)
    return x + conv1x1(p / "proj_out", out).reshape(x.shape)


def cross_attention(p, x, context, mask, head_dim):
    flat = x.reshape(*x.shape[:2], -1)
    q = conv1x1(p / "q", group_norm(p / "norm", flat))
    context = group_norm(p / "norm_context", np.moveaxis(context, 1, 2))
    k, v = np.split(conv1x1(p / "kv", context), 2, axis=1)
    out = weighted_mean(q, k, v, mask, head_dim)
    return x + conv1x1(p / "proj_out", out).reshape(x.shape)


def fused_attention(p, x, context, mask, head_dim):
    flat = x.reshape(*x.shape[:2], -1)
    q = conv1x1(p / "q", group_norm(p / "norm", flat))
    pixels = conv1x1(p / "kv_self", group_norm(p / "norm_self", flat))
    context = group_norm(p / "norm_context", np.moveaxis(context, 1, 2))
    k, v = np.split(np.concatenate([pixels, conv1x1(p / "kv_context", context)], axis=2), 2, axis=1)
    mask = np.pad(mask, ((0, 0), (flat.shape[-1], 0)), constant_values=True)
    out = weighted_mean(q, k, v, mask, head_dim)
    return x + conv1x1(p / "proj_out", out).reshape(x.shape)


def stacked_attention(p, x, context, mask, head_dim):
    h = conv1x1(p / "proj_in", group_norm(p / "norm", x))
    h = self_attention(p / "self_attention_block", h, context, mask, head_dim)
    h = cross_attention(p / "cross_attention_block", h, context, mask, head_dim)
    value, gate = np.split(conv1x1(p / "ff.net.0.proj", group_norm(p / "ff.norm", h)), 2, axis=1)
    return x + conv1x1(p / "proj_out", h + conv1x1(p / "ff.net.2", value * gelu(gate)))


ATTENTION = {"self": self_attention, "cross": cross_attention, "fused": fused_attention, "stacked": stacked_attention}


def bicubic(x, height, width):
    """Enlarge like torch's bicubic interpolation."""
    for axis, size in ((2, height), (3, width)):
        n = x.shape[axis]
        centre = (np.arange(size) + 0.5) * n / size - 0.5
        base = np.floor(centre).astype(int)
        taps = 0
        for offset in (-1, 0, 1, 2):
            shape = [1] * 4
            shape[axis] = size
            weight = _keys(np.abs(centre - base - offset)).reshape(shape)
            taps = taps + weight * np.take(x, np.clip(base + offset, 0, n - 1), axis=axis)
        x = taps
    return x


def _keys(d, a=-0.75):
    outer = ((d - 5) * d + 8) * d - 4
    return np.where(d <= 1, ((a + 2) * d - (a + 3)) * d * d + 1, a * outer)
