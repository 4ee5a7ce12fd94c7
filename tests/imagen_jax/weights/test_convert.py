"""Converting NeMo's checkpoints to workdirs and back, bit for bit, and errors."""

import io
import json
import pathlib
import re
import tarfile

import jax
import numpy as np
import pytest

import imagen_jax
from configs import base64_500m, sr256_600m
from diffusion_jax import runs
from diffusion_jax.config.settings import Data
from diffusion_jax.data import pipeline
from diffusion_jax.data.sources import open_pictures
from diffusion_jax.precache import lookup
from diffusion_jax.train import checkpoint, optimizer
from diffusion_jax.train.state import init_state
from diffusion_jax.weights import torch_files
from imagen_jax import task
from imagen_jax.settings import read_settings
from imagen_jax.weights import convert, nemo
from tests.imagen_jax.cases import ONE_LEVEL, random_weights
from tests.imagen_jax.weights.test_nemo import SR256_600M

FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures"


def tiny():
    """Return the config of a tiny model with attention only in the middle."""
    c = base64_500m.get_config()
    c.unet.update(ONE_LEVEL, image_size=16, dtype="float32")
    c.text.update(encoder="hashed", width=32, max_tokens=6)
    c.data.update(source="diffusion_jax.examples.digits", path="", text="txt", threads=0)
    c.batch_size, c.prompts = 8, ("a red seven on gray paper",)
    return c


def settings(config):
    return read_settings(config.to_dict())


@pytest.fixture(scope="module")
def nemos():
    """Return a state dict with NeMo's names and prefix, and its average."""
    s = settings(tiny())
    state = random_weights(s.unet, s.text.width)
    raw = {nemo.PREFIX + name: array for name, array in state.items()}
    return raw, {name: array + 1 for name, array in raw.items()}


@pytest.fixture(scope="module")
def converted(nemos, tmp_path_factory):
    """A workdir converted from NeMo's weights and their average."""
    folder = tmp_path_factory.mktemp("nemo")
    for name, state in zip(("model", "model-EMA"), nemos, strict=True):
        np.savez(folder / f"{name}.npz", **state)
    convert.to_workdir(folder / "model.npz", tiny(), folder / "workdir")
    return folder / "workdir"


@pytest.mark.parametrize(("ema", "which"), [("raw", 0), ("ema", 1), ("0.9999", 1)])
def test_a_nemo_checkpoint_and_its_average_are_converted_to_a_workdir(nemos, converted, ema, which):
    (model,) = imagen_jax.load(converted, ema=ema).stages
    s = settings(tiny())
    assert model.settings.unet == s.unet and model.step == 0
    expected = nemo.from_nemo(nemos[which], s.unet, s.text.width)
    jax.tree.map(np.testing.assert_array_equal, model.params, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x + 1, r"the weights 'raw' read back from .* differ from the converted weights"),
        (lambda x: x * np.nan, r"the weights 'raw' read back from .* differ from"),
    ],
)
def test_check_written_detects_every_changed_bit(nemos, converted, change, message):
    s = settings(tiny())
    weights = nemo.from_nemo(nemos[0], s.unet, s.text.width)
    convert.check_written(converted, s, {"raw": weights})
    path = ("params", "out_conv", "bias")
    weights[path[0]][path[1]][path[2]] = change(weights[path[0]][path[1]][path[2]])
    with pytest.raises(ValueError, match=message):
        convert.check_written(converted, s, {"raw": weights})


def test_weights_with_outputs_that_are_not_finite_are_an_error(nemos, tmp_path):
    state = dict(nemos[0])
    bias = f"{nemo.PREFIX}init_conv.0.bias"
    state[bias] = np.full_like(state[bias], 3e38)  # Finite numbers whose sum overflows.
    np.savez(tmp_path / "nan.npz", **state)
    with pytest.raises(ValueError, match=r"with the weights 'raw' read back from .* are not finite or differ"):
        convert.to_workdir(tmp_path / "nan.npz", tiny(), tmp_path / "workdir")


