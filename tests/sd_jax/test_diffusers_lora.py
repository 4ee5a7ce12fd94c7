"""Compare LoRA files with diffusers and peft: each side reads the other's, with equal outputs.

pip install torch diffusers transformers peft
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.config.settings import Lora
from diffusion_jax.weights import lora
from sd_jax.unet import UNet
from sd_jax.weights import checkpoints, lora_files, names
from tests import written_runs
from tests.sd_jax import written_models

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Warnings of diffusers.

OF_UNET = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "conv1", "ff.net.0.proj"]
UNET = UNet(32, (1, 2), 1, (0, 1), num_heads=8, linear_projections=False)
OF_TEXT = ["q_proj", "out_proj", "fc1"]
TOLERANCE = 1e-4  # Measured: below 1e-5.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written_models.write(tmp_path_factory.mktemp("model") / "d", UNET)


@pytest.fixture
def pipeline(folder):
    return diffusers.StableDiffusionPipeline.from_pretrained(folder, tokenizer=None)


def adapted(pipeline, rank=3, alpha=5):
    """Return the pipeline with random factors in its UNet and its text encoder."""
    for network, targets in ((pipeline.unet, OF_UNET), (pipeline.text_encoder, OF_TEXT)):
        network.add_adapter(peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets))
        generator = torch.Generator().manual_seed(0)
        for name, parameter in network.named_parameters():
            if "lora_" in name:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.data = 0.3 * drawn / parameter.shape[1] ** 0.5
    return pipeline


def states(pipeline):
    return [peft.get_peft_model_state_dict(n) for n in (pipeline.unet, pipeline.text_encoder)]


def outputs(pipeline):
    """Return inputs, and the outputs of the UNet and the text encoder for them."""
    rng = np.random.default_rng(0)
    x, text = rng.standard_normal((2, 4, 16, 24)), rng.standard_normal((2, 16, 24))
    ids = rng.integers(0, 40, (2, 16))
    of = lambda array: torch.tensor(array, dtype=torch.float32)
    with torch.no_grad():
        drawn = pipeline.unet(of(x), torch.tensor([3.0, 981.0]), of(text)).sample
        states = pipeline.text_encoder(torch.tensor(ids)).last_hidden_state
    return (x, text, ids), (drawn.numpy().transpose(0, 2, 3, 1), states.numpy())


def ours(opened, inputs):
    x, text, ids = inputs
    of = lambda part: jax.tree.map(jnp.asarray, part.params)
    arrays = jnp.asarray(x.transpose(0, 2, 3, 1), jnp.float32), jnp.array([3.0, 981.0])
    drawn = opened.unet.network.apply(of(opened.unet), *arrays, jnp.asarray(text, jnp.float32))
    return drawn, opened.text.tower.apply(of(opened.text), jnp.asarray(ids)).last


def close(a, b):
    error = np.abs(np.asarray(a) - b).max() / np.abs(b).max()
    print(f"relative error {error:.2e}")
    assert error < TOLERANCE


def write_peft(pipeline, folder):
    unet, text = states(pipeline)
    configs = {
        "unet_lora_adapter_metadata": pipeline.unet.peft_config["default"].to_dict(),
        "text_encoder_lora_adapter_metadata": pipeline.text_encoder.peft_config["default"].to_dict(),
    }
    pipeline.save_lora_weights(folder, unet_lora_layers=unet, text_encoder_lora_layers=text, **configs)
    return folder


def write_older(pipeline, folder):
    """Write names of diffusers before peft, without alpha: it is multiplied into upper factors."""
    from safetensors.torch import save_file

    renamed = {}
    for prefix, state in zip(("unet", "text_encoder"), states(pipeline), strict=True):
        for name, tensor in state.items():
            name = name.replace("lora_A", "lora.down").replace("lora_B", "lora.up")
            name = name.replace("base_model.model.", "")
            scale = 5 / 3 if "lora.up" in name else 1
            renamed[f"{prefix}.{name}"] = (scale * tensor).contiguous()
    folder.mkdir()
    save_file(renamed, folder / lora_files.FILE)
    return folder


def write_kohya(pipeline, folder):
    """Write names of kohya's scripts, converted by diffusers."""
    from safetensors.torch import save_file

    renamed = {}
    for prefix, state in zip(("lora_unet", "lora_te"), states(pipeline), strict=True):
        for name, tensor in state.items():
            layer, _, which = name.replace("base_model.model.", "").rpartition(".lora_")
            key = f"{prefix}_{layer.replace('.', '_')}"
            half = "lora_down" if which.startswith("A") else "lora_up"
            renamed[f"{key}.{half}.weight"] = tensor.contiguous()
            renamed[f"{key}.alpha"] = torch.tensor(5.0)
    folder.mkdir()
    save_file(renamed, folder / lora_files.FILE)
    return folder


