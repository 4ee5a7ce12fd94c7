"""Name networks other than Stable Diffusion's by the names of their arrays, for error messages."""

import re
from collections.abc import Iterable

_LORA = "a LoRA (which --lora reads)"
_EMBEDDING = "a textual inversion embedding (which --embedding reads)"
_CLIP = "a CLIP (whose folder --text_weights reads)"
_KINDS = (
    # Additions to a model.
    ("the state of an optimizer", r"\bexp_avg(_sq)?\b|\bmomentum_buffer\b"),
    ("a hypernetwork", r"^(320|640|768|1024|1280)\.\d\.linear"),
    ("an IP-Adapter", r"^(image_proj|ip_adapter)\.|\bto_[kv]_ip\b"),
    ("a ControlNet", r"\bcontrol_model\.|\bcontrolnet_|_controlnet$|\blllite_|\bzero_convs\."),
    ("a T2I-Adapter", r"^adapter\.|\bbody\.\d+\.(.+\.)?(block1|in_conv)\."),
    ("an AnimateDiff motion module", r"\bmotion_modules?\."),
    (_LORA, r"\b(lora|lycoris|hada|lokr|oft)_|[._]lora\.|^(unet|text_encoder):\d+:"),
    (_EMBEDDING, r"^(\*|emb_params|clip_[lg])$|\bstring_to_param\b"),
    # Networks that predict the noise.
    ("Flux", r"(\b|_)(double|single)_(blocks|transformer_blocks)[._]"),
    ("Qwen-Image", r"\bimg_mod\."),
    ("Stable Diffusion 3", r"(\b|_)joint_blocks[._]|[._]add_q_proj|\bcontext_embedder\."),
    ("Stable Cascade or Wuerstchen", r"\bclip_txt_(pooled_)?mapper\.|\beffnet_mapper\."),
    ("LTX-Video", r"\bpatchify_proj\."),
    ("Wan", r"\btext_embedding\.0\.|\bcondition_embedder\.text_embedder\."),
    (
        "a diffusion transformer such as PixArt",
        r"(?i)\b(adaln_(single|modulation)|"
        r"caption_projection|scale_shift_table|[ty]_block|[xy]_embedder|cap_embedder)\b",
    ),
    ("Kandinsky", r"\bencoder_hid_proj\.(image|text)|\badd_embedding\.(image|text)_|\bclip_mean$"),
    ("DeepFloyd IF", r"\bencoder_hid_proj\.|\badd_k_proj\."),
    ("a model of videos", r"\b(time_stack|time_mixer|temporal_\w+|temp_(convs|attentions))\."),
    ("Stable Diffusion's upscaler", r"^low_scale_model\.|\b(label_emb|class_embedding)\.weight$"),
    ("Stable Diffusion unCLIP", r"^(noise_augmentor|embedder)\."),
    ("the refiner of Stable Diffusion XL", r"^conditioner\.embedders\.0\.model\."),
    (
        "Stable Diffusion XL",
        r"^conditioner\.|\b(label_emb|add_embedding)\.|(\b|_)te2_|"
        r"\btext_encoder_2\.|transformer_blocks_[1-9]",
    ),
    # Autoencoders and upscalers.
    ("the autoencoder of Kandinsky", r"\b(conv_y|norm_layer)\."),
    ("a VQGAN", r"\bquantize\."),
    ("TAESD", r"\btaesd_|coder\.layers\.\d+\.(weight|conv\.)|^\d+\.conv\.\d+\."),
    ("the autoencoder of Wan", r"coder\.conv1\.|\bnorm\d?\.gamma$"),
    ("an autoencoder of videos such as LTX's", r"\bper_channel_statistics\.|coder\.conv_in\.conv\.|\btime_conv_out\."),
    ("an autoencoder such as DC-AE", r"coder\.(stages|down_blocks\.\d+)\.\d+\."),
    (
        "an upscaler such as ESRGAN",
        r"(?i)\bRRDB|\bRDB\d\.|\bconv_first\.|\bresidual_group\.|"
        r"^(model|body)\.\d+\.(weight|sub\.)",
    ),
    # Encoders of texts and pictures.
    ("a safety checker", r"\bconcept_embeds$"),
    ("a SigLIP", r"\b(text|vision)_model\.head\."),
    (
        _CLIP,
        r"\bencoder\.layers\.\d+\.self_attn\.|\btransformer\.resblocks\.|^visual\.|"
        r"\b(text|vision)_model\.",
    ),
    ("a T5", r"\bblock\.\d+\.layer\.\d+\."),
    ("a BERT", r"\blayer\.\d+\.attention\.self\.|^(bert|roberta)\."),
    ("a vision transformer", r"\battention\.attention\.|\bpatch_embed(ding)?s?\.|\battn\.qkv\."),
    ("a language model", r"\blayers\.\d+\.(self_attn|mlp)\.|\bh\.\d+\.attn\."),
)
"""Pairs (kind of network, expression that matches some names of its arrays). The first pair that
matches applies. No name of a UNet or VAE of Stable Diffusion matches."""


def kind_of(names: Iterable[str]) -> str:
    """Return the kind of network that has arrays of these names, or "" if it is unknown."""
    text = "\n".join(names)
    return next((kind for kind, name in _KINDS if re.search(name, text, re.MULTILINE)), "")
