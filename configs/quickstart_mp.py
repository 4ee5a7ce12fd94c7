"""Variant of the quick start with EDM2's magnitude-preserving UNet (config G).

The objective, the optimizer and the learning rate schedule are also EDM2's.

python -m imagen_jax.train --config=configs/quickstart_mp.py --workdir=runs/quickstart_mp
python -m imagen_jax.evaluate --workdir=runs/quickstart_mp
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    c = quickstart.get_config()
    c.unet = ConfigDict(
        {
            "kind": "magnitude",
            "image_size": 16,
            "patch": 4,
            "embed_dim": 128,
            "channel_mult": (1,),
            "num_res_blocks": 1,
            "attention_resolutions": (),  # The middle of the UNet always has attention.
            "head_dim": 32,
            "cond_dim": 64,
        }
    )
    c.diffusion.update(predicts="edm", weight="uncertainty")
    c.optimizer.update(schedule="inverse_sqrt", decay_from=100, warmup=50, lr=4e-2, weight_decay=0.0, clip=float("inf"))
    return c
