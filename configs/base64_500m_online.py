"""Imagen's 64x64 base model, with captions that T5-11b encodes during training.

This is base64_500m, with 524,897,540 parameters, but without precomputed text embeddings.

python -m imagen_jax.train --config=configs/base64_500m_online.py --workdir=runs/base64_500m_online

text.weights is a folder with config.json, spiece.model, and the weights as safetensors or a pickle.
Hugging Face hosts t5-11b as a pickle of 45 GB that includes the decoder. It is read without torch,
and only the encoder's 19.5 GB are kept.

The frozen encoder has 4,864,791,552 parameters (9.7 GB in bfloat16). They are sharded over
mesh.fsdp and not part of checkpoints. NeMo reports that training is 3 to 4 times slower with online
encoding than with precomputed embeddings.
"""

from ml_collections import ConfigDict

from configs import base64_500m


def get_config() -> ConfigDict:
    c = base64_500m.get_config()
    c.text.weights = "weights/t5-11b-encoder"
    c.data.text = "txt"
    c.prompts = (
        "A photo of a corgi riding a bike in Times Square.",
        "A red cube on top of a blue sphere.",
        "An oil painting of a lighthouse in a storm.",
        "Two cats asleep on a piano.",
    )
    return c
