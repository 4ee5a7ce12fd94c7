"""An independent transformer in torch, with diffusers' blocks.

Patches are convolutions as in the paper, positions are diffusers', and a padded text is cut instead
of masked. Needs torch and diffusers. This writes tests/fixtures/transformer.npz:

python -m tests.imagen_jax.torch_transformer
"""

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.embeddings import get_2d_sincos_pos_embed, get_timestep_embedding
from torch import nn


class Transformer(nn.Module):
    """The transformer for one image and its text at a time."""

    def __init__(self, unet, text_width):
        super().__init__()
        c, patch, channels = unet.embed_dim, unet.patch, 6 if unet.low_res else 3
        self.patch, self.grid = patch, unet.image_size // patch
        self.patch_in = nn.Conv2d(channels, unet.bottleneck, patch, stride=patch, bias=False)
        self.patch_out = nn.Conv2d(unet.bottleneck, c, 1)
        mlp = lambda width: nn.Sequential(nn.Linear(width, c), nn.SiLU(), nn.Linear(c, c))
        self.time_embed = mlp(c // 4)
        if unet.noise_aug:
            self.low_res_time_embed = mlp(c // 4)
        self.text_norm, self.text_embed = nn.LayerNorm(text_width), mlp(text_width)
        self.text_in = nn.Linear(text_width, c)
        heads = c // unet.head_dim
        self.blocks = nn.ModuleList(
            JointTransformerBlock(c, heads, unet.head_dim, context_pre_only=i == unet.depth - 1, qk_norm="rms_norm")
            for i in range(unet.depth)
        )
        self.out_emb, self.out = nn.Linear(c, 2 * c), nn.Linear(c, 3 * patch**2)

    def forward(self, x, time, text, low_res=None, low_res_time=None):
        """Map x [1, 3, H, W], time [1] and a text of valid tokens [1, L, D] to [1, 3, H, W]."""
        c = self.out.in_features
        waves = lambda t: get_timestep_embedding(t, c // 4, True, 0)
        emb = self.time_embed(waves(time)) + self.text_embed(self.text_norm(text.mean(1)))
        if low_res_time is not None:
            emb = emb + self.low_res_time_embed(waves(low_res_time))
        if low_res is not None:
            large = F.interpolate(low_res, x.shape[2:], mode="bicubic", align_corners=False)
            x = torch.cat([x, large], 1)
        tokens = self.patch_out(self.patch_in(x)).flatten(2).transpose(1, 2)
        tokens = tokens + positions(c, self.grid)
        text = self.text_in(text)
        for block in self.blocks:
            text, tokens = block(tokens, text, emb)
        shift, scale = self.out_emb(F.silu(emb)).chunk(2, 1)
        tokens = F.layer_norm(tokens, (c,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
        out = self.out(tokens).view(1, self.grid, self.grid, self.patch, self.patch, 3)
        return torch.einsum("nhwpqc->nchpwq", out).reshape(1, 3, *x.shape[2:])


def positions(width, grid):
    """Return diffusers' table of positions, with cosines before sines for each coordinate."""
    table = get_2d_sincos_pos_embed(width, grid, base_size=grid, output_type="pt").float()
    return torch.cat([table.chunk(4, 1)[i] for i in (1, 0, 3, 2)], 1)


def state_dict(unet, params):
    """Torch's parameters as differentiable functions of {"time_embed/dense1/kernel": ...}."""
    state, c = {}, unet.embed_dim

    def linear(theirs, kernel, bias=None):
        state[f"{theirs}.weight"] = kernel.T
        if bias is not None:
            state[f"{theirs}.bias"] = bias

    def layer(theirs, ours):
        linear(theirs, params[f"{ours}/kernel"], params[f"{ours}/bias"])

    patches = params["patch_in/kernel"].reshape(unet.patch, unet.patch, -1, unet.bottleneck)
    state["patch_in.weight"] = patches.permute(3, 2, 0, 1)
    state["patch_out.weight"] = params["patch_out/kernel"].T[:, :, None, None]
    state["patch_out.bias"] = params["patch_out/bias"]
    for name in ("time_embed", "low_res_time_embed", "text_embed"):
        if f"{name}/dense1/kernel" in params:
            layer(f"{name}.0", f"{name}/dense1")
            layer(f"{name}.2", f"{name}/dense2")
    state["text_norm.weight"] = params["text_embed/norm/scale"]
    state["text_norm.bias"] = params["text_embed/norm/bias"]
    for name in ("text_in", "out_emb", "out"):
        layer(name, name)
    for i in range(unet.depth):
        ours, theirs, last = f"block_{i}", f"blocks.{i}", i == unet.depth - 1
        layer(f"{theirs}.norm1.linear", f"{ours}/image_emb")
        kernel, bias = params[f"{ours}/text_emb/kernel"], params[f"{ours}/text_emb/bias"]
        if last:  # In AdaLayerNormContinuous, the scale comes first.
            kernel, bias = kernel.roll(c, 1), bias.roll(c, 0)
        linear(f"{theirs}.norm1_context.linear", kernel, bias)
        text = ("k", "v") if last else ("q", "k", "v")
        for stream, parts, names in (
            ("image", ("q", "k", "v"), {p: f"to_{p}" for p in "qkv"}),
            ("text", text, {p: f"add_{p}_proj" for p in "qkv"}),
        ):
            heads = f"{ours}/{stream}_{''.join(parts)}"
            kernels, biases = params[f"{heads}/kernel"], params[f"{heads}/bias"]
            for part, kernel, bias in zip(parts, kernels.split(c, 1), biases.split(c), strict=True):
                linear(f"{theirs}.attn.{names[part]}", kernel, bias)
            norm = "norm_" if stream == "image" else "norm_added_"
            for part in set(parts) - {"v"}:
                state[f"{theirs}.attn.{norm}{part}.weight"] = params[f"{ours}/{stream}_{part}_norm/scale"]
            if stream == "image" or not last:
                out, ff = ("to_out.0", "ff") if stream == "image" else ("to_add_out", "ff_context")
                layer(f"{theirs}.attn.{out}", f"{ours}/{stream}_out")
                layer(f"{theirs}.{ff}.net.0.proj", f"{ours}/{stream}_mlp1")
                layer(f"{theirs}.{ff}.net.2", f"{ours}/{stream}_mlp2")
    return state


def reference(unet, params, inputs, cotangent):
    """Return y, and the gradients of sum(y * cotangent) for x and for our parameters."""
    params = {name: torch.tensor(np.asarray(a), requires_grad=True) for name, a in params.items()}
    model, state = Transformer(unet, inputs["text"].shape[-1]), state_dict(unet, params)
    unused = {name for name, _ in model.named_parameters()} - set(state)
    # The last block has unused layers for the text's queries.
    last = f"blocks.{unet.depth - 1}.attn."
    expected = {"add_q_proj.weight", "add_q_proj.bias", "norm_added_q.weight"}
    assert unused == {last + name for name in expected} and len(state) + 3 == len(list(model.parameters()))
    x = torch.tensor(np.asarray(inputs["x"]), requires_grad=True)
    image = lambda a: torch.as_tensor(np.asarray(a)).permute(0, 3, 1, 2)
    rows = []
    for i, mask in enumerate(np.asarray(inputs["text_mask"])):
        row = {name: torch.tensor(np.asarray(a[i : i + 1])) for name, a in inputs.items()}
        more = {}
        if unet.low_res:
            more["low_res"] = image(row["low_res"])
        if unet.noise_aug:
            more["low_res_time"] = row["low_res_time"]
        text = row["text"][:, torch.tensor(mask)]
        given = (x[i : i + 1].permute(0, 3, 1, 2), row["time"], text)
        rows.append(torch.func.functional_call(model, state, given, more, strict=False))
    y = torch.cat(rows).permute(0, 2, 3, 1)
    (y * torch.tensor(np.asarray(cotangent))).sum().backward()
    grads = {name: a.grad.numpy() for name, a in params.items()}
    return y.detach().numpy(), x.grad.numpy(), grads


def write():
    """Write the fixture: the results of `reference` for each case of the test."""
    from tests.imagen_jax import test_transformer as test

    arrays = {}
    for name, unet in test.NETWORKS.items():
        y, dx, grads = reference(unet, test.random_params(unet), test.example(unet), test.target())
        arrays |= {f"{name}/y": y, f"{name}/dx": dx}
        arrays |= {f"{name}/grad/{key}": test.summary(value) for key, value in grads.items()}
    np.savez_compressed(test.FIXTURE, **arrays)


if __name__ == "__main__":
    write()
