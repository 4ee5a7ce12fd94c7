"""NeMo's weights give NeMo's numbers: saved cases, a second derivation in numpy, name tables."""

import functools
import gzip
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax import torch_weights
from imagen_jax import attention, conditioning, layers, weights
from imagen_jax.unet import UNet
from tests.imagen_jax import numpy_unet

ROOT = pathlib.Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
SHARED = sorted((ROOT.parent / "shared" / "oracles" / "imagen").glob("*.npz"))
SHARED = [
    path
    for path in SHARED
    if path.name.startswith(("base_", "srunet_")) and path.stem != "srunet_fused_aug"  # Below.
]

SMALL = dict(
    embed_dim=32,
    image_size=8,
    channel_mult=[1, 2],
    num_res_blocks=1,
    per_head_channels=16,
    cond_dim=64,
    learned_sinu_pos_emb_dim=0,
    attention_resolutions=[4],
)
TINY = {"unet": SMALL | dict(image_size=4, channel_mult=[1])}
OPTIONS = {
    # Learned times twice, one block more below, resolutions that no level has (5 is none, 32 is
    # above all), not square, and a low-res image that has its full size already.
    "fused": dict(
        unet_type="sr-unet",
        noise_cond_aug=True,
        unet=SMALL
        | dict(
            low_res_cond=True,
            learned_sinu_pos_emb_dim=6,
            feature_pooling_type="mean",
            num_res_blocks=[1, 2],
            attention_resolutions=[32, 8, 5],
            flash_attention=True,
        ),
    ),
    # Blocks up and down next to attention (8) and not (4); the null token with pooled attention.
    "stacked": dict(
        unet=SMALL
        | dict(
            attention_type="stacked",
            resblock_updown=True,
            scale_shift_norm=False,
            use_null_token=True,
            init_conv_kernel_size=7,
            attention_resolutions=[8],
        ),
    ),
    # A level without blocks, widths that fall and rise, average pooling, and a text width that
    # group normalisation could not divide.
    "self": dict(
        unet=SMALL
        | dict(
            attention_type="self",
            embed_dim=16,
            channel_mult=[4, 2, 6],
            num_res_blocks=[1, 0, 1],
            cond_dim=40,
            resample_with_conv=False,
        )
    ),
    # A base model that takes a low-res image; the deepest level has no block of its own.
    "cross": dict(
        unet_type="base",
        unet=SMALL
        | dict(
            attention_type="cross",
            low_res_cond=True,
            noise_cond_aug=True,
            channel_mult=[2, 1, 2],
            num_res_blocks=[2, 1, 0],
            attention_resolutions=[8, 2],
        ),
    ),
}
SIZES = {"fused": (8, 12), "cross": (16, 8)}


@pytest.fixture(autouse=True)
def compile_unoptimised(monkeypatch):
    """Halves the time of this file: tiny programs compile longer than they run."""
    options = {"xla_backend_optimization_level": 0}
    monkeypatch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=options))


def random_weights(unet, text_width):
    """A state dict whose every array matters: kernels keep variance, norms are near 1."""
    rng = np.random.default_rng(0)
    zeros = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, np.float32), weights.abstract_params(unet, text_width)
    )
    state = torch_weights.to_state_dict(zeros, weights.unet_table(unet))
    for entry in weights.unet_table(unet):
        w = rng.normal(size=state[entry.torch].shape)
        if entry.path.endswith(("bias", "scale")):
            w = w / 10 + entry.path.endswith("scale")
        elif w.ndim > 1:
            w = w / np.sqrt(np.prod(w.shape[1:]))
        state[entry.torch] = w.astype(np.float32)
    return state


def random_case(config, *, size=None, text_width=40):
    """A case in the oracles' format whose outputs are numpy's, in float64."""
    unet = weights.unet_from_nemo_config(config)
    height, width = size or (unet.image_size, unet.image_size)
    state, rng = random_weights(unet, text_width), np.random.default_rng(1)
    inputs = {
        "x": rng.normal(size=(3, 3, height, width)),
        "time": np.array([-1.3, 0.2, 0.9]),
        "text_embed": rng.normal(size=(3, 7, text_width)),
        "text_mask": np.arange(7) < np.array([[7], [3], [0]]),
    }
    if unet.low_res:
        inputs["x_low_res"] = rng.normal(size=(3, 3, height, width))
    if unet.noise_aug:
        inputs["time_low_res"] = np.array([-0.5, 0.1, 0.4])
    double = {name: array.astype(np.float64) for name, array in state.items()}
    y = numpy_unet.forward(config, double, **inputs)
    no_text = inputs | {"text_embed": np.zeros_like(inputs["text_embed"])}
    null = numpy_unet.forward(config, double, **no_text)
    case = {"config": np.array(json.dumps(config)), "out/y": y, "out/y_cfg3": null + 3 * (y - null)}
    case |= {f"in/{name}": array for name, array in inputs.items()}
    return case | {f"sd/{name}": array for name, array in state.items()}


