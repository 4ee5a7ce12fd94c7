"""Reading the weights of any run, including LoRA and learned weightings, to start another."""

import shutil

import jax
import numpy as np
import pytest

import imagen_jax
from diffusion_jax import runs
from diffusion_jax.devices import sharding
from diffusion_jax.diffusion.objective import LEARNED_WEIGHTING
from diffusion_jax.precache import lookup
from diffusion_jax.weights import finetune, lora
from imagen_jax import task, train
from imagen_jax.settings import read_settings
from imagen_jax.weights import convert, initial
from tests import written_runs
from tests.imagen_jax.commands import ROOT
from tests.imagen_jax.weights.test_convert import settings, tiny


def config(**changes):
    """Return the tiny model's config. lora__rank=2 sets config.lora.rank."""
    c = tiny()
    c.update(sample_every=0, steps=1)
    for name, value in changes.items():
        group, _, field = name.partition("__")
        c[group] = {**c.get(group, {}), field: value}
    return c


TARGETS = "_attn/|_res/conv"


def write(workdir, c, **kind):
    s = settings(c)
    whole = task.make_task(s, lookup.open_encoder(s.text))
    init = whole.init
    if s.lora.rank:
        init = lora.adapt(whole, kind["base"], s.lora).init
    return written_runs.write(workdir, c, read_settings, init, **kind)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run with a learned weighting, and its parameters."""
    workdir = tmp_path_factory.mktemp("base") / "run"
    return workdir, write(workdir, config(diffusion__weight="uncertainty(channels=4)"))


@pytest.fixture(scope="module")
def adapting(base, tmp_path_factory):
    """A LoRA run on `base`, and its factors."""
    workdir = tmp_path_factory.mktemp("lora") / "run"
    c = config(unet__weights=str(base[0]), lora__rank=2, lora__alpha=4.0, lora__targets=TARGETS)
    return workdir, write(workdir, c, seed=1, base={"params": base[1]["params"]})


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_run_with_a_learned_weighting_can_be_exported_and_start_another(base, tmp_path):
    workdir, params = base
    assert LEARNED_WEIGHTING in params
    network = {"params": params["params"]}
    convert.from_workdir(workdir, tmp_path / "a.npz")
    s = settings(config())
    same(initial.read_unet(tmp_path / "a.npz", s.unet, s.text.width), network)
    same(initial.read_unet(workdir, s.unet, s.text.width), network)
    same(initial.read_unet(f"{workdir}@0", s.unet, s.text.width), network)
    (model,) = imagen_jax.load(workdir).stages
    same(model.params, params)


def test_nemos_weights_are_converted_to_a_run_with_a_learned_weighting(base, tmp_path):
    convert.from_workdir(base[0], tmp_path / "a.npz")
    c = config(diffusion__weight="uncertainty(channels=4)")
    convert.to_workdir(tmp_path / "a.npz", c, tmp_path / "run")
    (model,) = imagen_jax.load(tmp_path / "run").stages
    same(model.params["params"], base[1]["params"])
    assert float(np.abs(model.params[LEARNED_WEIGHTING]["kernel"]).max()) == 0


def test_a_lora_run_is_merged_when_it_is_exported_or_starts_another(base, adapting, tmp_path):
    s = settings(config(lora__rank=2, lora__alpha=4.0, lora__targets=TARGETS))
    merged = lora.merge({"params": base[1]["params"]}, adapting[1], s.lora)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), merged["params"], base[1]["params"])
    # q, kv_self, kv_context and out in the middle, and two convolutions per residual block.
    assert sum(jax.tree.leaves(changed)) == 4 + 2 * 3
    same(initial.read_unet(adapting[0], s.unet, s.text.width), merged)
    convert.from_workdir(adapting[0], tmp_path / "a.npz", "raw")
    same(initial.read_nemo(tmp_path / "a.npz", s.unet, s.text.width), merged)


@pytest.mark.slow
def test_a_lora_draws_the_same_pictures_as_its_merged_weights(base, adapting, tmp_path):
    """They differ from pictures of the base model."""
    convert.from_workdir(adapting[0], tmp_path / "a.npz")
    convert.to_workdir(tmp_path / "a.npz", config(), tmp_path / "merged")
    load = lambda workdir, **values: imagen_jax.load(workdir, steps=2, **values)
    draw = lambda *run, **values: load(*run, **values).draw("a red seven", seeds=3).images.astype(int)
    apart, merged = draw(adapting[0]), draw(tmp_path / "merged")
    assert np.abs(apart - merged).max() <= 1  # The rounding of two programs.
    without = draw(base[0])
    np.testing.assert_array_equal(draw(adapting[0], lora_scale=0.0), without)
    assert np.abs(apart - without).max() > 20


def test_loading_a_lora_with_other_base_weights_is_an_error(base, adapting, tmp_path):
    write(tmp_path / "moved", config(), seed=0)
    write(tmp_path / "other", config(), seed=5)
    with pytest.raises(ValueError, match="adapts weights that differ from those in"):
        imagen_jax.load(adapting[0], unet_weights=str(tmp_path / "other"))
    (model,) = imagen_jax.load(adapting[0], unet_weights=str(base[0])).stages
    same(model.params, adapting[1])


def test_a_lora_can_be_exported_with_moved_base_weights(base, adapting, tmp_path):
    shutil.copytree(adapting[0], tmp_path / "run")
    config = tmp_path / "run" / runs.CONFIG
    config.write_text(config.read_text().replace(str(base[0]), str(tmp_path / "gone")))
    with pytest.raises(FileNotFoundError, match="gone"):
        convert.from_workdir(tmp_path / "run", tmp_path / "a.npz")
    convert.from_workdir(tmp_path / "run", tmp_path / "a.npz", base=str(base[0]))
    convert.from_workdir(adapting[0], tmp_path / "b.npz")
    with np.load(tmp_path / "a.npz") as a, np.load(tmp_path / "b.npz") as b:
        same(dict(a), dict(b))


def test_unet_weights_and_lora_select_the_start_of_training(base):
    mesh = sharding.make_mesh(1, 1, 1)

    def prepared(**changes):
        inputs = train.prepare(settings(config(**changes)), mesh)
        inputs.batches.close()
        return inputs

    inputs = prepared(unet__weights=str(base[0]))
    assert inputs.start is not None and not inputs.base
    same(inputs.start(), {"params": base[1]["params"]})
    inputs = prepared(unet__weights=str(base[0]), lora__rank=2)
    assert inputs.start is None and len(inputs.base) == 32
    same(inputs.task.frozen["base"], {"params": base[1]["params"]})
    with pytest.raises(ValueError, match=r"lora.rank is 2 and unet.weights is empty: name the model"):
        prepared(lora__rank=2)
    with pytest.raises(ValueError, match=r"has another architecture; .* arrays differ"):
        c = config(unet__weights=str(base[0]))
        c.unet.update(cond_dim=64)
        train.prepare(settings(c), mesh).start()


def test_converting_weights_with_lora_rank_set_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"lora.rank is 2, but only full weights can be converted"):
        convert.to_workdir("a.npz", config(lora__rank=2), tmp_path / "new")


def test_at_step_splits_a_path_and_a_step(tmp_path):
    assert finetune.at_step("runs/a@12") == ("runs/a", 12)
    assert finetune.at_step("runs/a@b") == ("runs/a@b", None)
    (tmp_path / "a@12" / runs.CHECKPOINTS).mkdir(parents=True)
    assert finetune.at_step(tmp_path / "a@12") == (str(tmp_path / "a@12"), None)
    assert finetune.at_step(tmp_path / "a@12@3") == (str(tmp_path / "a@12"), 3)


def test_starting_weights_with_another_prediction_are_an_error():
    shipped = ROOT / "models" / "emoji32"
    initial.check_prediction(shipped, "x0")
    with pytest.raises(ValueError, match=r"predicts 'x0', but diffusion\.predicts is 'edm'"):
        initial.check_prediction(f"{shipped}@14000", "edm")