def test_training_can_start_from_a_converted_workdir(converted):
    s, c = settings(tiny()), tiny()
    create = lambda key: init_state(
        task.make_task(s, lookup.open_encoder(s.text)).init(key),
        optimizer.make_optimizer(s.optimizer, s.run.steps),
        s.optimizer.ema_decays,
    )
    abstract = jax.eval_shape(create, jax.random.key(0))
    digits = open_pictures(Data("diffusion_jax.examples.digits"), 16)
    tokenize = lookup.open_encoder(s.text).tokenize
    batches = pipeline.make_batches(digits, tokenize, batch_size=8, seed=c.seed, num_threads=0)
    checkpoints = checkpoint.Checkpointer(converted / runs.CHECKPOINTS, keep_last=1)
    with batches:
        state = checkpoints.restore(abstract, batches)
        assert json.loads(batches.get_state())["samples"] == 0
    checkpoints.close()
    fresh = init_state(state.params, optimizer.make_optimizer(s.optimizer, s.run.steps), ())
    assert int(state.step) == int(state.skipped) == 0
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, fresh.opt_state)


@pytest.mark.parametrize("suffix", convert.FORMATS)
def test_exporting_a_run_to_nemo_is_exact(nemos, converted, tmp_path, suffix):
    convert.from_workdir(converted, tmp_path / f"a{suffix}", "raw")
    state = torch_files.read_state_dict(tmp_path / f"a{suffix}")
    again = {f"{nemo.PREFIX}input_blocks.0.0.{part}" for part in ("weight", "bias")}
    assert state.keys() - nemos[0].keys() == again
    for name, array in nemos[0].items():
        np.testing.assert_array_equal(state[name], array)
    # No temporary file is left.
    assert [path.name for path in tmp_path.iterdir()] == [f"a{suffix}"]


def test_a_conversion_killed_before_its_check_is_repeated(converted, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(*arguments):
        raise Killed

    source, workdir = converted.parent / "model.npz", tmp_path / "workdir"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(convert, "check_written", kill)
        convert.to_workdir(source, tiny(), workdir)
    assert (workdir / "unfinished").exists()
    convert.to_workdir(source, tiny(), workdir)
    assert not (workdir / "unfinished").exists()
    with pytest.raises(ValueError, match="holds checkpoints already: name a new folder"):
        convert.to_workdir(source, tiny(), workdir)


def test_weights_of_another_model_leave_no_workdir(tmp_path):
    with pytest.raises(ValueError, match=r"lightning.ckpt: the state dict does not fit the model"):
        convert.to_workdir(FIXTURES / "lightning.ckpt", tiny(), tmp_path / "new")
    assert not (tmp_path / "new").exists()


SR = SR256_600M | {"preconditioning_type": "EDM"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"preconditioning_type": "DDPM"}, "diffusion.predicts: 'edm' in the config, 'ddpm' in "),
        (
            {"unet": SR["unet"] | {"skip_connection_scaling": False}},
            "unet.scale_skips: True in the config, False in the",
        ),
        ({"unet": SR["unet"] | {"per_head_channels": 32}}, "unet.head_dim: 64 in the config, 32 in"),
    ],
)
def test_settings_that_differ_from_nemos_config_are_an_error(tmp_path, change, message):
    s = settings(sr256_600m.get_config())
    convert.check_nemo_config(SR, s)
    with pytest.raises(ValueError, match=re.escape(message)):
        convert.check_nemo_config(SR | change, s)
    with tarfile.open(tmp_path / "a.nemo", "w") as tar:  # JSON is valid YAML.
        content = json.dumps(SR | change).encode()
        info = tarfile.TarInfo("./model_config.yaml")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    with pytest.raises(ValueError, match=re.escape(message)):
        convert.to_workdir(tmp_path / "a.nemo", sr256_600m.get_config(), tmp_path / "new")


def test_exports_that_nemo_does_not_support_are_errors(converted, tmp_path):
    with pytest.raises(ValueError, match=r"the name must end in \.safetensors or \.npz"):
        convert.from_workdir(converted, tmp_path / "a.bin")
    with pytest.raises(ValueError, match=r"no average '0\.5'"):
        convert.from_workdir(converted, tmp_path / "a.npz", "0.5")
    config = json.loads((converted / "config.json").read_text())
    config["unet"]["patch"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"unet.patch is 2, but NeMo's networks have no patches"):
        convert.from_workdir(tmp_path, tmp_path / "a.npz")
