"""Implementations of attention match numpy and each other."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.devices import flops, sharding
from diffusion_jax.nn import attention, layers


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def attend(q, k, v, mask):
    """Compute attention in float64, one row, head and query at a time. `mask` covers all keys."""
    q, k, v = map(np.asarray, (q, k, v))
    out = np.zeros(q.shape)
    for b, t, n in np.ndindex(*q.shape[:3]):
        if mask[b].any():
            logits = k[b, mask[b], n].astype(np.float64) @ q[b, t, n] / np.sqrt(q.shape[-1])
            weights = np.exp(logits - logits.max())
            out[b, t, n] = weights @ v[b, mask[b], n] / weights.sum()
    return out


MASK = np.array([[True] * 5, [True, True, False, False, False], [False] * 5])


@pytest.fixture(params=attention.IMPLEMENTATIONS)
def implementation(request, monkeypatch):
    """Return each implementation in turn. XLA stands in for cuDNN, which needs a GPU."""
    plain = jax.nn.dot_product_attention

    def stand_in(q, k, v, *, implementation, mask=None, key_value_seq_lengths=None):
        if implementation == "xla":
            return plain(q, k, v, mask=mask, implementation="xla")
        assert key_value_seq_lengths is not None and key_value_seq_lengths.dtype == jnp.int32
        assert key_value_seq_lengths.min() >= 1  # A softmax over no key is undefined.
        assert q.shape[1] % 2 == k.shape[1] % 2 == 0  # jax requires this for gradients.
        return plain(q, k, v, key_value_seq_lengths=key_value_seq_lengths)

    if request.param == "cudnn":
        monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    return request.param


@pytest.mark.parametrize(("always", "queries"), [(0, 6), (4, 7)])
def test_attention_matches_numpy_also_for_a_text_without_tokens(always, queries, implementation):
    q, k = normal(3, queries, 2, 8), normal(3, always + 5, 2, 8, seed=1)
    v = normal(3, always + 5, 2, 8, seed=2)
    everything = np.pad(MASK, ((0, 0), (always, 0)), constant_values=True)
    out = attention.attend(q, k, v, jnp.asarray(MASK), implementation=implementation)
    np.testing.assert_allclose(out, attend(q, k, v, everything), atol=1e-6)
    np.testing.assert_array_equal(np.asarray(out[2] == 0).all(), not always)


def test_attention_without_a_mask_matches_numpy(implementation):
    q, k, v = normal(2, 6, 2, 8), normal(2, 7, 2, 8, seed=1), normal(2, 7, 2, 8, seed=2)
    out = attention.attend(q, k, v, implementation=implementation)
    np.testing.assert_allclose(out, attend(q, k, v, np.ones((2, 7), bool)), atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_over_blocks_of_keys_match_the_plain_softmax(implementation, dtype, monkeypatch):
    """300 keys do not fill their blocks of 128. In one row of MASK, no token is valid."""
    monkeypatch.setattr(attention, "_BLOCK", 128)
    q = normal(3, 131, 2, 8).astype(dtype)
    k, v = (normal(3, 300, 2, 8, seed=seed).astype(dtype) for seed in (1, 2))
    for mask in (None, jnp.asarray(MASK), jnp.sort(jnp.tile(MASK, 60), descending=True)):

        def loss(q, k, v, *, implementation, mask=mask):
            out = attention.attend(q, k, v, mask, implementation=implementation)
            return (out.astype(jnp.float32) ** 2).sum()

        gradients = jax.value_and_grad(loss, (0, 1, 2))
        both = [gradients(q, k, v, implementation=name) for name in (implementation, "xla")]
        tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
        for pair in zip(*map(jax.tree.leaves, both), strict=True):
            assert pair[0].dtype == pair[1].dtype
            ours, expected = (np.asarray(x, np.float32) for x in pair)
            np.testing.assert_allclose(ours, expected, atol=tolerance * np.abs(expected).max())


@pytest.fixture
def block_sizes(monkeypatch):
    """Record the block sizes that splash receives."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    sizes, make = [], splash.make_splash_mha
    record = lambda mask, block_sizes, **kind: sizes.append(block_sizes) or make(mask, block_sizes=block_sizes, **kind)
    monkeypatch.setattr(splash, "make_splash_mha", record)
    return sizes


