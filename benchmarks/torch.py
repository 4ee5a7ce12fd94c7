"""Compare the CPU time of this project's networks with torch's, for equal weights and inputs.

    pip install torch diffusers
    python -m benchmarks.torch --models=sd --work=forward,gradient,step
    python -m benchmarks.torch --models=t5,clip --work=forward

sd, encode and decode are Stable Diffusion's UNet and its VAE's encoder and decoder, compared with
diffusers. t5 (T5-small) and clip (the text tower of CLIP-L) are compared with transformers. The
command first checks that both networks compute the same numbers, and then runs them in alternation.
For each model and kind of work, it prints a line of JSON with the median ("ratio"), lowest
("least") and highest ("most") ratio of torch's CPU time to this project's. If the ratio is above 1,
this project is faster. A step computes the loss and its gradient, clips the gradient, updates the
parameters with AdamW (fused in torch), and updates an average of the parameters.

CPU time is that of the whole process on --threads cores. Other work on the machine affects it only
through the caches. The default is one core: with more cores, CPU time includes threads that wait
for work.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import measure
from diffusion_jax import cli
from diffusion_jax.config.named import one_of
from diffusion_jax.text import clip, clip_weights, t5
from diffusion_jax.train import optimizer
from diffusion_jax.train.state import init_state, make_train_step
from diffusion_jax.weights import torch_weights
from sd_jax import unet as sd
from sd_jax.vae import VAE
from sd_jax.weights import formats, names

flags.adopt_module_key_flags(measure)
_MODELS = flags.DEFINE_list("models", ["sd", "encode", "decode"], "Models to compare.")
_WORK = flags.DEFINE_list("work", ["forward", "gradient", "step"], "Kinds of work to time.")
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Timed calls of each network.", lower_bound=1)
_THREADS = flags.DEFINE_integer("threads", 1, "Number of cores.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 64, "Base width of the networks; t5 and clip ignore it.", lower_bound=32)
_DECAY, _RATE = 0.9999, 1e-4
Inputs = dict[str, np.ndarray]


class Pair(NamedTuple):
    """This project's network and a torch module, with equal weights and inputs."""

    ours: Callable[[Any, Mapping[str, Any]], Any]
    """Function that computes this project's output from (params, inputs)."""
    params: Any
    """Parameters of this project's network."""
    theirs: Any
    """Torch module with the same weights."""
    inputs: Inputs
    """Inputs by name; pictures are [B, H, W, C]."""
    call: Callable[[Any, Mapping[str, Any]], Any]
    """Function that computes torch's output from (theirs, inputs), with pictures [B, C, H, W]."""


def main() -> None:
    """Check that both networks' outputs agree, time the networks, and print the results."""
    with cli.bad_input(ImportError):
        torch = measure.library("torch")

        for flag, valid_names in ((_MODELS, _PAIRS), (_WORK, _WORKS)):
            for name in flag.value:
                one_of(f"--{flag.name}", name, valid_names)
    # Do this before JAX starts, because JAX creates one thread per available core.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: _THREADS.value])
    torch.set_num_threads(_THREADS.value)
    cli.start(alone=True)
    for name in _MODELS.value:
        pair = _PAIRS[name](int(_WIDTH.value))
        error = _difference(pair)
        if not error < 1e-4:
            raise AssertionError(
                f"{name}: the outputs of both networks differ by {error} of the largest output, "
                "but this must be below 1e-4"
            )
        for work in _WORK.value:
            ours, theirs = _WORKS[work](pair)
            result = {"model": name, "work": work, **_compare(ours, theirs), "difference": error}
            versions = {"jax": jax.__version__, "torch": torch.__version__}
            measure.say(result | {"threads": _THREADS.value} | versions)