@pytest.fixture(scope="module")
def tiny_case():
    return random_case(TINY)


def test_a_case_of_the_reference_gives_its_numbers():
    case = torch_weights.read(FIXTURES / "unet_srunet_fused_aug.npz")
    errors = weights.verify(case)
    assert errors["parameters"] == 872_116
    assert None not in errors.values() and weights.within_tolerance(errors), errors


@pytest.mark.skipif(not SHARED, reason="the saved cases beside the project are not here")
@pytest.mark.parametrize("path", SHARED, ids=lambda path: path.stem)
def test_every_case_at_hand_gives_its_numbers(path):
    errors = weights.verify(torch_weights.read(path))
    assert None not in errors.values() and weights.within_tolerance(errors), errors


@pytest.mark.parametrize("name", OPTIONS)
def test_options_together_give_numpys_numbers(name):
    case = random_case(OPTIONS[name], size=SIZES.get(name))
    errors = weights.verify(case)
    # numpy computes in float64: what is left is our own rounding, of sums of some 1,000 float32
    # terms of size 1 (about 1e-6), and five times that under guidance 3.
    assert errors["max_abs_error"] < 1e-5 and errors["cfg_max_abs_error"] < 2e-5, errors
    assert np.abs(case["out/y_cfg3"] - case["out/y"]).max() > 0.1  # The text matters.


def test_blocks_of_the_reference_give_their_numbers():
    """Learned times, mean pooling, the null token, stacked attention, no scale and shift."""
    case = torch_weights.read(FIXTURES / "unet_base_options_half.npz")
    unet = weights.unet_from_nemo_config(json.loads(case["config"].item()))
    params = {}
    for entry in weights.unet_table(unet):
        if f"sd/{entry.torch}" in case:
            *groups, leaf = entry.path.split("/")[1:]
            node = params
            for group in groups:
                node = node.setdefault(group, {})
            node[leaf] = jnp.asarray(entry.layout.to_jax(case[f"sd/{entry.torch}"]))

    def act(name):
        return jnp.asarray(case[f"act/{name}"])

    def images(name):
        return jnp.moveaxis(act(name), 1, -1)

    def apply(block, name, *args):
        return jax.jit(block.apply)({"params": params[name]}, *args)

    close = lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-5)
    time = conditioning.TimeEmbed(32, unet.learned_time_dim)
    close(apply(time, "time_embed", jnp.asarray(case["in/time"])), act("time_embed"))
    pooled = act("text_to_cond").mean(1)
    text = conditioning.TextEmbed(128)
    close(apply(text, "text_embed", pooled), act("to_text_non_attn_cond"))

    emb = act("time_embed") + act("to_text_non_attn_cond")
    res = lambda width, how="": layers.ResBlock(width, how, scale_shift=False)
    first = apply(res(32), "down_0_0_res", images("init_conv"), emb)
    close(first, images("input_blocks.1"))
    halved = apply(res(32, "down"), "down_0_resample", images("input_blocks.1"), emb)
    close(halved, images("input_blocks.2"))
    null = jnp.broadcast_to(params["null_token"], (3, 1, 64))
    context = jnp.concatenate([act("text_to_cond"), null], axis=1)
    mask = jnp.pad(jnp.asarray(case["in/text_mask"]) != 0, ((0, 0), (0, 1)), constant_values=True)
    h = apply(res(64), "down_1_0_res", images("input_blocks.2"), emb)
    h = apply(attention.StackedAttention(16), "down_1_0_attn", h, context, mask)
    close(h, images("input_blocks.3"))


