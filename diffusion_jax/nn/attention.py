"""Softmax attention: one function, `attend`, and its implementations for each kind of device.

B batch, T queries, S keys, N heads, K their width, L text tokens.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from diffusion_jax.nn.ops import platform as _platform

KEPT = "attention"
"""The name, for jax.checkpoint's policies, of what attention gives and its gradient needs of it."""
_LANES = 128  # Of a TPU's vectors: splash's blocks are multiples of it.
_BLOCK = 512  # Most queries, or keys, of a block of scores.
_RESIDENT = 2048  # Most keys that splash holds in a TPU's vector memory.
_MASKED = -1e30  # Finite, so that a row without a key has finite gradients.
# Scores of a head from which a CPU is faster with blocks of them.
_MANY = 2**14


def attend(
    q: Float[Array, "B T N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    mask: Bool[Array, "B L"] | None = None,
    *,
    implementation: str = "auto",
) -> Float[Array, "B T N K"]:
    """Softmax attention, scaled by 1 / sqrt(K), with float32 logits and softmax.

    `mask` says which of the last L keys take part; those before them always do. A row that has no
    key at all gives 0. The implementations are equal to rounding:

    - "xla": all scores at once, on every device;
    - "blockwise": a block of keys after the other (Rabe & Staats 2021; Dao 2022), on every device;
      memory grows with T + S, not with T S;
    - "splash": the same in jax's kernel for TPUs; on other devices interpreted, for tests;
    - "cudnn": NVIDIA's kernel, for 16 bits and K in multiples of 8 up to 128. Of each mask only the
      number of True counts: put the valid keys first, with `valid_first`;
    - "auto": the fastest of these on the device, as `choose` tells.
    """
    always = k.shape[1] - (0 if mask is None else mask.shape[1])
    if implementation == "auto":
        implementation = choose(q.shape[1], k.shape[1], q.shape[3], q.dtype)
    valid = None
    if mask is not None:
        valid = jnp.pad(mask, ((0, 0), (always, 0)), constant_values=True)  # [B, S]
    out = checkpoint_name(_IMPLEMENTATIONS[implementation](q, k, v, valid), KEPT)
    if mask is None or always:
        return out
    return jnp.where(mask.any(1)[:, None, None, None], out, 0)


def choose(queries: int, keys: int, head_dim: int, dtype: DTypeLike) -> str:
    """The fastest implementation on the devices of the mesh in use, or else on the default one."""
    platform, halves = _platform(), jnp.dtype(dtype).itemsize == 2
    if platform == "tpu":
        return "splash" if halves and min(queries, keys) >= 2 * _LANES else "xla"
    if platform == "cpu":
        return "blockwise" if queries * keys >= _MANY else "xla"
    fits = halves and head_dim % 8 == 0 and head_dim <= 128
    return "cudnn" if fits and _has_cudnn() else "xla"


def counts_keys(implementation: str) -> bool:
    """Whether of a mask only the number of True may count: text then goes through `valid_first`."""
    automatic = implementation == "auto" and _platform() not in ("tpu", "cpu") and _has_cudnn()
    return implementation == "cudnn" or automatic


def valid_first(
    tokens: Float[Array, "B L D"], mask: Bool[Array, "B L"]
) -> tuple[Float[Array, "B L D"], Bool[Array, "B L"]]:
    """The tokens, and their mask, reordered so that in each row those with mask True come first."""
    order = jnp.argsort(~mask, axis=1, stable=True)
    return (
        jnp.take_along_axis(tokens, order[:, :, None], axis=1),
        jnp.take_along_axis(mask, order, axis=1),
    )


@functools.cache
def _has_cudnn() -> bool:
    x = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.bfloat16)
    try:
        jax.eval_shape(functools.partial(_cudnn, valid=None), x, x, x)
    except RuntimeError:
        return False
    return True


def _xla(q: Array, k: Array, v: Array, valid: Array | None) -> Array:
    keys = None if valid is None else valid[:, None, None]
    return jax.nn.dot_product_attention(q, k, v, mask=keys, implementation="xla")