@pytest.mark.parametrize("write", [write_peft, write_older, write_kohya])
@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_lora_files_of_diffusers_have_the_same_effect_on_our_networks(folder, pipeline, tmp_path, write, strength):
    written = write(adapted(pipeline), tmp_path / "lora")
    for network in (pipeline.unet, pipeline.text_encoder):
        for module in network.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.scale_layer(strength)
    inputs, theirs = outputs(pipeline)
    opened = checkpoints.load(folder)
    merged = lora_files.apply([f"{written}:{strength}"], opened)
    for a, b, before in zip(ours(merged, inputs), theirs, ours(opened, inputs), strict=True):
        close(a, b)
        assert np.abs(np.asarray(before) - b).max() > 0.05 * np.abs(b).max()
    if write is write_older:  # diffusers no longer reads these names.
        return
    again = diffusers.StableDiffusionPipeline.from_pretrained(folder, tokenizer=None)
    again.load_lora_weights(written)
    again.set_adapters(again.get_active_adapters(), strength)
    for a, b in zip(outputs(again)[1], theirs, strict=True):
        close(a, b)


PATTERNS = {
    "target_modules": OF_UNET,
    "rank_pattern": {"attn1.to_q": 3},
    "alpha_pattern": {"attn1.to_q": 2, r"down_blocks\..*\.to_k": 5},
}
CONFIGS = {
    "rsLoRA": lambda: peft.LoraConfig(r=2, lora_alpha=7, use_rslora=True, **PATTERNS),
    "DoRA": lambda: peft.LoraConfig(r=2, lora_alpha=7, use_dora=True, **PATTERNS),
    "LoHa": lambda: peft.LoHaConfig(r=2, alpha=7, use_effective_conv2d=True, **PATTERNS),
    "LoKr": lambda: peft.LoKrConfig(r=2, alpha=7, decompose_both=True, **PATTERNS),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_folder_saved_by_peft_has_the_same_effect_on_our_unet(folder, pipeline, tmp_path, kind):
    """Only adapter_config.json has ranks, alphas and rslora."""
    pipeline.unet = peft.get_peft_model(pipeline.unet, CONFIGS[kind]())
    torch.manual_seed(0)
    for name, parameter in pipeline.unet.named_parameters():
        if "lora_magnitude" in name:
            parameter.data *= 1 + 0.3 * torch.randn(parameter.shape)
        elif any(part in name for part in ("lora_", "hada_", "lokr_")):
            width = parameter[0].numel() if parameter.ndim > 1 else 1
            parameter.data = 0.5 * torch.randn(parameter.shape) / width**0.5
    pipeline.unet.save_pretrained(tmp_path)
    inputs, (theirs, _) = outputs(pipeline)
    opened = checkpoints.load(folder)
    merged = lora_files.apply([str(tmp_path)], opened)
    close(ours(merged, inputs)[0], theirs)
    before = np.asarray(ours(opened, inputs)[0])
    assert np.abs(before - theirs).max() > 0.05 * np.abs(theirs).max()


@pytest.mark.parametrize("dialect", lora_files.DIALECTS)
def test_our_lora_files_have_the_same_effect_in_diffusers(folder, pipeline, tmp_path, dialect):
    opened, s = checkpoints.load(folder), Lora(4, 6.0, "_attn/|conv1|skip")
    shapes = names.abstract_unet(opened.unet.network, opened.unet.text_width)
    factors = written_runs.random_params(lambda key: lora.init(key, shapes, s))
    factors = jax.tree.map(lambda leaf: leaf / 4, factors)  # About as large as the weights.
    path = tmp_path / lora_files.FILE
    lora_files.write(path, factors, s, opened.unet.network, dialect)
    pipeline.load_lora_weights(tmp_path)
    inputs, theirs = outputs(pipeline)
    merged = lora.merge(opened.unet.params, factors, s)
    unet = opened.unet._replace(params=merged)
    drawn, _ = ours(opened._replace(unet=unet), inputs)
    close(drawn, theirs[0])
    assert np.abs(np.asarray(ours(opened, inputs)[0]) - theirs[0]).max() > 0.05