NEMO = dict(
    per_head_channels=64,
    learned_sinu_pos_emb_dim=0,
    cond_dim=512,
    attention_type="fused",
    attention_resolutions=[8, 16, 32],
    num_attn_heads=4,
)
BASE64_500M = {"unet": NEMO | dict(embed_dim=256, image_size=64)}
BASE64_2B = {"unet": NEMO | dict(embed_dim=512, image_size=64, cond_dim=2048)}
SR256_400M = dict(
    unet_type="sr-unet",
    noise_cond_aug=True,
    unet=NEMO
    | dict(
        embed_dim=128,
        image_size=256,
        channel_mult=[1, 2, 4, 6, 6],
        num_res_blocks=[2, 2, 3, 4, 3],
        attention_resolutions=[32, 16],
        low_res_cond=True,
    ),
)


def stacked(config):
    return config | {
        "noise_cond_aug": False,
        "unet": config["unet"] | {"attention_type": "stacked"},
    }


def shapes_in_torch(config):
    """NeMo's names and shapes, without making a single weight, and the number of parameters."""
    unet = weights.unet_from_nemo_config(config)
    params = weights.abstract_params(unet, text_width=1024)
    zeros = jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0), leaf.shape), params)
    leaves = jax.tree.leaves_with_path(zeros)
    arrays = {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in leaves}
    table = weights.unet_table(unet)
    assert sorted(entry.path for entry in table) == sorted(arrays)
    shapes = {entry.torch: list(entry.layout.to_torch(arrays[entry.path]).shape) for entry in table}
    return shapes, sum(leaf.size for leaf in arrays.values())


@pytest.mark.parametrize(
    ("name", "config", "parameters"),
    [
        ("base64_500m", BASE64_500M, 524_897_540),
        ("base64_2b", BASE64_2B, 2_171_162_116),
        ("sr256_400m", SR256_400M, 408_350_468),
        (None, SR256_400M | {"noise_cond_aug": False}, 408_021_764),
        (None, stacked(SR256_400M), 568_675_844),
    ],
)
def test_full_models_have_the_reference_names_shapes_and_counts(name, config, parameters):
    shapes, count = shapes_in_torch(config)
    assert count == parameters
    if name:
        text = gzip.decompress((FIXTURES / "param_tables" / f"{name}.txt.gz").read_bytes()).decode()
        rows = (line.split("\t") for line in text.splitlines())
        assert shapes == {name: json.loads(shape) for name, shape in rows}


def test_params_go_to_nemo_and_back_bit_for_bit():
    unet = weights.unet_from_nemo_config(OPTIONS["stacked"])
    state = random_weights(unet, 40)
    params = weights.from_nemo(state, unet, 40)
    back = weights.to_nemo(params, unet)
    np.testing.assert_array_equal(back["input_blocks.0.0.weight"], state["init_conv.0.weight"])
    assert back.keys() - state.keys() == {"input_blocks.0.0.weight", "input_blocks.0.0.bias"}
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array, strict=True)
    again = weights.from_nemo(back, unet, 40)
    jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.fixture(scope="module")
def tiny():
    """(UNet, state dict, params), the text 40 wide."""
    unet = weights.unet_from_nemo_config(TINY)
    state = random_weights(unet, 40)
    return unet, state, weights.from_nemo(state, unet, 40)


@pytest.mark.parametrize("prefix", ["model.model.unet._orig_mod.", "unet."])
def test_names_may_have_nemos_prefixes(tiny, prefix):
    unet, state, params = tiny
    prefixed = {prefix + name: array for name, array in state.items()}
    loaded = weights.from_nemo(prefixed, unet, 40)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_the_first_layer_may_have_either_of_its_names_or_both_but_one_value(tiny):
    unet, _, params = tiny
    both = weights.to_nemo(params, unet)
    alias = {name: array for name, array in both.items() if not name.startswith("init_conv")}
    jax.tree.map(np.testing.assert_array_equal, weights.from_nemo(alias, unet, 40), params)
    both["input_blocks.0.0.bias"] = both["input_blocks.0.0.bias"] + 1
    with pytest.raises(
        ValueError, match=r"input_blocks\.0\.0\.bias and init_conv\.0\.bias are one"
    ):
        weights.from_nemo(both, unet, 40)


def test_two_models_in_one_state_dict_are_an_error(tiny):
    unet, state, _ = tiny
    with pytest.raises(ValueError, match=f"holds {len(state) + 1} keys of only {len(state)} names"):
        weights.from_nemo(state | {"ema.unet.out.2.bias": state["out.2.bias"]}, unet, 40)


