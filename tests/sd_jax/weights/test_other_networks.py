"""Files with other networks are errors of one line that name the network."""

import numpy as np
import pytest

from diffusion_jax.weights import torch_weights
from sd_jax import vae as vae_module
from sd_jax.unet import UNet
from sd_jax.vae import VAE
from sd_jax.weights import checkpoints, lora_files, names, opened, other_networks
from tests.diffusion_jax.weights import torch_writer

OTHERS = {
    "encoder.layers.0.self_attn.q_proj.weight": "a CLIP",
    "text_model.encoder.layers.0.self_attn.q_proj.weight": "a CLIP",
    "transformer.resblocks.0.attn.in_proj_weight": "a CLIP",
    "vision_model.head.probe": "a SigLIP",
    "encoder.block.0.layer.0.SelfAttention.q.weight": "a T5",
    "encoder.layer.0.attention.self.query.weight": "a BERT",
    "encoder.layer.0.attention.attention.query.weight": "a vision transformer",
    "model.layers.0.self_attn.q_proj.weight": "a language model",
    "decoder.layers.0.weight": "TAESD",
    "decoder.layers.1.conv.0.weight": "TAESD",
    "3.conv.0.weight": "TAESD",
    "encoder.conv1.weight": "the autoencoder of Wan",
    "decoder.up_blocks.0.resnets.0.norm1.gamma": "the autoencoder of Wan",
    "encoder.conv_in.conv.weight": "an autoencoder of videos such as LTX's",
    "quantize.embedding.weight": "a VQGAN",
    "decoder.mid_block.resnets.0.norm1.norm_layer.weight": "the autoencoder of Kandinsky",
    "encoder.stages.0.0.conv1.conv.weight": "an autoencoder such as DC-AE",
    "control_model.input_blocks.0.0.weight": "a ControlNet",
    "controlnet_cond_embedding.conv_in.weight": "a ControlNet",
    "body.0.block1.weight": "a T2I-Adapter",
    "adapter.body.0.resnets.0.block1.weight": "a T2I-Adapter",
    "image_proj.proj.weight": "an IP-Adapter",
    "768.0.linear.0.weight": "a hypernetwork",
    "model.0.weight": "an upscaler such as ESRGAN",
    "RRDB_trunk.0.RDB1.conv1.weight": "an upscaler such as ESRGAN",
    "body.0.rdb1.conv1.weight": "an upscaler such as ESRGAN",
    "down_blocks.0.motion_modules.0.proj_in.weight": "an AnimateDiff motion module",
    "lora_unet_a.lora_up.weight": "a LoRA",
    "unet.a.lora_A.weight": "a LoRA",
    "unet:0:up": "a LoRA",
    "emb_params": "a textual inversion embedding",
    "state.0.exp_avg": "the state of an optimizer",
    "concept_embeds": "a safety checker",
    "model.diffusion_model.double_blocks.0.img_attn.qkv.weight": "Flux",
    "single_transformer_blocks.0.attn.to_q.weight": "Flux",
    "model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight": "Stable Diffusion 3",
    "transformer_blocks.0.attn.add_q_proj.weight": "Stable Diffusion 3",
    "model.diffusion_model.label_emb.0.0.weight": "Stable Diffusion XL",
    "add_embedding.linear_1.weight": "Stable Diffusion XL",
    "conditioner.embedders.0.model.ln_final.weight": "the refiner of Stable Diffusion XL",
    "encoder_hid_proj.image_embeds.weight": "Kandinsky",
    "encoder_hid_proj.weight": "DeepFloyd IF",
    "adaln_single.linear.weight": "a diffusion transformer such as PixArt",
    "blocks.0.adaLN_modulation.1.weight": "a diffusion transformer such as PixArt",
    "down_blocks.0.temp_convs.0.conv1.weight": "a model of videos",
}
READERS = {
    "model": checkpoints.load,
    "VAE": lambda path: opened.read_vae(path, VAE()),
    "UNet": lambda path: opened.read_unet(path, UNet(), 768),
}


@pytest.mark.parametrize("use", READERS)
@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_network_is_an_error_that_names_it(tmp_path, name, use):
    path = tmp_path / "a.safetensors"
    torch_weights.write(path, {name: np.zeros((4, 4), np.float32)})
    with pytest.raises(ValueError, match=f"{path}: it holds {OTHERS[name]}") as error:
        READERS[use](path)
    assert str(error.value).endswith("instead of Stable Diffusion 1 or 2: choose another file")
    assert "\n" not in str(error.value)


def test_all_arrays_of_a_file_decide_which_model_its_unet_belongs_to(tmp_path):
    unet = "model.diffusion_model.label_emb.0.0.weight"
    refiner = "conditioner.embedders.0.model.ln_final.weight"
    torch_weights.write(tmp_path / "a.npz", dict.fromkeys((unet, refiner), np.zeros(1)))
    with pytest.raises(ValueError, match="it holds the refiner of Stable Diffusion XL instead"):
        checkpoints.load(tmp_path / "a.npz")


DAMAGED = {
    "nothing": {},
    "an unknown network": {"a.weight": (4, 4)},
    "half a VAE": {"encoder.conv_in.weight": (32, 3, 3, 3), "quant_conv.weight": (8, 8, 1, 1)},
    "a VAE without levels": {"encoder.norm_out.weight": (4,), "decoder.conv_in.weight": (4, 4)},
    "a VAE of diffusers without levels": {"encoder.conv_norm_out.weight": (4,)},
    "a UNet without levels": {"out.2.weight": (4, 4), "a.attn2.to_k.weight": (4, 4)},
    "a UNet with an empty array": {
        "out.2.weight": (4, 4),
        "a.attn2.to_k.weight": (4, 4),
        "input_blocks.0.0.weight": (0, 4, 3, 3),
        "input_blocks.1.0.emb_layers.1.bias": (4,),
    },
}


@pytest.mark.parametrize("use", [*READERS, "LoRA"])
@pytest.mark.parametrize("kind", DAMAGED)
def test_an_unknown_or_damaged_file_is_an_error_of_one_line(tmp_path, kind, use):
    state = {name: np.ones(shape, np.float32) for name, shape in DAMAGED[kind].items()}
    path = tmp_path / "a.safetensors"
    torch_weights.write(path, state)
    with pytest.raises(ValueError, match=str(path)) as error:
        (READERS | {"LoRA": lora_files.read})[use](path)
    assert "\n" not in str(error.value)


def test_names_that_are_numbers_are_read_as_strings(tmp_path):
    torch_writer.save(tmp_path / "a.pt", {0: np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match="is a LoRA of lora_diffusion, which numbers layers, not"):
        lora_files.read(tmp_path / "a.pt")


@pytest.mark.parametrize("dialect", ["ldm", "nemo", "diffusers"])
def test_no_network_of_stable_diffusion_is_taken_for_another(dialect):
    unet = UNet(32, (1, 2, 2), 2, (0, 1), transformer_depth=3, num_heads=8)
    vae = VAE(32, (1, 2), 2, attention_levels=(0, 1))
    vae_module.check(vae)
    table = names.unet_table(names.abstract_unet(unet, 8), unet, dialect)
    table += names.vae_table(names.abstract_vae(vae), vae, dialect)
    assert len(table) > 300 and other_networks.kind_of(e.torch for e in table) == ""
