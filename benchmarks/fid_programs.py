"""Compare this project's scores with those of pytorch-fid, torch-fidelity, clean-fid and ADM.

    pip install torch torchvision pytorch-fid torch-fidelity clean-fid tensorflow
    git clone https://github.com/openai/guided-diffusion
    python -m benchmarks.fid_programs --adm=guided-diffusion/evaluations/evaluator.py

The programs run unmodified on the same two folders of coloured digits. All networks get the
weights in the file --weights or, without this flag, the same random weights. Normally, clean-fid
and ADM download their networks in other formats. Here, clean-fid gets pytorch-fid's network as its
custom_feat_extractor, and ADM gets a TensorFlow graph with the tensor names of the public graph.

The command prints one line of JSON per program and score. Each line has the program's score, this
project's score and their relative difference. This project's score is computed with the
preprocessing of the program ("mode"). The last line gives the FID of each program and, as
"largest_over_smallest_less_1", by what fraction the largest FID exceeds the smallest.
"""

import importlib.util
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from absl import flags
from PIL import Image

from benchmarks import measure
from diffusion_jax import cli
from diffusion_jax.examples.digits import judge, rendering
from diffusion_jax.metrics import extractors, fid, inception, inception_score, inception_weights, mmd
from diffusion_jax.metrics.weights import InceptionWeights

flags.adopt_module_key_flags(measure)
_ADM = flags.DEFINE_string("adm", "", "Path of ADM's evaluator.py; if empty, ADM is left out.")
_WEIGHTS = flags.DEFINE_string("weights", "", "Path of pt_inception-2015-12-05-6726825d.pth; if empty, random weights.")
_PICTURES = flags.DEFINE_integer("pictures", 1000, "Number of pictures; half of them get added noise.", lower_bound=8)
_SIZE = flags.DEFINE_integer("size", 64, "Side of the pictures in pixels.", lower_bound=8)
_BATCH = 50
_LEVELS = "2048+spatial+unbiased"  # Features for FID and KID, for sFID, and for Inception Score.
Scores = dict[str, float]
"""Scores keyed by "fid", "sfid", "kid" and "inception_score"."""


def main() -> None:
    """Score both folders with every program, and print the differences."""
    with cli.bad_input(ImportError):
        torch = measure.library("torch")
        measure.library("pytorch_fid.inception")
    state = inception_weights.random_state()
    if _WEIGHTS.value:
        loaded = torch.load(_WEIGHTS.value, weights_only=True)
        state = {name: tensor.numpy() for name, tensor in loaded.items()}
    real, drawn = _pictures()
    ours = _ours(state, real, drawn)
    programs: dict[str, tuple[str, Callable[..., Scores]]] = {
        "pytorch-fid": ("pytorch", _pytorch_fid),
        "torch-fidelity": ("tf", _torch_fidelity),
        "clean-fid": ("clean", _clean_fid),
        **({"ADM": ("tf", _adm)} if _ADM.value else {}),
    }
    by_program = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for side, images in (("real", real), ("drawn", drawn)):
            (folder / side).mkdir()
            for i, image in enumerate(images):
                Image.fromarray(image).save(folder / side / f"{i:05}.png")
            np.savez(folder / f"{side}.npz", images)
        for program, (mode, score) in programs.items():
            theirs = score(torch, state, folder)
            by_program[program] = theirs["fid"]
            for key, value in theirs.items():
                own = ours(mode)[key]
                difference = abs(own - value) / abs(value)
                measure.say(
                    {
                        "program": program,
                        "mode": mode,
                        "score": key,
                        "theirs": value,
                        "ours": own,
                        "relative_difference": difference,
                    }
                )
    spread = max(by_program.values()) / min(by_program.values()) - 1
    measure.say({"fid": by_program, "largest_over_smallest_less_1": spread})


