"""Imagen's 64x64 base model with the recipe that is best in this project's small experiments.

It is base64_500m, with 524,897,540 parameters, and differs from NeMo's recipe in four ways: the
network predicts the image, the noise levels suit 64x64 pixels, the optimizer is Muon, and each
picture has several captions (data.text; add *WEIGHT to a place to use it less often).

python -m imagen_jax.train --config=configs/base64_500m_muon.py --workdir=runs/base64_500m_muon

The evidence is small: 3 million parameters, 16x16 pixels, minutes of training
(docs/lab/ablations.md). In 600 steps there, 99.9 +- 0.5 % of pictures match prompts seen in
training with Muon, against 65.0 +- 17.9 % with AdamW; 51.0 +- 6.5 % with x0-prediction, against
11.9 +- 1.4 % with EDM's objective (95 % intervals, three seeds). Nobody has trained this config. At
500 million parameters, neither the gain nor the best learning rate is known, so compare it with
base64_500m for a day before a long run.

As planned for 32 H100 (python -m launch.plan --target=h100:32 --fast), both configs take 3,679
GPU-hours at NeMo's batch size and number of steps, without the optimizer's arithmetic. Muon's
matrix products add 10 TFLOP to the 4,112 TFLOP of a step, 9 GPU-hours if the devices share them.
Its state is half as large as Adam's.
"""

from ml_collections import ConfigDict

from configs import base64_500m


def get_config() -> ConfigDict:
    c = base64_500m.get_config()
    # At 64x64 pixels, four times the sigma of the quick start's 16x16 hides as much of a picture.
    c.diffusion = ConfigDict({"predicts": "x0", "p_mean": 1.0, "p_std": 1.2})
    c.sampler.update(name="dpmpp_2m", sigma_max=80.0)
    c.optimizer.update(name="muon", schedule="wsd")
    c.data.text = "npy,long.npy"
    return c
