"""Compare the speed of this project's FID Inception network with pytorch-fid's, on a CPU.

    pip install torch pytorch-fid
    python -m benchmarks.fid --batch=16

Both networks have the same random weights and get the same random 299x299 images. They run in
alternation. The command prints one line of JSON: the median images/s of both networks, the speed of
this project's network divided by that of pytorch-fid's ("ratio"), the lowest and highest ratio
among the rounds, and the largest difference between features, relative to the largest feature.
"""

import statistics

import jax
import numpy as np
from absl import flags

from benchmarks import measure
from diffusion_jax import cli
from diffusion_jax.metrics import inception, inception_weights

flags.adopt_module_key_flags(measure)
_BATCH = flags.DEFINE_integer("batch", 16, "Images per call.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Timed calls of each network.", lower_bound=1)


def main() -> None:
    """Compare the outputs and the speed of both networks, and print the result."""
    with cli.bad_input(ImportError):
        torch, theirs = map(measure.library, ("torch", "pytorch_fid.inception"))
    state = inception_weights.random_state()
    torch_state = {name: torch.from_numpy(array) for name, array in state.items()}
    theirs.load_state_dict_from_url = lambda *_, **__: torch_state
    network = theirs.InceptionV3([3], resize_input=False, normalize_input=False).eval()
    images = np.random.default_rng(0).uniform(-1, 1, (_BATCH.value, 299, 299, 3))
    images = images.astype(np.float32)
    tensor = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    params = jax.device_put(inception_weights.to_params(state))
    apply = jax.jit(lambda params, x: inception.apply(params, x).final)
    placed = jax.device_put(images)

    def by_torch() -> np.ndarray:
        with torch.no_grad():
            return network(tensor)[0][:, :, 0, 0].numpy()

    def by_jax() -> np.ndarray:
        return np.asarray(apply(params, placed))

    expected, ours = by_torch(), by_jax()
    seconds = lambda work: measure.timed(work)[1]
    turns = [(seconds(by_torch), seconds(by_jax)) for _ in range(_ROUNDS.value)]
    medians = [statistics.median(times) for times in zip(*turns, strict=True)]
    ratios = [torch_seconds / jax_seconds for torch_seconds, jax_seconds in turns]
    result = {
        "torch_images_per_second": _BATCH.value / medians[0],
        "jax_images_per_second": _BATCH.value / medians[1],
        "ratio": medians[0] / medians[1],
        "ratio_min_max": [min(ratios), max(ratios)],
        "relative_difference": float(np.abs(ours - expected).max() / np.abs(expected).max()),
        "batch": _BATCH.value,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **measure.machine(),
    }
    measure.say(result)


if __name__ == "__main__":
    cli.run(main)