@pytest.mark.parametrize(("kind", "keys"), [("TPU v5", 128), ("TPU v5 lite", 256)])
def test_splash_uses_larger_blocks_of_keys_on_tpus_with_more_memory(kind, keys, block_sizes, monkeypatch):
    """256 keys without a mask."""
    monkeypatch.setattr(attention, "device_kind", lambda: kind)
    monkeypatch.setattr(attention, "_RESIDENT", 128)
    monkeypatch.setattr(attention, "_RESIDENT_LITE", 256)
    q, k, v = (normal(1, 256, 1, 8, seed=seed).astype(jnp.bfloat16) for seed in range(3))

    def gradients(implementation):
        attend = lambda *qkv: attention.attend(*qkv, implementation=implementation)
        return jax.grad(lambda *qkv: (attend(*qkv).astype(jnp.float32) ** 2).sum(), (0, 1, 2))

    for one, other in zip(gradients("splash")(q, k, v), gradients("xla")(q, k, v), strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), atol=1e-2)
    assert {(s.block_kv, s.block_kv_dkv) for s in block_sizes} == {(keys, keys)}


@pytest.mark.parametrize(
    ("kind", "dtype", "length", "sizes"),
    [
        ("TPU v6 lite", "bfloat16", 4096, (1024, 4096, 256)),
        ("TPU v5 lite", "bfloat16", 4096, (512, 4096, 256)),
        ("TPU v5", "bfloat16", 4096, (512, 2048, 512)),
        ("TPU v5", "bfloat16", 1024, (1024, 1024, 1024)),
        ("TPU v6 lite", "float32", 4096, (512, 2048, 512)),
    ],
)
def test_splash_block_sizes_fit_into_the_memory_of_each_tpu(kind, dtype, length, sizes, block_sizes, monkeypatch):
    """`sizes` are queries, keys and keys per product. libtpu compiled these for each TPU."""
    monkeypatch.setattr(attention, "device_kind", lambda: kind)
    x = jax.ShapeDtypeStruct((1, length, 1, 64), dtype)
    jax.eval_shape(functools.partial(attention.attend, implementation="splash"), x, x, x)
    assert {(s.block_q, s.block_kv, s.block_kv_compute) for s in block_sizes} == {sizes}
    assert {(s.block_q_dkv, s.block_kv_dkv, s.block_kv_dkv_compute) for s in block_sizes} == {sizes}


def test_a_text_without_tokens_has_zero_gradients(implementation):
    q, k, v = normal(3, 6, 2, 8), normal(3, 5, 2, 8, seed=1), normal(3, 5, 2, 8, seed=2)
    attend = lambda q, k, v: attention.attend(q, k, v, jnp.asarray(MASK), implementation=implementation).sum()
    for gradient in jax.grad(attend, argnums=(0, 1, 2))(q, k, v):
        np.testing.assert_array_equal(gradient[2], 0)
        assert np.abs(gradient[0]).max() > 1e-3 and jnp.isfinite(gradient).all()


