"""Text-to-image model for 32x32 pictures, to train for an hour or more on two CPU cores.

The model has 8,346,893 parameters and takes 1.7 GFLOP per training image. The first command writes
a variant of this config that suits the data.

python -m imagen_jax.start --data=PHOTOS
python -m imagen_jax.train --config=configs/base32_8m.py --workdir=runs/base32 \
    --config.data.path=PHOTOS --config.prompts="('a dog on a beach',)"
"""

from ml_collections import ConfigDict

from configs import base64_500m


def get_config() -> ConfigDict:
    c = base64_500m.get_config()
    c.seed = 0
    c.steps = 1_000_000  # An upper limit: stop training when the pictures are good enough.
    c.batch_size = 64

    c.unet.update(
        image_size=32,
        patch=2,  # With patches of 4x4 pixels, the seams between patches are visible.
        embed_dim=64,
        channel_mult=(1, 2, 3),
        num_res_blocks=1,
        attention_resolutions=(4,),
        head_dim=32,
        cond_dim=128,
        dtype="float32",
    )
    c.text.update(encoder="hashed", width=256, max_tokens=16)
    # The network predicts the image: predictions of the noise leave grain in the pictures of a
    # small network. Noise levels and weighting are the quick start's at twice the sigma,
    # because 32x32 pictures need twice the noise of 16x16 ones (docs/lab/ablations.md).
    c.diffusion.update(predicts="x0", p_mean=0.3, p_std=1.2, weight="p2(k=0.25)")
    # The last step goes from sigma 0.3 to 0. This suffices, because the network predicts x0.
    c.sampler.update(name="dpmpp_2m", steps=16, sigma_min=0.3, sigma_max=40.0, guidance=2.0)
    c.sampler.threshold = "static"
    c.optimizer.update(lr=1e-3, warmup=500, b2=0.99, ema_decays=(0.999, 0.9998), ema_warmup=True)
    c.data.update(source="folder", path="data/photos", text="txt", threads=1)

    c.evaluation.guidance = (2.0,)
    c.log_every, c.sample_every = 100, 1_000
    c.save_every, c.keep_last, c.keep_every = 200, 2, 2_000
    c.prompts = ("a photo",)
    return c
