"""Pack a run's weights into a small workdir that can be shared, sampled, evaluated or fine-tuned.

    python -m diffusion_jax.pack --workdir=runs/emoji32 --out=models/emoji32
    python -m imagen_jax.sample --workdir=models/emoji32 --prompt="a red apple" --out=pictures

The new workdir holds one average of a checkpoint (--ema, as in sample) as a .safetensors file. This
file stores 8-bit integers with a scale per channel, which takes a quarter of the space of float32.
The workdir also holds the config and the run's vocabulary.json, which lists the words of the
training captions, so that commands can warn of unknown words in prompts. If the run has no
vocabulary.json, name the captions: --captions=data/emoji/train.txt. The new workdir has no
optimizer state, metrics or pictures, and none of the weights that the config names by path
(vae.weights, text.weights, the weights that a LoRA adapts). To fine-tune the packed weights, start
a new run with --config.unet.weights set to this workdir.

--push=OWNER/NAME also uploads the new workdir to the Hugging Face Hub, with a short model card,
README.md. The repository is public, unless it exists and is private.
"""

import os
import pathlib
import re
import shlex
from collections.abc import Mapping
from typing import Any

import jax
from absl import flags

from diffusion_jax import averages, cli, files, runs
from diffusion_jax.data import prompts
from diffusion_jax.files import checksums
from diffusion_jax.text import vocabulary
from diffusion_jax.weights import packed, restore


def pack(workdir: files.Path, which: str, step: int | None, out: files.Path, captions: str = "") -> pathlib.Path:
    """Create the workdir `out` with packed weights, and return the path of the packed file.

    Its config does not tell where the training data are, because it is often published.

    Args:
        workdir: The workdir of the run.
        which: "raw", the name of an average such as "0.9999", or "ema" for the average
            with the largest decay.
        step: The step of the checkpoint; None for the newest undamaged one.
        out: The new workdir.
        captions: A file or data source with the training captions (see data.prompts.read), from
            which vocabulary.json is made; "" to copy the run's vocabulary.json.

    Raises:
        ValueError: The checkpoint has no such weights, `out` already holds checkpoints, or
            `captions` holds no captions.
        FileNotFoundError: There is no checkpoint.
    """
    config = runs.load(workdir)
    mixture = [[weight, source, "", text] for weight, source, _, text in config["data"]["mixture"]]
    config["data"] |= {"path": "", "prior": "", "mixture": mixture}
    words = vocabulary.of(prompts.read(captions, every=True, flag="--captions")) if captions else None
    root = restore.absolute(workdir) / runs.CHECKPOINTS
    items = lambda at: restore.items_of(root / str(at), which)
    step = restore.newest_sound(root, items) if step is None else step
    restore.check_exists(root, step)
    shapes = restore.shapes(root / str(step), items(step)[0])
    params = restore.load_params(root, shapes, which, step)
    with averages.weights_alone(workdir, config, out) as folder:
        if words:
            vocabulary.write(out, words)
        folder.mkdir(exist_ok=True)
        with files.whole(folder / str(step)) as place:
            packed.write(place / packed.FILE, jax.device_get(params))
            checksums.write(place)
        # Orbax needs this file in a bucket, also if the folder is copied there later.
        files.write_whole(folder / str(step) / checksums.COMMIT, "")
    return folder / str(step) / packed.FILE


def check_push(name: str) -> None:
    """Check that --push can upload to the repository `name`, as far as this is known offline.

    Raises ValueError if `name` is not OWNER/NAME, or there is no token of the Hugging Face Hub.
    """
    import huggingface_hub  # Slow to import, and only needed for uploads and downloads.

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(f"--push={name} is no repository of the Hugging Face Hub: give OWNER/NAME")
    if not huggingface_hub.get_token():
        raise ValueError(
            f"--push={name} needs a token of the Hugging Face Hub that may write: run hf auth login, or set HF_TOKEN"
        )


def push(workdir: files.Path, name: str) -> str:
    """Upload a packed workdir to the repository `name` of the Hugging Face Hub; return its address.

    If the workdir has no README.md, write a model card. A repository that does not exist is created
    as a public one.

    Raises:
        ValueError: The hub refuses the upload or cannot be reached.
    """
    import huggingface_hub

    card = files.path(workdir) / "README.md"
    if not card.is_file():
        files.write_whole(card, _card(runs.load(workdir), name))
    api = huggingface_hub.HfApi()
    try:
        address = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=files.local(workdir), commit_message="Upload a packed model")
    except Exception as error:  # The library and the network raise many types.
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"--push={name} failed ({type(error).__name__}: {reason}): use a token that may write "
            f"to {name.partition('/')[0]}, then upload the model with hf upload {name} "
            f"{shlex.quote(os.fspath(workdir))}"
        ) from error
    return str(address)


def _card(config: Mapping[str, Any], name: str) -> str:
    """Return a model card that says what the model is and how to draw with it."""
    system, folder = config["system"].partition(".")[0], name.partition("/")[2]
    prompt = next(iter(config["prompts"]), "a red apple")
    return f"""---
pipeline_tag: text-to-image
tags: [jax, {system}]
---
# {folder}

A text-to-image model of `{system}`, trained for {config["steps"]:,} steps with batches of
{config["batch_size"]:,} pictures. `config.json` holds all settings, and `checkpoints` the weights.

```
hf download {name} --local-dir {folder}
python -m {system}.sample --workdir={folder} --prompt={shlex.quote(prompt)} --out=pictures
```
"""


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "The workdir of a run.", required=True)
    _OUT = flags.DEFINE_string("out", None, "The new workdir.", required=True)
    _EMA = flags.DEFINE_string(
        "ema", "ema", 'The weights to pack: an average such as 0.9999, "ema" for the largest average, or "raw".'
    )
    _CHECKPOINT = flags.DEFINE_integer(
        "checkpoint", None, "The step of a checkpoint; default: the newest undamaged one."
    )
    _CAPTIONS = flags.DEFINE_string(
        "captions",
        "",
        "The training captions: a text file with one per line, or a data source, "
        "written SOURCE:PATH::TEXT; default: the run's vocabulary.json.",
    )
    _PUSH = flags.DEFINE_string(
        "push",
        None,
        "OWNER/NAME of a repository on the Hugging Face Hub, to upload the new "
        "workdir with a model card; it needs a token (hf auth login, or HF_TOKEN).",
    )

    def main() -> None:
        """Pack the weights of a workdir."""
        cli.start(alone=True)
        with cli.bad_input():
            if _PUSH.value is not None:
                check_push(_PUSH.value)
            file = pack(_WORKDIR.value, _EMA.value, _CHECKPOINT.value, _OUT.value, _CAPTIONS.value)
            print(f"wrote {file}, {files.path(file).stat().st_size / 1e6:.1f} MB")
            if _PUSH.value is not None:
                print(f"uploaded to {push(_OUT.value, _PUSH.value)}")

    cli.run(main)
