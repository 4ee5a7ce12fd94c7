"""Softmax attention: one function, `attend`, with implementations for each kind of device.

Shapes: B batch, T queries, S keys, N heads, K head dim, L text tokens.
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

from diffusion_jax.nn.ops import device_kind
from diffusion_jax.nn.ops import platform as _platform

ATTENTION = "attention"
"""The checkpoint_name of attention outputs and of the residuals that their gradient needs."""
_LANES = 128  # Vector lanes of a TPU: splash's block sizes are multiples of this number.
_BLOCK = 512  # Maximum number of queries, or of keys, in a block of scores.
_RESIDENT = 2048  # Maximum number of keys that splash holds in a TPU's vector memory.
_RESIDENT_LITE = 4096  # The maximum on TPU v5e and v6e, where kernels need less vector memory.
_WHOLE = 1536  # Maximum number of keys whose scores splash computes at once, in 16 bits.
_MASKED = -1e30  # Score of a masked key: finite, so that rows without keys have finite gradients.
_BLOCKWISE_SCORES = 2**14  # From this many scores per head, "blockwise" is faster on a CPU.


def attend(
    q: Float[Array, "B T N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    mask: Bool[Array, "B L"] | None = None,
    *,
    implementation: str = "auto",
) -> Float[Array, "B T N K"]:
    """Compute softmax(q k^T / sqrt(K)) v, with logits and softmax in float32.

    `mask` covers the last L keys, and is True at the valid ones. All keys before them are valid.
    The result is 0 for examples without any valid key. The implementations agree up to rounding:

    - "xla": computes all scores at once, on any device.
    - "blockwise": goes through the keys block by block (Rabe & Staats 2021; Dao 2022), on any
      device. Its memory grows with T + S instead of T * S.
    - "splash": the same algorithm, as JAX's TPU kernel. Other devices interpret it, for tests.
    - "cudnn": NVIDIA's kernel, for 16-bit dtypes and for K a multiple of 8 up to 128. It uses only
      the number of True values of each mask: put the valid keys first, with `valid_first`.
    - "auto": the fastest of these for the current device and the shapes.
    """
    num_unmasked = k.shape[1] - (0 if mask is None else mask.shape[1])
    if implementation == "auto":
        implementation = choose(q.shape[1], k.shape[1], q.shape[3], q.dtype)
    valid = None
    if mask is not None:
        valid = jnp.pad(mask, ((0, 0), (num_unmasked, 0)), constant_values=True)  # [B, S]
    out = checkpoint_name(_IMPLEMENTATIONS[implementation](q, k, v, valid), ATTENTION)
    if mask is None or num_unmasked:
        return out
    return jnp.where(mask.any(1)[:, None, None, None], out, 0)


def choose(queries: int, keys: int, head_dim: int, dtype: DTypeLike) -> str:
    """Return the name of the fastest implementation for these shapes on the current device.

    The device is that of the current mesh, or the default device without a mesh.
    """
    platform, is_16_bit = _platform(), jnp.dtype(dtype).itemsize == 2
    if platform == "tpu":
        return "splash" if is_16_bit and min(queries, keys) >= 2 * _LANES else "xla"
    if platform == "cpu":
        return "blockwise" if queries * keys >= _BLOCKWISE_SCORES else "xla"
    supported = is_16_bit and head_dim % 8 == 0 and head_dim <= 128
    return "cudnn" if supported and _has_cudnn() else "xla"


def counts_keys(implementation: str) -> bool:
    """Return whether an implementation may use only the number of valid keys, not their positions.

    If so, the caller must reorder the text tokens with `valid_first`.
    """
    auto_cudnn = implementation == "auto" and _platform() not in ("tpu", "cpu") and _has_cudnn()
    return implementation == "cudnn" or auto_cudnn


def valid_first(
    tokens: Float[Array, "B L D"], mask: Bool[Array, "B L"]
) -> tuple[Float[Array, "B L D"], Bool[Array, "B L"]]:
    """Return tokens and mask, with the tokens of each text reordered: the valid ones come first."""
    order = jnp.argsort(~mask, axis=1, stable=True)
    return (jnp.take_along_axis(tokens, order[:, :, None], axis=1), jnp.take_along_axis(mask, order, axis=1))


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
    """Run cuDNN's kernel on the first n keys of each example, where n is its number of valid keys.

    n is at least 1. Odd sequence lengths are padded, because JAX computes no gradients for them.
    The number of keys is passed even without a mask: otherwise cuDNN's gradients can be NaN if S is
    not a multiple of its tile size (NVIDIA/cudnn-frontend issue 160).
    """
    lengths = jnp.full(len(q), k.shape[1]) if valid is None else valid.sum(1)
    even = lambda x: jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))
    lengths = jnp.maximum(lengths, 1).astype(jnp.int32)  # [B]
    out = jax.nn.dot_product_attention(even(q), even(k), even(v), key_value_seq_lengths=lengths, implementation="cudnn")
    return out[:, : q.shape[1]]


def _splash(q: Array, k: Array, v: Array, valid: Array | None) -> Array:
    """Run JAX's splash kernel on all devices of the mesh.

    The compiler cannot partition a kernel. So each device calls the kernel on its share of the
    batch and, if the size of the mesh's tensor axis divides the number of heads, of the heads.
    """
    queries, keys = q.shape[1], k.shape[1]
    if valid is None and keys % _LANES:
        valid = jnp.ones(k.shape[:2], bool)
    q, k, v = _padded(q * q.shape[3] ** -0.5, _LANES), _padded(k, _LANES), _padded(v, _LANES)
    if valid is not None:
        valid = jnp.pad(valid, ((0, 0), (0, k.shape[1] - keys)))  # [B, padded S]
    mesh, call = jax.sharding.get_abstract_mesh(), _splash_kernel
    if not mesh.empty:
        ways = mesh.shape["replica"] * mesh.shape["fsdp"]
        batch = ("replica", "fsdp") if len(q) % ways == 0 else None
        heads = "tensor" if q.shape[2] % mesh.shape["tensor"] == 0 else None
        spec = P(batch, None, heads)
        call = jax.shard_map(call, in_specs=(spec, spec, spec, P(batch)), out_specs=spec, check_vma=False)
    return call(q, k, v, valid)[:, :queries]


def _splash_kernel(q: Array, k: Array, v: Array, valid: Array | None) -> Array:
    """Run JAX's splash kernel on one device.

    The arguments are q [B, T, N, K], already scaled, k and v [B, S, N, K], and valid [B, S] or
    None. T and S are multiples of 128. Masked keys get a segment that no query belongs to.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    (_, t, n, _), s = q.shape, k.shape[1]
    # The sizes are the fastest that fit into vector memory, by the compiler's bundle counts.
    small, kind = q.dtype.itemsize == 2 and q.shape[3] <= _LANES, device_kind()
    keys = _divisor(s, _RESIDENT_LITE if small and "lite" in kind else _RESIDENT)
    whole = small and keys <= _WHOLE
    rows = _divisor(t, 2 * _BLOCK if whole or (small and "v6" in kind) else _BLOCK)
    scores = keys if whole else _divisor(keys, _BLOCK if keys <= _RESIDENT else _BLOCK // 2)
    sizes = splash.BlockSizes(
        block_q=rows,
        block_kv=keys,
        block_kv_compute=scores,
        block_q_dkv=rows,
        block_kv_dkv=keys,
        block_kv_dkv_compute=scores,
        use_fused_bwd_kernel=True,  # It sums the gradient of q over key blocks outside the kernel.
    )
    kernel: Any = splash.make_splash_mha(
        masks.MultiHeadMask([masks.FullMask((t, s))] * n),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        interpret=_platform() != "tpu",
        residual_checkpoint_name=ATTENTION,
    )

    def attend_row(q, k, v, valid):
        if valid is None:
            return kernel(q, k, v)
        segments = splash.SegmentIds(q=jnp.ones(t, jnp.int32), kv=valid.astype(jnp.int32))
        return kernel(q, k, v, segment_ids=segments)

    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))  # [B, N, T or S, K]
    return jnp.swapaxes(jax.vmap(attend_row)(q, k, v, valid), 1, 2)  # [B, T, N, K]


