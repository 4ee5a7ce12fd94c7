"""NVIDIA NeMo's two Imagen UNets in torch, as a baseline for timing.

This file implements the networks of imagen_jax/unet.py and imagen_jax/efficient_unet.py in torch,
with fused attention and fixed sinusoidal time embeddings. The modules have NeMo's names, so that
they can load the state dict that `imagen_jax.weights.nemo.to_nemo` returns. Images are NCHW.
Letters in shapes: B batch, C channels, H height, W width, L text tokens, D text width, N heads,
K head width.
"""

import math
from typing import Any

from benchmarks import measure
from imagen_jax.efficient_unet import EfficientUNet
from imagen_jax.unet import UNet, attends

torch = measure.library("torch")
nn, F = torch.nn, torch.nn.functional


def make(unet: UNet | EfficientUNet, text_width: int) -> Any:
    """Build the torch network that corresponds to `unet`, for texts of width `text_width`.

    Raises ValueError if `unet` has options that the torch networks in this file do not implement.
    """
    unsupported = ("learned_time_dim", "null_token", "noise_aug", "resblock_updown", "dropout")
    needed: dict[str, Any] = dict.fromkeys(unsupported, False)
    needed |= {"attention": "fused", "text_pooling": "attention"}
    options = {name: getattr(unet, name, value) for name, value in needed.items()}
    if wrong := [f"{name}={options[name]}" for name in needed if options[name] != needed[name]]:
        raise ValueError(
            f"the torch networks do not implement {', '.join(wrong)}: they need attention=fused "
            f"and text_pooling=attention, without {', '.join(unsupported)}"
        )
    return _Regular(unet, text_width) if isinstance(unet, UNet) else _Efficient(unet, text_width)


class _Conditioned(nn.Module):
    """Base class of both UNets. It embeds the time and the text."""

    def __init__(self, embed_dim: int, text_width: int, cond_dim: int) -> None:
        super().__init__()
        e = 4 * embed_dim
        self.time_embed = nn.Sequential(
            _Sinusoid(embed_dim), nn.Linear(embed_dim, e), nn.SiLU(), nn.Linear(e, e)
        )
        self.attention_pooling = nn.Sequential(
            _Pool(text_width), nn.LayerNorm(text_width), nn.Linear(text_width, cond_dim)
        )
        self.text_to_cond = nn.Linear(text_width, cond_dim)
        self.to_text_non_attn_cond = nn.Sequential(
            nn.LayerNorm(cond_dim), nn.Linear(cond_dim, e), nn.SiLU(), nn.Linear(e, e)
        )

    def forward(self, x, time, text, text_mask, low_res=None):
        """Return the network's output [B, 3, H, W].

        Shapes: x [B, 3, H, W], time [B], text [B, L, D], text_mask [B, L]. A super-resolution
        network also takes low-resolution images, low_res [B, 3, h, w].
        """
        emb = self.time_embed(time) + self.to_text_non_attn_cond(self.attention_pooling(text))
        if low_res is not None:
            low_res = F.interpolate(low_res, x.shape[2:], mode="bicubic")
            x = torch.cat([x, low_res], dim=1)
        return self.network(x, emb, self.text_to_cond(text), text_mask)


class _Regular(_Conditioned):
    def __init__(self, unet: UNet, text_width: int) -> None:
        super().__init__(unet.embed_dim, text_width, unet.cond_dim)
        widths = [unet.embed_dim * m for m in unet.channel_mult]
        count, last = int(unet.num_res_blocks), len(widths) - 1  # pyright: ignore[reportArgumentType]

        def block(before, level, *more):
            res = _Res(before, widths[level], 4 * unet.embed_dim, "skip_connection", 3)
            kind = [_Attention(widths[level], unet)] if attends(unet, level) else []
            return nn.ModuleList([res, *kind, *more])

        c = widths[0]
        self.init_conv = nn.Sequential(_conv(6 if unet.low_res else 3, c))
        self.input_blocks = nn.ModuleList([nn.ModuleList([self.init_conv[0]])])
        skips = [c]
        for level, width in enumerate(widths):
            for _ in range(count):
                self.input_blocks.append(block(c, level))
                skips.append(c := width)
            if level < last:
                self.input_blocks.append(nn.ModuleList([_Down(c)]))
                skips.append(c)
        res = lambda: _Res(c, c, 4 * unet.embed_dim, "skip_connection", 3)
        self.middle_block = nn.ModuleList([res(), _Attention(c, unet), res()])
        self.output_blocks = nn.ModuleList()
        for level in reversed(range(last + 1)):
            for i in range(count + 1):
                up = [_Up(widths[level])] if level and i == count else []
                self.output_blocks.append(block(c + skips.pop(), level, *up))
                c = widths[level]
        self.out = nn.Sequential(nn.GroupNorm(32, c), nn.SiLU(), _conv(c, 3))

    def network(self, x, emb, context, mask):
        h, skips = x, []
        for block in self.input_blocks:
            for layer in block:
                h = layer(h) if isinstance(layer, nn.Conv2d) else layer(h, emb, context, mask)
            skips.append(h)
        for layer in self.middle_block:
            h = layer(h, emb, context, mask)
        for block in self.output_blocks:
            h = torch.cat([h, skips.pop()], dim=1)
            for layer in block:
                h = layer(h, emb, context, mask)
        return self.out(h)