@pytest.mark.parametrize("implementation", ["splash", "blockwise"])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 8, 1)])
def test_attention_gradients_on_a_mesh_match_one_device(implementation, sizes):
    mesh = sharding.make_mesh(*sizes)
    q, k, v = (normal(8, 16, 2, 8, seed=seed) for seed in range(3))
    attend = lambda *qkv: attention.attend(*qkv, implementation=implementation)
    loss = lambda *qkv: (attend(*qkv) ** 2).sum()
    expected = jax.grad(loss, (0, 1, 2))(q, k, v)
    on_mesh = jax.jit(sharding.ambient(mesh, jax.grad(loss, (0, 1, 2))))
    where = sharding.batch_sharding(mesh)
    ours = on_mesh(*(sharding.place(np.asarray(x), where) for x in (q, k, v)))
    for gradient, one in zip(ours, expected, strict=True):
        np.testing.assert_allclose(gradient, one, atol=1e-5)
        assert gradient.sharding.spec[0] == ("replica", "fsdp")


@pytest.mark.parametrize("implementation", ["xla", "blockwise", "splash"])
def test_flops_of_attention_do_not_depend_on_the_implementation(implementation):
    """There are two matrix products forwards and four backwards. Recomputed ones do not count."""
    q, k, v = normal(2, 256, 3, 8), normal(2, 128, 3, 8), normal(2, 128, 3, 8)
    attend = lambda *qkv: attention.attend(*qkv, implementation=implementation).sum()
    product = 2 * 2 * 3 * 256 * 128 * 8
    assert flops.count(jax.make_jaxpr(attend)(q, k, v).jaxpr) == 2 * product
    gradient = jax.make_jaxpr(jax.grad(attend, (0, 1, 2)))(q, k, v)
    rows = 2 * 2 * 3 * 256 * 8 * (implementation == "splash")  # Splash sums out * d_out.
    assert flops.count(gradient.jaxpr) == 6 * product + rows


def test_auto_selects_the_fastest_implementation_of_each_platform(monkeypatch):
    monkeypatch.setattr(attention, "_has_cudnn", lambda: True)
    choose = lambda keys=1024, dtype=jnp.bfloat16, head_dim=64: attention.choose(1024, keys, head_dim, dtype)
    assert (choose(), choose(8)) == ("blockwise", "xla") and not attention.counts_keys("auto")
    monkeypatch.setattr(attention, "_platform", lambda: "tpu")
    assert (choose(), choose(8), choose(dtype=jnp.float32)) == ("splash", "xla", "xla")
    monkeypatch.setattr(attention, "_platform", lambda: "gpu")
    assert (choose(), choose(8), choose(dtype=jnp.float32)) == ("cudnn", "cudnn", "xla")
    assert (choose(head_dim=160), choose(head_dim=20)) == ("xla", "xla")
    assert attention.counts_keys("auto") and not attention.counts_keys("xla")
    monkeypatch.setattr(attention, "_has_cudnn", lambda: False)
    assert choose() == "xla" and not attention.counts_keys("auto")


def test_valid_first_moves_valid_tokens_to_the_front_in_order():
    tokens = jnp.arange(8.0).reshape(2, 4, 1)
    mask = jnp.array([[False, True, False, True], [False, False, False, True]])
    tokens, mask = attention.valid_first(tokens, mask)
    np.testing.assert_array_equal(tokens[..., 0], [[1, 3, 0, 2], [7, 4, 5, 6]])
    np.testing.assert_array_equal(mask, [[1, 1, 0, 0], [1, 0, 0, 0]])


def test_to_heads_and_from_heads_equal_a_dense_layer_and_a_reshape():
    x, key = normal(2, 5, 12), jax.random.key(0)
    apart, plain = layers.ToHeads(3, 4, 8), nn.Dense(3 * 4 * 8)
    params = apart.init(key, x)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, plain.init(key, x))
    q, k, v = apart.apply(params, x)
    expected = plain.apply(params, x).reshape(2, 5, 3, 4, 8)
    np.testing.assert_allclose(jnp.stack([q, k, v], 2), expected, atol=1e-6)

    together, plain = layers.FromHeads(6), nn.Dense(6)
    params = together.init(key, q)
    expected = plain.apply(params, q.reshape(2, 5, 32))
    np.testing.assert_allclose(together.apply(params, q), expected, atol=1e-6)