def _pictures() -> tuple[np.ndarray, np.ndarray]:
    """Return the real and the drawn pictures, each as uint8 [N, S, S, 3].

    The real pictures are digits, the "drawn" ones are other digits with added noise. N is half of
    --pictures, and S is --size.
    """
    half = _PICTURES.value // 2
    prompts = (rendering.seen_prompts() * (1 + _PICTURES.value // 200))[: 2 * half]
    images = judge.real_pictures(_SIZE.value, prompts)
    noise = np.random.default_rng(0).normal(0, 20, images[half:].shape)
    return images[:half], np.clip(images[half:] + noise, 0, 255).astype(np.uint8)


def _ours(state: Mapping[str, np.ndarray], real: np.ndarray, drawn: np.ndarray) -> Callable[[str], Scores]:
    """Return a function that maps a mode of Inception's input to this project's scores.

    The function computes the scores of a mode once, and then returns the same scores again.
    """
    weights = InceptionWeights(inception_weights.to_params(state), "", False)
    cache: dict[str, Scores] = {}

    def scores(mode: str) -> Scores:
        if mode not in cache:
            extractor = extractors.inception_extractor(weights, mode, _LEVELS)
            run = extractors.on_host(extractor)
            a, b = (
                extractors.split(
                    extractor, np.concatenate([run(images[i : i + _BATCH]) for i in range(0, len(images), _BATCH)])
                )
                for images in (real, drawn)
            )
            kid = mmd.kid(a["inception"], b["inception"], subsets=1, size=len(real))
            cache[mode] = {
                "fid": fid.frechet(b["inception"], a["inception"]),
                "sfid": fid.frechet(b["inception_spatial"], a["inception_spatial"]),
                "kid": kid.mean,
                "inception_score": inception_score.score(b["inception_unbiased"]).value,
            }
        return cache[mode]

    return scores


def _pytorch_fid(torch: Any, state: Mapping[str, np.ndarray], folder: pathlib.Path) -> Scores:
    _network(torch, state)
    score = measure.library("pytorch_fid.fid_score")
    paths = [str(folder / side) for side in ("real", "drawn")]
    return {"fid": float(score.calculate_fid_given_paths(paths, _BATCH, "cpu", 2048, 0))}


def _torch_fidelity(torch: Any, state: Mapping[str, np.ndarray], folder: pathlib.Path) -> Scores:
    library = measure.library("torch_fidelity")
    torch.save({name: torch.from_numpy(array) for name, array in state.items()}, folder / "w.pth")
    paths = [str(folder / side) for side in ("drawn", "real")]
    scores = library.calculate_metrics(
        input1=paths[0],
        input2=paths[1],
        cuda=False,
        fid=True,
        isc=True,
        kid=True,
        cache=False,
        isc_splits=1,
        kid_subsets=1,
        kid_subset_size=_PICTURES.value // 2,
        verbose=False,
        batch_size=_BATCH,
        feature_extractor_weights_path=str(folder / "w.pth"),
    )
    names = {
        "fid": "frechet_inception_distance",
        "kid": "kernel_inception_distance_mean",
        "inception_score": "inception_score_mean",
    }
    return {key: float(scores[name]) for key, name in names.items()}


def _clean_fid(torch: Any, state: Mapping[str, np.ndarray], folder: pathlib.Path) -> Scores:
    network = _network(torch, state)
    extract = lambda x: network((x - 128) / 128)[0][:, :, 0, 0]
    score = measure.library("cleanfid.fid").compute_fid(
        str(folder / "real"),
        str(folder / "drawn"),
        mode="clean",
        num_workers=0,
        device=torch.device("cpu"),
        custom_feat_extractor=extract,
        verbose=False,
    )
    return {"fid": float(score)}


def _adm(torch: Any, state: Mapping[str, np.ndarray], folder: pathlib.Path) -> Scores:
    tf = measure.library("tensorflow.compat.v1")
    spec = importlib.util.spec_from_file_location("adm", _ADM.value)
    assert spec and spec.loader
    adm: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adm)
    adm.INCEPTION_V3_PATH = str(folder / "graph.pb")
    pathlib.Path(adm.INCEPTION_V3_PATH).write_bytes(_graph(tf, inception_weights.to_params(state)))
    evaluator = adm.Evaluator(tf.Session(), batch_size=_BATCH)
    real, drawn = (evaluator.read_activations(folder / f"{x}.npz") for x in ("real", "drawn"))
    distances = [
        evaluator.compute_statistics(b).frechet_distance(evaluator.compute_statistics(a))
        for a, b in zip(real, drawn, strict=True)
    ]
    score = evaluator.compute_inception_score(drawn[0])
    return {"fid": float(distances[0]), "sfid": float(distances[1]), "inception_score": score}


def _network(torch: Any, state: Mapping[str, np.ndarray]) -> Any:
    """Return pytorch-fid's network with the given weights, for resized and normalized images.

    The function also replaces pytorch-fid's download, so that every network that pytorch-fid
    creates from here on has these weights.
    """
    theirs = measure.library("pytorch_fid.inception")
    tensors = {name: torch.from_numpy(array) for name, array in state.items()}
    theirs.load_state_dict_from_url = lambda *_, **__: tensors
    return theirs.InceptionV3([3], resize_input=False, normalize_input=False).eval()


def _graph(tf: Any, params: inception.InceptionParams) -> bytes:
    """Return Inception with these parameters as a serialized TensorFlow graph.

    The tensors have the same names as in the public graph, because ADM finds them by name.
    """

    def conv(x: Any, block: str, *names: str, stride: int = 1, name: str | None = None) -> Any:
        for i, branch in enumerate(names):
            last = i == len(names) - 1
            p, padding = params[block][branch], "SAME"
            if (last and stride == 2) or branch in ("Conv2d_2a_3x3", "Conv2d_4a_3x3"):
                padding = "VALID"
            x = tf.nn.conv2d(x, p["kernel"], [stride if last else 1] * 2, padding)
            x = tf.nn.relu(x + p["bias"], name=name)
        return x

    join = lambda *parts: tf.concat(parts, 3)
    shrink = lambda x: tf.nn.max_pool2d(x, 3, 2, "VALID")
    average = lambda x: tf.nn.avg_pool2d(x, 3, 1, "SAME")
    chain = lambda name, *ends: [f"{name}_{end}" for end in ends]
    with tf.Graph().as_default() as graph:
        x = tf.placeholder(tf.float32, [None, None, None, 3], name="ExpandDims")
        x = (tf.image.resize_bilinear(x, [299, 299]) - 128) / 128
        x = conv(x, "stem", "Conv2d_1a_3x3", stride=2)
        x = shrink(conv(x, "stem", "Conv2d_2a_3x3", "Conv2d_2b_3x3"))
        x = shrink(conv(x, "stem", "Conv2d_3b_1x1", "Conv2d_4a_3x3"))
        for b in ("Mixed_5b", "Mixed_5c", "Mixed_5d"):
            five, three = chain("branch5x5", 1, 2), chain("branch3x3dbl", 1, 2, 3)
            pooled = conv(average(x), b, "branch_pool")
            x = join(conv(x, b, "branch1x1"), conv(x, b, *five), conv(x, b, *three), pooled)
        three = conv(x, "Mixed_6a", *chain("branch3x3dbl", 1, 2, 3), stride=2)
        x = join(conv(x, "Mixed_6a", "branch3x3", stride=2), three, shrink(x))
        for b in ("Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"):
            one = conv(x, b, "branch1x1", name="mixed_6/conv" if b == "Mixed_6d" else None)
            seven, double = chain("branch7x7", 1, 2, 3), chain("branch7x7dbl", 1, 2, 3, 4, 5)
            pooled = conv(average(x), b, "branch_pool")
            x = join(one, conv(x, b, *seven), conv(x, b, *double), pooled)
        three = conv(x, "Mixed_7a", *chain("branch3x3", 1, 2), stride=2)
        seven = conv(x, "Mixed_7a", *chain("branch7x7x3", 1, 2, 3, 4), stride=2)
        x = join(three, seven, shrink(x))
        largest = lambda x: tf.nn.max_pool2d(x, 3, 1, "SAME")
        for b, pool in (("Mixed_7b", average), ("Mixed_7c", largest)):
            three = conv(x, b, "branch3x3_1")
            double = conv(x, b, *chain("branch3x3dbl", 1, 2))
            parts = [conv(three, b, name) for name in chain("branch3x3", "2a", "2b")]
            parts += [conv(double, b, name) for name in chain("branch3x3dbl", "3a", "3b")]
            x = join(conv(x, b, "branch1x1"), *parts, conv(pool(x), b, "branch_pool"))
        x = tf.reduce_mean(x, [1, 2], keepdims=True, name="pool_3")
        tf.matmul(x[:, 0, 0], params["fc"]["fc"]["kernel"][0, 0], name="softmax/logits/MatMul")
    return graph.as_graph_def().SerializeToString()


if __name__ == "__main__":
    cli.run(main)