def _cudnn(q: Array, k: Array, v: Array, valid: Array | None) -> Array:
    """Attention to the first keys of each row, as many as are valid, at least one.

    jax refuses gradients of odd lengths, so these are padded. The lengths are given even where
    they are full: without them cuDNN's gradients can be NaN where S is no multiple of its tiles
    (NVIDIA/cudnn-frontend issue 160).
    """
    lengths = jnp.full(len(q), k.shape[1]) if valid is None else valid.sum(1)
    even = lambda x: jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))
    lengths = jnp.maximum(lengths, 1).astype(jnp.int32)
    out = jax.nn.dot_product_attention(
        even(q), even(k), even(v), key_value_seq_lengths=lengths, implementation="cudnn"
    )
    return out[:, : q.shape[1]]


def _splash(q: Array, k: Array, v: Array, valid: Array | None) -> Array:
    """Masked keys are of another segment than all queries.

    A kernel is nothing that the compiler could split: each device calls it on its part of the
    batch, and of the heads where they divide over the mesh.
    """
    if valid is None:
        valid = jnp.ones(k.shape[:2], bool)
    queries, keys = q.shape[1], k.shape[1]
    q, k, v = _padded(q * q.shape[3] ** -0.5, _LANES), _padded(k, _LANES), _padded(v, _LANES)
    valid = jnp.pad(valid, ((0, 0), (0, k.shape[1] - keys)))
    mesh, call = jax.sharding.get_abstract_mesh(), _splash_kernel
    if not mesh.empty:
        ways = mesh.shape["replica"] * mesh.shape["fsdp"]
        batch = ("replica", "fsdp") if len(q) % ways == 0 else None
        heads = "tensor" if q.shape[2] % mesh.shape["tensor"] == 0 else None
        specs = (P(batch, None, heads),) * 3, P(batch)
        call = jax.shard_map(
            call, in_specs=(*specs[0], specs[1]), out_specs=specs[0][0], check_vma=False
        )
    return call(q, k, v, valid)[:, :queries]


