"""base64_500m, 524,897,540 parameters, on captions: T5-11b's encoder, frozen, runs in training.

python -m imagen_jax.train --config=configs/base64_500m_online.py --workdir=runs/base64_500m_online

text.weights is a folder with config.json, spiece.model and safetensors. Hugging Face has t5-11b as
a pickle; convert it once, without torch, to 19.5 GB:

python -m diffusion_jax.text convert t5-11b weights/t5-11b-encoder

The encoder has 4,864,791,552 weights: 9.7 GB in bf16, which are spread over mesh.fsdp and are in
no checkpoint. NeMo gives online encoding as 3 to 4 times slower than precomputed embeddings.
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