def _divisor(length: int, limit: int) -> int:
    """Return the largest multiple of 128, at most `limit`, that divides `length`."""
    return max(size for size in range(_LANES, limit + 1, _LANES) if length % size == 0)


def _blockwise(q: Array, k: Array, v: Array, valid: Array | None) -> Array:
    """Compute attention block by block of keys. The keys are padded to blocks of equal size."""
    if valid is None:
        valid = jnp.ones(k.shape[:2], bool)
    blocks = -(-k.shape[1] // _BLOCK)
    k, v = _padded(k, blocks), _padded(v, blocks)
    valid = jnp.pad(valid, ((0, 0), (0, k.shape[1] - valid.shape[1])))
    split = lambda x: jnp.moveaxis(x.reshape(len(x), blocks, -1, *x.shape[2:]), 1, 0)
    q = jnp.swapaxes(q, 1, 2) * q.shape[3] ** -0.5  # [B, N, T, K]
    k, v = (jnp.swapaxes(split(x), 2, 3) for x in (k, v))  # [blocks, B, N, S / blocks, K]
    return jnp.swapaxes(_in_blocks(q, k, v, split(valid)), 1, 2)  # [B, T, N, K]


@jax.custom_vjp
def _in_blocks(q: Array, k: Array, v: Array, valid: Array) -> Array:
    """Compute attention block by block of keys, with memory for the scores of one block only.

    The arguments are q [B, N, T, K], already scaled, k and v [blocks, B, N, S, K], and valid
    [blocks, B, S], where S is the number of keys in a block. In the usual form, with the keys of
    all blocks in one axis s:

        scores = einsum("bntk,bnsk->bnts", q, k)
        weights = exp(scores - max(scores))
        out = einsum("bnts,bnsk->bntk", weights, v) / sum(weights)

    Here the maximum and both sums are accumulated over the blocks. Whenever a block raises the
    maximum, the sums so far are multiplied by exp(old maximum - new maximum).
    """
    return _in_blocks_forward(q, k, v, valid)[0]


def _in_blocks_forward(q, k, v, valid):
    def step(carry, block):
        top, total, out = carry  # [B, N, T] maximum, [B, N, T] and [B, N, T, K] sums so far
        k, v, valid = block
        scores = _einsum("bntk,bnsk->bnts", q, k)
        scores = jnp.where(valid[:, None, None], scores, _MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        shrink, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top[..., None])
        out = out * shrink[..., None] + _einsum("bnts,bnsk->bntk", weights.astype(v.dtype), v)
        return (new_top, total * shrink + weights.sum(-1), out), None

    zero = jnp.zeros(q.shape, jnp.float32)
    start = jnp.full_like(zero[..., 0], _MASKED), zero[..., 0], zero
    (top, total, out), _ = jax.lax.scan(step, start, (k, v, valid))
    out = checkpoint_name((out / total[..., None]).astype(q.dtype), ATTENTION)
    return out, (q, k, v, valid, out, checkpoint_name(top + jnp.log(total), ATTENTION))


def _in_blocks_backward(residuals, cotangent):
    """Compute the gradients of q, k and v in `_in_blocks`.

    The softmax weights are recomputed from the scores and from the log-sum-exp of each query's
    scores. In the usual form, with weights [B, N, T, S]:

        dv = einsum("bnts,bntk->bnsk", weights, cotangent)
        dscores = weights * (einsum("bntk,bnsk->bnts", cotangent, v) - sum(cotangent * out))
        dq = einsum("bnts,bnsk->bntk", dscores, k)
        dk = einsum("bnts,bntk->bnsk", dscores, q)

    Here the scores are [B, N, S, T], with keys as rows, because XLA's CPU backend sums over rows
    three times slower than over columns, and both dk and dv sum over queries. dq sums over keys, so
    it is computed transposed.
    """
    q, k, v, valid, out, log_total = residuals
    cotangent_dot_out = (cotangent.astype(jnp.float32) * out).sum(-1)[:, :, None]  # [B, N, 1, T]

    def step(dq, block):
        k, v, valid = block
        weights = jnp.exp(recomputed(q, k, valid) - log_total[:, :, None])  # [B, N, S, T]
        dv = _einsum("bnst,bntk->bnsk", weights.astype(v.dtype), cotangent)
        dscores = weights * (_einsum("bnsk,bntk->bnst", v, cotangent) - cotangent_dot_out)
        dscores = dscores.astype(k.dtype)
        dq = dq + _einsum("bnks,bnst->bnkt", jnp.swapaxes(k, 2, 3), dscores)
        return dq, (_einsum("bnst,bntk->bnsk", dscores, q).astype(k.dtype), dv.astype(v.dtype))

    start = jnp.zeros(jnp.swapaxes(q, 2, 3).shape, jnp.float32)
    dq, (dk, dv) = jax.lax.scan(step, start, (k, v, valid))
    return jnp.swapaxes(dq, 2, 3).astype(q.dtype), dk, dv, None


_in_blocks.defvjp(_in_blocks_forward, _in_blocks_backward)


@jax.jit
def recomputed(q, k, valid):
    """Recompute the attention scores of a block of keys, [B, N, S, T], for the backward pass.

    devices.flops finds this function by its name, and does not count its operations.
    """
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