def _splash_kernel(q: Array, k: Array, v: Array, valid: Array) -> Array:
    """q [B, T, N, K], scaled, k and v [B, S, N, K], valid [B, S]; T and S in multiples of 128."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    (_, t, n, _), s = q.shape, k.shape[1]
    rows, keys = _divisor(t, _BLOCK), _divisor(s, _RESIDENT)
    scores = _divisor(keys, _BLOCK)
    sizes = splash.BlockSizes(
        block_q=rows, block_kv=keys, block_kv_compute=scores,
        block_q_dkv=rows, block_kv_dkv=keys, block_kv_dkv_compute=scores,
        use_fused_bwd_kernel=True,  # Which sums the gradient of q over blocks of keys outside.
    )  # fmt: skip
    kernel: Any = splash.make_splash_mha(
        masks.MultiHeadMask([masks.FullMask((t, s))] * n),
        block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=_platform() != "tpu",
        residual_checkpoint_name=KEPT,
    )  # fmt: skip

    def one(q, k, v, valid):
        segments = splash.SegmentIds(q=jnp.ones(t, jnp.int32), kv=valid.astype(jnp.int32))
        return kernel(q, k, v, segment_ids=segments)

    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))  # [B, N, T or S, K]
    return jnp.swapaxes(jax.vmap(one)(q, k, v, valid), 1, 2)


def _divisor(length: int, most: int) -> int:
    """The largest multiple of 128 up to `most` that divides the length, a multiple too."""
    return max(size for size in range(_LANES, most + 1, _LANES) if length % size == 0)


def _blockwise(q: Array, k: Array, v: Array, valid: Array | None) -> Array:
    """Blocks of keys of equal size, the last one padded."""
    if valid is None:
        valid = jnp.ones(k.shape[:2], bool)
    blocks = -(-k.shape[1] // _BLOCK)
    k, v = _padded(k, blocks), _padded(v, blocks)
    valid = jnp.pad(valid, ((0, 0), (0, k.shape[1] - valid.shape[1])))
    split = lambda x: jnp.moveaxis(x.reshape(len(x), blocks, -1, *x.shape[2:]), 1, 0)
    q = jnp.swapaxes(q, 1, 2) * q.shape[3] ** -0.5  # [B, N, T, K]
    k, v = (jnp.swapaxes(split(x), 2, 3) for x in (k, v))  # [blocks, B, N, S / blocks, K]
    return jnp.swapaxes(_in_blocks(q, k, v, split(valid)), 1, 2)


@jax.custom_vjp
def _in_blocks(q: Array, k: Array, v: Array, valid: Array) -> Array:
    """q [B, N, T, K], scaled; k, v [blocks, B, N, S, K]; valid [blocks, B, S]."""
    return _in_blocks_forward(q, k, v, valid)[0]


def _in_blocks_forward(q, k, v, valid):
    def step(carry, block):
        top, total, out = carry  # The largest score so far, and sums of exponentials about it.
        k, v, valid = block
        scores = _einsum("bntk,bnsk->bnts", q, k)
        scores = jnp.where(valid[:, None, None], scores, _MASKED)
        higher = jnp.maximum(top, scores.max(-1))
        shrink, weights = jnp.exp(top - higher), jnp.exp(scores - higher[..., None])
        out = out * shrink[..., None] + _einsum("bnts,bnsk->bntk", weights.astype(v.dtype), v)
        return (higher, total * shrink + weights.sum(-1), out), None

    zero = jnp.zeros(q.shape, jnp.float32)
    start = jnp.full_like(zero[..., 0], _MASKED), zero[..., 0], zero
    (top, total, out), _ = jax.lax.scan(step, start, (k, v, valid))
    out = checkpoint_name((out / total[..., None]).astype(q.dtype), KEPT)
    return out, (q, k, v, valid, out, checkpoint_name(top + jnp.log(total), KEPT))


def _in_blocks_backward(kept, cotangent):
    """The scores are computed again, from the logarithm of each row's sum of exponentials.

    Here keys are rows: XLA's CPU backend sums over the rows of a matrix at a third of the speed,
    and two of three gradients sum over queries. That of q, which does not, is made transposed.
    """
    q, k, v, valid, out, log_total = kept
    along = (cotangent.astype(jnp.float32) * out).sum(-1)[:, :, None]  # [B, N, 1, T]

    def step(dq, block):
        k, v, valid = block
        weights = jnp.exp(recomputed(q, k, valid) - log_total[:, :, None])  # [B, N, S, T]
        dv = _einsum("bnst,bntk->bnsk", weights.astype(v.dtype), cotangent)
        slope = weights * (_einsum("bnsk,bntk->bnst", v, cotangent) - along)
        slope = slope.astype(k.dtype)
        dq = dq + _einsum("bnks,bnst->bnkt", jnp.swapaxes(k, 2, 3), slope)
        return dq, (_einsum("bnst,bntk->bnsk", slope, q).astype(k.dtype), dv.astype(v.dtype))

    start = jnp.zeros(jnp.swapaxes(q, 2, 3).shape, jnp.float32)
    dq, (dk, dv) = jax.lax.scan(step, start, (k, v, valid))
    return jnp.swapaxes(dq, 2, 3).astype(q.dtype), dk, dv, None


_in_blocks.defvjp(_in_blocks_forward, _in_blocks_backward)


@jax.jit
def recomputed(q, k, valid):
    """Scores of the forward pass, as [B, N, S, T]: machine.flops leaves out what has this name."""
    return jnp.where(valid[:, None, :, None], _einsum("bnsk,bntk->bnst", k, q), _MASKED)


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _padded(x: Float[Array, "B S N K"], multiple: int) -> Float[Array, "B _ N K"]:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple), (0, 0), (0, 0)))


_IMPLEMENTATIONS: dict[str, Callable[[Array, Array, Array, Array | None], Array]] = {
    "xla": _xla,
    "blockwise": _blockwise,
    "splash": _splash,
    "cudnn": _cudnn,
}
IMPLEMENTATIONS = ("auto", *_IMPLEMENTATIONS)
