"""Stable Diffusion 1.x from random numbers at 256x256: 859,520,964 parameters, predicts eps.

python -m sd_jax.train --config=configs/sd1_256_pretrain.py --workdir=runs/sd1_256 \
    --config.vae.weights=weights/sd-v1-5 --config.text.weights=weights/clip-vit-large-patch14

NeMo: global batch 8192, 82,500 steps, 675.8 million samples, 64 GPUs. The VAE and CLIP ViT-L/14
are frozen; see docs/data.md for training on moments and stored embeddings.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.seed = 666
    c.steps = 82_500
    c.batch_size = 8192

    c.unet = dict(
        weights="",  # What training starts from: a workdir, a checkpoint; "" for random numbers.
        width=320,
        channel_mult=(1, 2, 4, 4),
        num_res_blocks=2,
        attention_levels=(0, 1, 2),
        transformer_depth=1,
        num_heads=8,
        head_dim=64,  # Not used where num_heads is given.
        linear_projections=False,
        norm_groups=32,
        in_channels=4,
        out_channels=4,
        remat=False,
        attention_impl="xla",  # "cudnn" on NVIDIA GPUs: faster.
        dtype="bfloat16",
    )
    c.vae = dict(
        weights="weights/sd-v1-5",  # A diffusers directory, a checkpoint, or a workdir.
        width=128,
        channel_mult=(1, 2, 4, 4),
        num_res_blocks=2,
        latent_channels=4,
        image_channels=3,
        query_chunk=4096,
        dtype="bfloat16",
    )
    c.text = dict(
        encoder="clip",
        weights="weights/clip-vit-large-patch14",  # A folder or a Hugging Face name.
        store="",  # A store of this encoder's embeddings, to be looked up instead.
        width=768,
        max_tokens=77,
        read_tokens=77,
        dtype="bfloat16",
        drop_prob=0.0,
    )
    c.conditioning = dict(
        drop_to="empty",  # What dropped texts become; "zeros" as in NeMo.
        pad_to=0,  # 80 as in NeMo, which fills up with zeros.
    )

    c.latents = dict(image_size=256, scale=0.18215, pixels="symmetric")
    c.diffusion = dict(predicts="eps", offset_noise=0.0, min_snr=0.0)
    c.sampler = dict(
        name="plms",
        steps=50,
        eta=0.0,
        churn=0.0,
        guidance=7.5,
        negative_prompt="",
        height=0,  # Pixels; 0 for those of training.
        width=0,
    )

    c.optimizer = dict(
        lr=8.192e-5,
        schedule="constant",
        warmup=10_000,
        b1=0.9,
        b2=0.999,
        eps=1e-8,
        weight_decay=0.0,
        clip=1.0,
        accumulate=1,
        ema_decays=(0.9999,),
        ema_warmup=False,
    )
    c.mesh = dict(replica=1, fsdp=-1, tensor=1)
    c.data = dict(
        source="webdataset",  # "moments": tars of KEY.npy and KEY.txt, as sd_jax.precache writes.
        path="data/laion",
        text="txt",
        uncaptioned="error",
        mixture=(),  # Parts (weight, source, path, text), for the source "mixture".
        min_size=0,  # Filters: pixels of the smaller side,
        max_aspect=0.0,  # larger side by smaller (0: any),
        min_chars=0,  # characters of a caption.
        max_broken=0.1,  # The share of damaged records that does not end the run.
        resize=0,  # Of the smaller side; 0 stands for latents.image_size, the size of the cut.
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

    c.log_every, c.sample_every = 100, 1_000
    c.save_every, c.keep_last, c.keep_every = 1_000, 5, 10_000
    c.step_timeout = 1_800  # Seconds; a step that takes longer hangs, and ends the process.
    c.prompts = (
        "A photo of a Shiba Inu dog with a backpack riding a bike",
        "A red cube on top of a blue sphere.",
        "An oil painting of a lighthouse in a storm.",
        "Two cats asleep on a piano.",
    )
    return c