def _compare(ours: Callable[[], Any], theirs: Callable[[], Any]) -> dict[str, Any]:
    """Time both functions in alternation.

    Returns the median, lowest and highest ratio of torch's time to this project's ("ratio",
    "least", "most"), and the median seconds of both ("torch_s", "ours_s").
    """
    pairs = [(_seconds(theirs), _seconds(ours)) for _ in range(_ROUNDS.value + 2)][2:]
    ratios = sorted(a / b for a, b in pairs)
    medians = {
        name: round(statistics.median(column), 4)
        for name, column in zip(("torch_s", "ours_s"), zip(*pairs, strict=True), strict=True)
    }
    figures = {"ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
    return {name: round(ratio, 3) for name, ratio in figures.items()} | medians


def _seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    jax.block_until_ready(work())
    return time.process_time() - start


def _difference(pair: Pair) -> float:
    """Return the largest difference of the two outputs, relative to torch's largest output."""
    torch = measure.library("torch")

    ours = np.asarray(jax.jit(pair.ours)(pair.params, pair.inputs))
    with torch.no_grad():
        theirs = pair.call(pair.theirs, _tensors(pair.inputs)).numpy()
    theirs = theirs if theirs.ndim == 3 else theirs.transpose(0, 2, 3, 1)
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def _forward(pair: Pair) -> tuple[Callable[[], Any], Callable[[], Any]]:
    torch = measure.library("torch")

    compiled, inputs = jax.jit(pair.ours), jax.device_put(pair.inputs)

    def theirs():
        with torch.no_grad():
            pair.call(pair.theirs, tensors)

    tensors = _tensors(pair.inputs)
    return lambda: compiled(pair.params, inputs), theirs


def _gradient(pair: Pair) -> tuple[Callable[[], Any], Callable[[], Any]]:
    gradient = jax.jit(jax.value_and_grad(lambda params, inputs: (pair.ours(params, inputs) ** 2).mean()))
    inputs, tensors = jax.device_put(pair.inputs), _tensors(pair.inputs)

    def theirs():
        pair.theirs.zero_grad(set_to_none=True)
        (pair.call(pair.theirs, tensors) ** 2).mean().backward()

    return lambda: gradient(pair.params, inputs), theirs


def _step(pair: Pair) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a train step of this project and one of torch.

    Both clip the gradient to norm 1, update the parameters with AdamW, and then update the moving
    average of the parameters.
    """
    torch = measure.library("torch")

    def loss(params, frozen, batch, key):
        del frozen, key
        return (pair.ours(params, batch) ** 2).mean(), {}

    tx = optimizer.adamw(optimizer.warmup_constant(_RATE, 0))
    step = jax.jit(make_train_step(loss, tx, [_DECAY]), donate_argnums=0)
    state = init_state(jax.tree.map(jnp.copy, pair.params), tx, [_DECAY])
    inputs, key = jax.device_put(pair.inputs), jax.random.key(0)

    def ours():
        nonlocal state
        state, metrics = step(state, (), inputs, key)
        return state, metrics

    parameters = list(pair.theirs.parameters())
    adamw = torch.optim.AdamW(parameters, _RATE, weight_decay=0.01, fused=True)
    averages = [p.detach().clone() for p in parameters]
    gradient = _gradient(pair)[1]

    def theirs():
        gradient()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        adamw.step()
        with torch.no_grad():
            torch._foreach_lerp_(averages, parameters, 1 - _DECAY)

    return ours, theirs


def _sd(width: int) -> Pair:
    diffusers = measure.library("diffusers")

    text, side, batch = 256, 32, 4
    unet = sd.UNet(2 * width, (1, 2, 4), 1, (0, 1))
    params = _random(names.abstract_unet(unet, text))
    theirs = diffusers.UNet2DConditionModel(**formats.unet_to_diffusers(unet, text), sample_size=side)
    _fill(theirs, names.unet_to_torch(params, unet, "diffusers"))
    draw = np.random.default_rng(0).standard_normal
    inputs = {
        "x": draw((batch, side, side, 4), np.float32),
        "time": np.linspace(10, 900, batch, dtype=np.float32),
        "text": draw((batch, 77, text), np.float32),
    }
    call = lambda module, t: module(t["x"], t["time"], t["text"]).sample
    return Pair(lambda p, inputs: unet.apply(p, **inputs), params, theirs, inputs, call)


def _vae(width: int, half: str) -> Pair:
    diffusers = measure.library("diffusers")

    vae = VAE(width, (1, 2, 4), 1)
    params = _random(names.abstract_vae(vae))
    theirs = diffusers.AutoencoderKL(**formats.vae_to_diffusers(vae))
    _fill(theirs, names.vae_to_torch(params, vae, "diffusers"))
    shape = (2, 64, 64, 3) if half == "encode" else (2, 16, 16, 4)
    inputs = {"x": np.random.default_rng(0).standard_normal(shape, np.float32)}

    def call(module, tensors):
        if half == "encode":
            return module.encode(tensors["x"]).latent_dist.parameters
        return module.decode(tensors["x"]).sample

    return Pair(lambda p, inputs: vae.apply(p, inputs["x"], method=half), params, theirs, inputs, call)


def _t5(width: int) -> Pair:
    del width
    transformers = measure.library("transformers")

    config = transformers.T5Config(dropout_rate=0.0)  # The defaults are T5-small's sizes.
    theirs = transformers.T5EncoderModel(config).eval()
    state = {name: w.numpy() for name, w in theirs.state_dict().items()}
    model, table = t5.from_state(state, config.to_dict())
    params = torch_weights.to_params(t5.used(state), table, t5.abstract_params(model))
    length = np.linspace(4, 128, 4).astype(int)[:, None]
    ids = np.random.default_rng(0).integers(2, 32000, (4, 128), np.int32)
    inputs = {"ids": ids, "mask": np.arange(128)[None] < length}
    inputs["valid"] = inputs["mask"][..., None].astype(np.float32)  # Outputs at padding may differ.

    def call(module, tensors):
        last = module(input_ids=tensors["ids"], attention_mask=tensors["mask"].long())
        return last.last_hidden_state * tensors["valid"]

    ours = lambda p, inputs: model.apply(p, inputs["ids"], inputs["mask"]) * inputs["valid"]
    return Pair(ours, params, theirs, inputs, call)


def _clip(width: int) -> Pair:
    del width
    transformers = measure.library("transformers")

    config = transformers.CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12
    )
    theirs = transformers.CLIPTextModel(config).eval()
    state = {name: w.numpy() for name, w in theirs.state_dict().items()}
    weights = clip_weights.from_state(state, config.to_dict())
    tower, table = clip.text_tower(weights)
    tower_state = clip_weights.tower_state(weights, table)
    params = torch_weights.to_params(tower_state, table, clip.abstract_params(tower))
    inputs = {"ids": np.random.default_rng(0).integers(2, 49000, (4, 77), np.int32)}
    inputs["ids"][:, -1] = config.eos_token_id
    call = lambda module, tensors: module(input_ids=tensors["ids"]).last_hidden_state

    def ours(params, inputs):
        outputs: Any = tower.apply(params, inputs["ids"])
        return outputs.last

    return Pair(ours, params, theirs, inputs, call)


def _fill(module: Any, state: Mapping[str, np.ndarray]) -> None:
    torch = measure.library("torch")

    module.load_state_dict({name: torch.from_numpy(np.array(w)) for name, w in state.items()})


def _random(shapes: Any) -> Any:
    """Return random float32 parameters of these shapes.

    Kernels preserve the variance of their inputs, scales of norms are near 1, and biases near 0.
    """
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        w = rng.standard_normal(leaf.shape, np.float32)
        if len(leaf.shape) > 1:
            return jnp.asarray(w / np.float32(np.sqrt(np.prod(leaf.shape[:-1]))))
        return jnp.asarray(w / 10 + np.float32(name == "scale"))

    return jax.tree_util.tree_map_with_path(draw, shapes)


def _tensors(inputs: Inputs) -> dict[str, Any]:
    """Convert numpy inputs to torch tensors, and pictures from NHWC to NCHW."""
    torch = measure.library("torch")

    to_nchw = lambda x: np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if x.ndim == 4 else x
    return {name: torch.from_numpy(to_nchw(x)) for name, x in inputs.items()}


_WORKS = {"forward": _forward, "gradient": _gradient, "step": _step}
_PAIRS: dict[str, Callable[[int], Pair]] = {
    "sd": _sd,
    "encode": lambda width: _vae(width, "encode"),
    "decode": lambda width: _vae(width, "decode"),
    "t5": _t5,
    "clip": _clip,
}


if __name__ == "__main__":
    cli.run(main)
