"""Imagen's 64x64 base model, 524,897,540 parameters, as NVIDIA NeMo trains it (EDM).

python -m imagen_jax.train --config=configs/base64_500m.py --workdir=runs/base64_500m

NeMo: global batch 4096, 1.25 million steps, 5.12 billion samples, 32 GPUs. The text is T5-11b's
(1024 wide, 128 tokens), precomputed and stored beside the images: see docs/data.md.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.seed = 1234
    c.steps = 1_250_000
    c.batch_size = 4096

    c.unet = dict(
        kind="unet",
        image_size=64,
        patch=1,
        embed_dim=256,
        channel_mult=(1, 2, 3, 4),
        num_res_blocks=3,
        attention_resolutions=(8, 16, 32),
        attention="fused",
        head_dim=64,
        cond_dim=512,
        text_pooling="attention",
        learned_time_dim=0,
        null_token=False,
        init_kernel=3,
        scale_shift=True,
        resblock_updown=False,
        conv_resample=True,
        dropout=0.0,
        low_res=False,
        noise_aug=False,
        remat=False,
        attention_impl="xla",  # "cudnn" on NVIDIA GPUs: faster, and no mask tensor.
        dtype="bfloat16",
    )
    c.text = dict(
        encoder="precomputed",
        weights="",  # A folder or a Hugging Face name, for encoders that run in training.
        store="",  # A store of this encoder's embeddings, to be looked up instead.
        width=1024,
        max_tokens=128,
        read_tokens=512,
        dtype="bfloat16",
        drop_prob=0.1,
    )

    c.diffusion = dict(
        precond="edm", sigma_data=0.5, noise="lognormal", p_mean=-1.2, p_std=1.2, distance="l2"
    )
    c.super_resolution = dict(factor=1, aug_sigma=0.002)
    c.sampler = dict(
        name="heun",
        steps=30,
        sigma_min=0.002,
        sigma_max=80.0,
        rho=7.0,
        churn=0.0,
        eta=0.0,
        guidance=7.5,
        guidance_low=0.0,  # Guidance acts on noise levels from low to high.
        guidance_high=float("inf"),
        threshold="dynamic",
    )

    c.optimizer = dict(
        lr=1e-4,
        schedule="constant",
        warmup=10_000,
        b1=0.9,
        b2=0.999,
        eps=1e-8,
        weight_decay=0.01,
        clip=1.0,
        accumulate=1,
        ema_decays=(0.9999,),
        ema_warmup=False,
    )
    c.mesh = dict(replica=1, fsdp=-1, tensor=1)
    c.data = dict(
        source="webdataset",
        path="data/laion64",
        text="npy",
        uncaptioned="error",
        mixture=(),  # Parts (weight, source, path, text), for the source "mixture".
        min_size=0,  # Filters: pixels of the smaller side,
        max_aspect=0.0,  # larger side by smaller (0: any),
        min_chars=0,  # characters of a caption.
        max_broken=0.1,  # The share of damaged records that does not end the run.
        resize=0,  # Of the smaller side; 0 stands for unet.image_size, to which pictures are cut.
        crop="center",
        flip=False,
        threads=16,
    )

    c.evaluation = dict(
        every=0,  # Images; 0 for never.
        guidance=(7.5,),
        prompts="",
        num_prompts=1_000,
        reference="",  # Statistics of real images, weights of Inception and CLIP: see evaluate.
        inception="",
        clip="",
    )

    c.log_every, c.sample_every = 100, 10_000
    c.save_every, c.keep_last, c.keep_every = 1_000, 5, 100_000
    c.step_timeout = 1_800  # Seconds; a step that takes longer hangs, and ends the process.
    c.prompts = ()  # A precomputed encoder draws the texts of the first pictures instead.
    return c