class _Efficient(_Conditioned):
    def __init__(self, unet: EfficientUNet, text_width: int) -> None:
        super().__init__(unet.embed_dim, text_width, text_width)
        widths = [unet.embed_dim * m for m in unet.channel_mult]
        above = [widths[max(level - 1, 0)] for level in range(len(widths))]
        self.scale = 0.5**0.5 if unet.scale_skips else 1.0
        last = len(widths) - 1

        def level_of(level, before, width, sample):
            part = nn.Module()
            ends = [before, *[width] * (unet.num_res_blocks[level] - 1)]
            part.blocks = nn.ModuleList(
                _Res(c, width, 4 * unet.embed_dim, "shortcut", 2, self.scale) for c in ends
            )
            if level in unet.attention_levels:
                part.attention_layer = _Attention(width, unet, text_width)
            if sample is not None:
                part.conv = sample
            return part

        self.init_conv = _conv(6, widths[0])
        self.DBlocks = nn.ModuleList(
            level_of(
                level, above[level], widths[level],
                nn.Conv2d(above[level], above[level], 4, 2, 1) if level < last else None,
            )
            for level in range(last + 1)
        )  # fmt: skip
        self.UBlocks = nn.ModuleList(
            level_of(
                level, widths[level], above[level],
                nn.ConvTranspose2d(above[level], above[level], 4, 2, 1) if level < last else None,
            )
            for level in range(last + 1)
        )  # fmt: skip
        self.out = nn.Conv2d(widths[0], 3, 1)

    def network(self, x, emb, context, mask):
        def blocks(part, h):
            for block in part.blocks:
                h = block(h, emb)
            attends = hasattr(part, "attention_layer")
            return part.attention_layer(h, emb, context, mask) if attends else h

        h, skips = self.init_conv(x), []
        for part in self.DBlocks:
            h = blocks(part, part.conv(h) if hasattr(part, "conv") else h)
            skips.append(h)
        for level in reversed(range(len(skips))):
            part = self.UBlocks[level]
            h = blocks(part, skips[level] if level == len(skips) - 1 else h + skips[level])
            h = part.conv(h) if hasattr(part, "conv") else h
        return self.out(h)


class _Res(nn.Module):
    def __init__(self, before: int, width: int, emb: int, shortcut: str, last: int, scale=1.0):
        super().__init__()
        self.in_layers = nn.Sequential(nn.GroupNorm(32, before), nn.SiLU(), _conv(before, width))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb, 2 * width))
        dropout = [nn.Dropout(0.0)] * (last - 2)
        self.out_layers = nn.Sequential(
            nn.GroupNorm(32, width), nn.SiLU(), *dropout, _conv(width, width)
        )
        self.scale, self.shortcut_name = scale, ""
        if shortcut == "shortcut" or before != width:
            self.shortcut_name = shortcut
            setattr(self, shortcut, nn.Conv2d(before, width, 1))

    def forward(self, x, emb, *_):
        h = self.in_layers(x)
        scale, shift = self.emb_layers(emb)[:, :, None, None].chunk(2, dim=1)
        norm, *layers = self.out_layers
        h = norm(h) * (1 + scale) + shift
        for layer in layers:
            h = layer(h)
        x = getattr(self, self.shortcut_name)(x) if self.shortcut_name else x
        return h + (x if self.scale == 1 else x * self.scale)


class _Attention(nn.Module):
    """Attention of each pixel to all pixels and text tokens, with torch's fused kernel."""

    def __init__(self, c: int, unet: UNet | EfficientUNet, cond_dim: int = 0) -> None:
        super().__init__()
        cond_dim = cond_dim or unet.cond_dim  # pyright: ignore[reportAttributeAccessIssue]
        self.head_dim = unet.head_dim
        self.norm, self.norm_self = nn.GroupNorm(32, c), nn.GroupNorm(32, c)
        self.norm_context = nn.GroupNorm(32, cond_dim)
        self.q, self.kv_self = nn.Conv1d(c, c, 1), nn.Conv1d(c, 2 * c, 1)
        self.kv_context, self.proj_out = nn.Conv1d(cond_dim, 2 * c, 1), nn.Conv1d(c, c, 1)

    def forward(self, x, emb, context, mask):
        b, c, height, width = x.shape
        flat = x.reshape(b, c, -1)  # [B, C, HW]
        pixels = self.kv_self(self.norm_self(flat))
        text = self.kv_context(self.norm_context(context.transpose(1, 2)))  # [B, 2 C, L]
        k, v = torch.cat([pixels, text], dim=2).chunk(2, dim=1)
        heads = lambda y: y.reshape(b, -1, self.head_dim, y.shape[-1]).transpose(2, 3)
        mask = F.pad(mask, (height * width, 0), value=True)[:, None, None]
        q = heads(self.q(self.norm(flat)))
        out = F.scaled_dot_product_attention(q, heads(k), heads(v), mask)  # [B, N, HW, K]
        out = self.proj_out(out.transpose(2, 3).reshape(b, c, -1))
        return x + out.reshape(x.shape)


class _Down(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.op = _conv(c, c, stride=2)

    def forward(self, x, *_):
        return self.op(x)


class _Up(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(c, c, 4, 2, 1)

    def forward(self, x, *_):
        return self.conv(x)


class _Sinusoid(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, time):
        half = self.width // 2
        angles = time[:, None] * torch.exp(torch.arange(half) * (-math.log(10000) / half))
        return torch.cat([angles.cos(), angles.sin()], dim=1)


class _Pool(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.W = nn.Linear(width, 1)

    def forward(self, text):
        return (F.softmax(self.W(text), dim=1) * text).sum(1)


def _conv(before: int, after: int, stride: int = 1) -> Any:
    return nn.Conv2d(before, after, 3, stride, 1)