def test_weights_of_another_config_are_an_error_that_names_keys(tiny):
    unet, state, _ = tiny
    null = weights.unet_from_nemo_config({"unet": TINY["unet"] | {"use_null_token": True}})
    with pytest.raises(
        ValueError, match="1 keys are missing: null_text_embedding; 0 keys are left"
    ):
        weights.from_nemo(state, null, 40)
    with pytest.raises(ValueError, match=re.escape("text_to_cond.weight (64, 40) where the model")):
        weights.from_nemo(state, unet, 48)


def test_a_config_has_nemos_defaults():
    unet = weights.unet_from_nemo_config({"unet": {"embed_dim": 64, "image_size": 32}})
    assert unet == UNet(
        image_size=32,
        embed_dim=64,
        channel_mult=(1, 2, 3, 4),
        num_res_blocks=3,
        attention_resolutions=(8, 16, 32),
        attention="fused",
        head_dim=64,
        cond_dim=512,
        text_pooling="attention",
        learned_time_dim=16,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unet_type": "sr"}, "unet_type 'sr' is not known here: it must be 'base' or 'sr-unet'"),
        ({"unet": {"cond_dim": 64}}, "lacks image_size and embed_dim, which have no default"),
        ({"unet": SMALL | {"per_head_channels": -1}}, "unet.head_dim -1 does not divide"),
        ({"unet": SMALL | {"attention_type": "flash"}}, "unet.attention is 'flash'"),
    ],
)
def test_a_config_that_cannot_be_built_says_why(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        weights.unet_from_nemo_config(TINY | change)


def run_main(case, tmp_path, capsys):
    """(exit code, stdout, stderr) of `verify`."""
    np.savez(tmp_path / "case.npz", **case)
    with pytest.raises(SystemExit) as exit:
        weights.main(["weights", "verify", str(tmp_path / "case.npz")])
    return exit.value.code, *capsys.readouterr()


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_verify_prints_one_line_of_json(tiny_case, tmp_path, capsys, dtype):
    case = tiny_case | {"in/text_mask": tiny_case["in/text_mask"].astype(dtype)}
    code, out, _ = run_main(case, tmp_path, capsys)
    assert code == 0 and out.count("\n") == 1
    errors = json.loads(out)
    assert list(errors) == [*weights.TOLERANCE, "parameters"]
    assert errors["max_abs_error"] < 1e-5 and errors["grad_max_abs_error"] is None
    assert errors["parameters"] == sum(a.size for n, a in case.items() if n.startswith("sd/"))


def test_verify_fails_where_a_single_weight_is_off(tiny_case, tmp_path, capsys):
    name = "sd/middle_block.1.kv_context.bias"
    changed = tiny_case[name].copy()
    changed[-1] += 1e-2
    code, out, _ = run_main(tiny_case | {name: changed}, tmp_path, capsys)
    assert code == 1 and json.loads(out)["max_abs_error"] > 3e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": None, "in/time": None}, "the case lacks config, in/time: it holds in/text"),
        ({"grad/x": np.zeros((3, 3, 4, 4))}, "the case lacks in/cot"),
        ({"out/y": np.zeros((3, 3, 4, 8))}, "output is (3, 4, 8, 3), and ours (3, 4, 4, 3)"),
        ({"config": np.array("{")}, "Expecting property name"),
        (
            {"config": np.array(json.dumps(TINY | {"unet_type": "sr-unet"}))},
            "the case lacks in/x_low_res, which its config asks for",
        ),
    ],
)
def test_verify_says_what_is_wrong_with_a_case(tiny_case, tmp_path, capsys, change, message):
    case = {name: a for name, a in (tiny_case | change).items() if a is not None}
    code, out, err = run_main(case, tmp_path, capsys)
    assert code == 2 and not out
    assert err.startswith(f"error: cannot verify {tmp_path / 'case.npz'}: ") and message in err


def test_not_a_number_is_not_within_tolerance():
    errors = {"max_abs_error": 1e-6, "cfg_max_abs_error": None, "grad_max_abs_error": 9e-5}
    assert weights.within_tolerance(errors)
    assert not weights.within_tolerance(errors | {"max_abs_error": float("nan")})
    assert not weights.within_tolerance(errors | {"grad_max_abs_error": 1.1e-4})
