"""Quick start: handwritten digits in named colours at 16x16, trained in minutes on a laptop's CPU.

The model has 3,323,889 parameters. At guidance scale 2, more than 99 % of pictures match their
prompt if the prompt was in the training data, and 90 % if it was not.

python -m imagen_jax.train --config=configs/quickstart.py --workdir=runs/quickstart
python -m imagen_jax.evaluate --workdir=runs/quickstart
"""

from ml_collections import ConfigDict

from configs import base64_500m


def get_config() -> ConfigDict:
    c = base64_500m.get_config()
    c.seed = 0
    c.steps = 1_200
    c.batch_size = 64

    c.unet.update(
        image_size=16,
        patch=4,
        embed_dim=128,
        channel_mult=(1,),
        num_res_blocks=1,
        attention_resolutions=(),  # The middle of the UNet always has attention.
        head_dim=32,
        cond_dim=64,
        dtype="float32",
    )
    c.text.update(encoder="hashed", width=64, max_tokens=6)
    c.diffusion.update(predicts="x0", p_mean=-0.4, weight="p2")  # P2: docs/lab/ablations.md
    # The last step goes from sigma 0.4 to 0. This suffices, because the network predicts x0.
    c.sampler.update(name="ddim", eta=1.0, steps=12, sigma_min=0.4, sigma_max=40.0, guidance=2.0)
    c.optimizer.update(lr=2e-3, schedule="cosine", warmup=100, b2=0.99, ema_decays=(0.999,), ema_warmup=True)
    c.data.update(source="diffusion_jax.examples.digits", path="", text="txt", threads=1)

    c.evaluation.guidance = (2.0,)
    c.log_every, c.sample_every = 50, 600
    c.save_every, c.keep_last, c.keep_every = 600, 2, 0
    c.prompts = (
        "a red seven on gray paper",
        "a blue three on white paper",
        "a yellow zero on black paper",
        "a white five on orange paper",
        "a purple nine on cyan paper",
        "a green two on white paper",
        "a yellow eight on gray paper",
        "a white four on black paper",
    )
    return c
