"""What holds of the groups that the configs of all systems have: checks in milliseconds."""

from diffusion_jax import settings
from diffusion_jax.settings import Data, Optimizer, Run, Text
from diffusion_jax.text import registry
from diffusion_jax.train import optimizer as optimizers

EMBEDDED = "precomputed"
"""The encoder of embeddings that lie beside the images: it reads no captions."""


def check_run(run: Run, optimizer: Optimizer, data: Data) -> None:
    """ValueError for values that cannot be, or a schedule that does not fit the steps."""
    settings.one_of("optimizer.schedule", optimizer.schedule, optimizers.SCHEDULES)
    settings.one_of("data.crop", data.crop, settings.CROPS)
    settings.positive(
        steps=run.steps, batch_size=run.batch_size, log_every=run.log_every,
        save_every=run.save_every, keep_last=run.keep_last, optimizer__lr=optimizer.lr,
        optimizer__accumulate=optimizer.accumulate, optimizer__clip=optimizer.clip,
        step_timeout=run.step_timeout,
    )  # fmt: skip
    settings.within(0, 1, optimizer__b1=optimizer.b1, optimizer__b2=optimizer.b2)
    optimizers.make_optimizer(optimizer, run.steps)  # A schedule may not fit the number of steps.
    optimizers.check_decays(optimizer.ema_decays)


def check_text(text: Text) -> None:
    """ValueError for values that cannot be; weights and stores are not opened."""
    settings.one_of("text.encoder", text.encoder, registry.ENCODERS)
    settings.one_of("text.dtype", text.dtype, ("bfloat16", "float32"))
    settings.positive(text__width=text.width, text__max_tokens=text.max_tokens)
    settings.within(0, 1, text__drop_prob=text.drop_prob)


def check_prompts(run: Run, text: Text) -> None:
    """ValueError if there is nothing to draw on the way."""
    if text.encoder != EMBEDDED and run.sample_every and not run.prompts:
        raise ValueError(
            "prompts is empty: give texts to draw on the way, such as "
            "--config.prompts=\"('a red dog',)\", or set sample_every=0"
        )
