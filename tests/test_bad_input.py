"""Users' mistakes, through the real commands: a one-line error and exit code 2."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.imagen_jax import commands

ROOT = pathlib.Path(__file__).parent
# Arguments of `python -m`, with required flags. D is the folder of `files`.
COMMANDS = {
    "train": "imagen_jax.train --config=configs/quickstart.py --workdir=D/new",
    "sd_train": "sd_jax.train --config=configs/sd_quickstart.py --workdir=D/new",
    "vae": "sd_jax.train_vae --config=configs/sd_quickstart_vae.py --workdir=D/new",
    "sample": "imagen_jax.sample --workdir=D/imagen --out=D/out",
    "sd_sample": "sd_jax.sample --workdir=D/sd --out=D/out",
    "evaluate": "imagen_jax.evaluate --workdir=D/imagen",
    "averages": "diffusion_jax.averages --workdir=D/imagen",
    "precache": "diffusion_jax.precache --config=configs/quickstart.py --config.text.store=D/store",
    "moments": "sd_jax.precache --out=D/moments",
    "data": "diffusion_jax.data",
    "prepare": "diffusion_jax.data.prepare",
    "digits": "diffusion_jax.data.digits --out=D/digits",
    "report": "diffusion_jax.report",
    "plan": "launch.plan --config=configs/quickstart.py",
    "heldout": "diffusion_jax.heldout --workdir=D/imagen",
    "replay": "imagen_jax.replay --workdir=D/imagen --step=1",
    "metrics": "diffusion_jax.metrics",
    "rcp": "sd_jax.rcp",
    "coco": "sd_jax.prepare",
    "slurm": "launch.slurm --job=launch/jobs/quickstart_sweep.py --dry_run",
    "gke": "launch.gke --job=launch/jobs/base64_500m.py --dry_run",
    "start": "imagen_jax.start --data=D/images --out=D/new.py",
    "sd_start": "sd_jax.start --data=D/images --out=D/new.py",
    "weights": "sd_jax.weights convert --from=D/file --to=D/converted",
    "sd_weights": "sd_jax.weights",
    "imagen_weights": "imagen_jax.weights",
    "model": "sd_jax.sample --out=D/out",
    "profile": "benchmarks.profile --config=configs/quickstart.py",
    "plan_vae": "launch.plan --config=configs/sd64_vae.py",
}
TABLE = """
train --config=D/syntax.py | D/syntax.py, line 2: SyntaxError: invalid syntax
train --config=D/raises.py | D/raises.py, line 2: ZeroDivisionError: division by zero
train --config=D/seven.py | D/seven.py: get_config returns 7: it must return a ConfigDict
train --config=configs/quikstart.py | 'configs/quikstart.py': did you mean configs/quickstart.py?
train --config.optimizer.accumulate=2 | optimizer.accumulate: its name is now optimizer.micro_batch
train --config.data.source=folder --config.data.path=/nowhere | digits --format=folder --num=100
train --config.data.source=webdataset --config.data.path=/nowhere | digits --format=webdataset
train --config.data.source=folder --config.data.path=D/plain | no text (data.text=txt): 0.png. Add
train --workdir=D/imagen | D/imagen was made with another config (
train --config.text.path=x | unknown config field text.path: text has 
train --config.unet.embd_dim=3 | unknown config field unet.embd_dim: did you mean unet.embed_dim?
train --config.unit.patch=3 | unknown config field unit: did you mean unet?
train --config.zzz=3 | unknown config field zzz: the config has
train --nosuch=1 | Unknown command line flag 'nosuch'
train word | unknown arguments ['word']
train --config=configs/sd_quickstart.py | the config is of the system sd_jax, not imagen_jax
sd_train --config=configs/quickstart.py | the config is of the system imagen_jax, not sd_jax
train --workdir=D/file | workdir D/file is a file, or inside one: name a folder
train --workdir=D/a[1] | workdir D/a[1]: its path contains [, so its checkpoints could not be read
train --workdir=D/file/in | workdir D/file/in is a file, or inside one: name a folder
train --workdir= | --workdir is empty
train --workdir=/proc/none/x | /proc/none
train --workdir=D/damaged | D/damaged/config.json: Expecting property name
train --config.steps=0 | steps is 0: it must be above 0
train --config.steps=abc | flag --config.steps=abc: give a whole number, not 'abc'
train --config.optimizer.lr=x | flag --config.optimizer.lr=x: give a number, not 'x'
train --config.seed=18446744073709551616 | seed is 18446744073709551616: it must be from 0
train --config.batch_size=7 --config.optimizer.micro_batch=2 | batch_size 7 is not divisible by
train --config.mesh.fsdp=3 | mesh replica=1, fsdp=3, tensor=1 does not fit 1 devices
train --config.unet.dtype=float16 | unet.dtype is float16, in which small gradients become 0: train
vae --config.vae.dtype=float16 | vae.dtype is float16, in which small gradients become 0: train with
sample --ema=0.07 --prompt=x | no average '0.07' in
averages --width=0.4 --out=D/out | --width=0.4: it must be above 0 and at most 0.28
averages --width=0.07 | --width (the average) and --out (the folder to write) belong together
averages | holds no power-function averages: train with
train --config.sampler.guidance_low=5.0 --config.sampler.guidance_high=2.0 | guidance_high is 2.0
train --config.text.encoder=t5 | weights
train --config.evaluation.guidance=() --config.evaluation.every=8 | evaluation.guidance is empty
train --config.evaluation.every=8 --config.evaluation.prompts=D/none.txt | evaluation.prompts=D/none
train --config.data.source=digitz | the data source 'digitz' is unknown
train --config.data.source=folder --config.data.path=D/empty | D/empty
train --config.data.source=folder --config.data.path=D/images --config.data.min_size=99 | too_small
train --config.data.source=arrow --config.data.path=D/table.parquet | D/table.parquet
train --config.data.source=mixture | data.mixture is empty: the data source 'mixture' needs
sd_train --config.vae.weights= | vae.weights is empty: name a diffusers directory
sd_train --config.vae.weights=/nowhere | no file /nowhere
vae --config.reconstruction.image_size=0 | reconstruction.image_size is 0: it must be from 1 to
sd_sample --workdir=D/imagen --prompt=a | D/imagen is a run of imagen_jax, not of sd_jax
sample --workdir=D/sd --prompt=a | D/sd is a run of sd_jax, not of imagen_jax
sample --workdir=D/damaged --prompt=a | D/damaged/config.json: Expecting property name
sample --workdir=D/list --prompt=a | D/list/config.json: it holds a list, not a config
sample --workdir=D/none --prompt=a | D/none holds no config.json
sample --prompts=D/binary.txt | D/binary.txt is not UTF-8 text (byte 0x80 at offset 128, line 2)
sample --prompts=D/empty.txt | D/empty.txt holds no prompts
sample --prompts=D/short.tsv | D/short.tsv, line 3 has 1 cells, but the first line names 2
evaluate --prompts=D/short.tsv | D/short.tsv, line 3 has 1 cells, but the first line names 2
precache --captions=D/short.tsv | D/short.tsv, line 3 has 1 cells, but the first line names 2
metrics clip D/images --prompts=D/short.tsv --clip=x | D/short.tsv, line 3 has 1 cells, but the
sample --prompts=D/none.txt | --prompts=D/none.txt cannot be read: [Errno 2] No such file
evaluate --prompts=D/none.txt | --prompts=D/none.txt cannot be read: [Errno 2] No such file
metrics clip D/images --prompts=D/none.txt --clip=x | --prompts=D/none.txt cannot be read: [Errno
sample --prompts=D/empty | D/empty holds no prompts: add some
sample | give either prompts (--prompt=TEXT or --prompts=FILE) or --embeddings=FILE
sample --prompt=a --embeddings=a.npy | or --embeddings=FILE, computed with
sample --prompt=a --guidance=1,2 | guidance has 2 values for 1 stages
sample --prompt=a --guidance=two | --guidance is 'two': it must be a number
sample --prompt=a --seed=-1 | seed
sample --prompt=a --seed=18446744073709551616 | seed
sample --workdir=D/empty --prompt=a | --config=configs/quickstart.py --workdir=D/empty
sd_sample | there is nothing to draw: give --prompt=TEXT or --prompts=FILE
sd_sample --prompt=a --sampler=ddimm | --sampler is 'ddimm': did you mean
sd_sample --prompt=a --steps=1001 | --steps is 1001: it must be
model | give exactly one of --workdir=FOLDER (a training run) and --model=PATH
model --model=nope --prompt=a | nope
sample a wrong word | unknown arguments ['a', 'wrong', 'word']: write --prompt='a'
sample --prompt=a --out= | --out is empty
sample --prompt=a --sampler=huen | --sampler is 'huen': did you mean 'heun'?
sample --prompt=a --steps=0 | --steps is 0: it must be above 0
sample --prompt=a --guidance=nan | --guidance is nan: it must be from 0 to 1000
sample --prompt=a --checkpoint=7 | no checkpoint of step 7
sample --prompt=a --num_images=0 | num_images
sample --embeddings=D/none.npy | No such file or directory: 'D/none.npy'
sample --embeddings=D/states.npy | the text encoder 'hashed', which cannot use embeddings from files
sample --prompt=a --mask=D/wide.png | --mask=D/wide.png needs a picture: give --image
sample --prompt=a --strength=0.5 | --strength needs a picture to draw over: give --image
sample --prompt=a --image=D/images/0.png --mask=D/wide.png | is 4x3, but its picture is 20x20
sample --prompt=a --image=D/wide.png | the picture is 4x3: crop it to a square
sample --prompt=a --image=D/images/0.png --strength=2 | --strength is 2.0: it must be from 0 to 1
sd_sample --prompt=a --strength=0.5 | --strength needs a picture to draw over: give --image
sd_sample --prompt=a --image=D/images/0.png --mask=D/wide.png | is 4x3, but its picture is 20x20
sd_sample --prompt=a --lora=D/none | --config and --lora need --model: leave them out
train --config.unet.weights=D/none | unet.weights is 'D/none': there is no such run, folder or file
train --config.unet.weights=models/emoji32 | unet.weights=models/emoji32: 
train --config.lora.rank=4 | lora.rank is 4 and unet.weights is empty: name the model to adapt
train --config.lora.rank=-1 | lora.rank is -1: it must be 0 or more
train --config.data.prior=D/images | a folder without a .jsonl with the prompts of its
sd_sample --prompt=a --height=13 | sampler.height is 13
sd_sample --prompt=a --image=D/none.png | --image=D/none.png cannot be opened: [Errno 2] No such
sd_sample --prompt=a --image=D/file | --image=D/file is not an image that Pillow can read
sd_sample --prompt=a --image=D/images/0.png --strength=0 | strength is 0.0: it must be above 0
sd_sample --prompt=a --model=D/file | give exactly one of --workdir=FOLDER (a training run)
evaluate --name=../../x | --name=../../x: give the name of a folder under evaluation/, not a path
evaluate --name= | --name=: give the name of a folder
evaluate --guidance=x | --guidance is 'x': it must be a number
evaluate --guidance=-3 | --guidance is -3.0: it must be from 0 to 1000
evaluate --checkpoint=1 | no checkpoint of step 1
evaluate --checkpoint=x | --checkpoint is 'x': it must be a whole number
evaluate --reference=D/none.npz | --reference has no effect without a file of prompts
evaluate --prompts=D/binary.txt | D/binary.txt is not UTF-8 text
evaluate --workdir=D/sd | D/sd is a run of sd_jax, not of imagen_jax
precache --workers=2 --worker=2 | --worker=2 of --workers=2: the index must be from 0 to 1
precache --captions=D/none | --captions=D/none cannot be read: [Errno 2] No such file
precache --captions=D/binary.txt | D/binary.txt is not UTF-8 text
moments --config=configs/quickstart.py | the config is of the system imagen_jax, not sd_jax
data show /nowhere | no data at /nowhere: check the path
data show D/images --row=x.png | --row=x.png: no picture has this name, and no file of this name was
data show D/images --by=x | argument --by: invalid choice: 'x' (choose from 'origin', 'reason')
data show D/bare.tar | no captions in D/bare.tar (suffixes of its files: png): set --text
data import D/images --out=D/file | D/file is a file: choose another --out
data import D/images --source=foldr | data source is 'foldr': did you mean 'folder'?
prepare validate --source=folder --path=D/images --out=D/v --threads=0 | --threads: give 1 or more
prepare validate --source=folder --path=/nowhere --out=D/v | /nowhere
digits --size=7 | --size=7: the side must be a multiple of 8
digits --num=0 | --num=0: write at least 1 picture
report D/metrics | D/metrics/metrics.jsonl, line 2 is damaged: '{"step": '
report D/none | D/none holds neither metrics.jsonl nor evaluation/*/sweep.csv
plan --target=h10:8 | accelerator is 'h10': did you mean 'h100'?
plan --fast --target=h100:6 --config.mesh.fsdp=4 | 4 does not divide 6
plan --fast --target=h100:8 --config.mesh.fsdp=4 | uses 4 of the target's 8 devices
plan --fast --target=h100:8 --config.batch_size=12 | batch_size 12 is not divisible by
plan_vae --target=v5e:1x1 | sd_jax.vae, which cannot be planned
profile --target=h100:8 | does not make for h100: choose a target from v5e, v5p
plan --target=h100:8 --mfu=0 | --mfu=0.0: it must be above 0 and at most 1
train --config.sampler.guiding=cfg_pp --config.sampler.name=restart | is 'cfg_pp', but cfg_pp cannot
train --config.sampler.guiding=cfg_pp --config.sampler.name=heun(churn=3) | is 'cfg_pp', but cfg_pp
sample --prompt=a --guiding=cfg_pp --sampler=restart | choose euler, or ddim with sampler.eta
sample --prompt=a --guiding=cfg_pp --sampler=heun(churn=5) | choose euler, or ddim with sampler.eta
sd_sample --prompt=a --guiding=cfg_pp --sampler=restart | choose euler, or ddim with sampler.eta
evaluate --guiding=cfg_pp --sampler=restart | choose euler, or ddim with sampler.eta
sample --prompt=a --guiding=cfgpp | cfgpp
sample --prompt=a --guide=D/none | D/none
sample --prompt=a --sampler=heun(wrong=1) | wrong
sample --prompt=a --ema=0.5 | 0.5
evaluate --metrics=nosuch | nosuch
replay --step=0 | --step=0: D/imagen has the steps 1 to
replay --workdir=D/sd | D/sd is a run of sd_jax: replay it with python -m sd_jax.replay
replay --workdir=D/none | D/none holds no config.json
replay --workdir=D/file | D/file is a file: choose another --workdir
replay --step=x | flag --step=x
heldout --workdir=D/none | D/none holds no config.json
heldout --levels=x | --levels is 'x': it must be a number
heldout --levels=nan | --levels is nan: it must be above 0
heldout --share=2 | share
heldout --data=x:y | data source is 'x'
heldout | D/imagen has no held-out records: give the share
heldout --share=0.01 --checkpoint=7 | no checkpoint of step 7
report D/scored --out=D/none/page.html | D/none/page.html
heldout word | unknown arguments ['word']
metrics fid D/none.npz D/none.npz --dinov2=D/none | D/none
metrics compare D/none D/none | D/none
metrics stats --images=D/images --out=D/x.txt | the name must end in .npz
rcp | no run is given: name workdirs or logs
rcp D/none | D/none
coco captions --annotations=D/none --out=D/x.tsv | --annotations=D/none does not exist
coco laion --metadata=D/empty --out=D/x | D/empty holds no .parquet files
slurm --job.accelerator=v5e:2x2 --job.workdir=/shared/x | choose GPUs for Slurm
slurm --job.accelerator=h100:12 --job.workdir=/shared/x | each host has 8 GPUs
slurm --job.acelerator=h100:8 | did you mean accelerator
gke --job.image=x --job.workdir=/shared/x | choose a folder in a bucket
weights | D/file
sd_weights | usage: python -m sd_jax.weights convert --from=PATH
sd_weights verify case.npz | usage: 
sd_weights convert --from=a.npz | usage: 
sd_weights convert --from=no.ckpt --to=b | error: there is no file no.ckpt
imagen_weights | usage: python -m imagen_jax.weights convert --from=FILE
imagen_weights verify case.npz | usage: 
imagen_weights convert --from=a.npz --to=b | usage: 
imagen_weights convert --form=a.npz | error: Unknown command line flag 'form'
imagen_weights export --from=nowhere --to=a.npz | error: nowhere holds no config.json
imagen_weights convert --from=no.ckpt --to=b --config=configs/base64_500m.py | no file no.ckpt
start --data=/nowhere | no data at /nowhere: check the path
start --data= | --data is empty: give the path of your pictures
start --data=D/empty | no images in D/empty: looked for
start --data=D/broken | none of 1 pictures of D/broken can be used: 1 broken_image
start --data=D/bare.tar | no captions in D/bare.tar (suffixes of its files: png): set --text
start --data=D/a.zip | D/a.zip is a zip file, which is not read: unpack it into a folder
start --data=D/zipped | found zip; check the path, or unpack the zip files
start --data=D/table.parquet | D/table.parquet has no image column, but only the columns
start --data=D/file | D/file is not a folder, .tar, .csv, .tsv, .jsonl, .json or .parquet
start --data=D/images --text=json:caption | 1 of 1 images have no text (data.text=json:caption)
start --data=D/images --text=npy | --text=npy names embeddings, but this command needs captions
start --hours=0 | --hours=0: give a number of hours above 0
start --hours=-1 | --hours=-1: give a number of hours above 0
start --hours=nan | --hours=nan: give a number of hours above 0
start --out=D/raises.py | D/raises.py exists already: give another --out
start --out=D/wide.py | D/wide.png exists already: give another --out
start --out=D/new.txt | --out=D/new.txt: give the name of a Python file
start --text_weights=D/none | D/none
start D/images | write --data=D/images
sd_start --vae=D/none | D/none
train --config=configs/quickstart.py:7 | configs/quickstart.py: TypeError: get_config() takes 0
train --config=D/two.py | D/two.py: TypeError: get_config() missing 2 required positional arguments
train --config=D/value.py | D/value.py, line 2: ValueError: a\\x1b[31mred
train --config.batch_size=100000000 | a training step needs about 4
train --config.data.source=webdataset --config.data.path=x{0..999999999999}.tar | for 1,000,000,00
train --config.data.source=webdataset --config.data.path=D/cut.tar | tars in D/cut.tar are damaged: 
train --workdir=D/dangling | workdir D/dangling: D/dangling is a link to D/nowhere, which does not e
sample --prompts=/dev/zero | /dev/zero has more than 67,108,864 bytes, the limit for a text
sample --prompt=a --image=D/cut.png | --image=D/cut.png is damaged: 
sd_sample --prompt=a --image=D/cut.png | --image=D/cut.png is damaged: 
sd_sample --prompt=a --image=D/images/0.png --strength=nan | strength is nan: it must be above 0 and
sample --prompt=a --image=D/images/0.png --strength=nan | --strength is nan: it must be from 0 to 1
sample --prompt=a --num_images=1000000000 | num_images
sd_sample --prompt=a --height=100000000 | images of 16x100000000 need more than
coco captions --annotations=D/deep.json --out=D/x.tsv | D/deep.json does not have the format of
coco images --captions=D/binary.txt --images=D/images --out=D/x | D/binary.txt is not a table: use
prepare fetch --url=file:///etc/passwd --out=D/x | file:///etc/passwd is not fetched: its scheme mus
plan --target=h100:1000000000 | at most 32,768 GPUs
sd_start --out=D/raises.py | D/raises.py exists already
"""
ROWS = [line.split(" | ") for line in TABLE.strip().splitlines()]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with runs that can draw, and with files that are invalid."""
    folder = tmp_path_factory.mktemp("bad")
    for name, packed in (("imagen", "imagen_cc541fd"), ("sd", "sd_cc541fd")):
        with tarfile.open(ROOT / f"fixtures/earlier_runs/{packed}.tar.xz") as tar:
            tar.extractall(folder, filter="data")
        (folder / packed).rename(folder / name)
    config = "def get_config():\n    return {}\n"
    for name, value in (("raises", "1 / 0"), ("seven", "7"), ("syntax", "(")):
        (folder / f"{name}.py").write_text(config.format(value))
    (folder / "syntax.py").write_text("x = 1\ndef get_config(:\n    return x\n")
    for name, text in (("damaged", '{"system": "imagen_jax", '), ("list", "[1]")):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text)
    (folder / "two.py").write_text("def get_config(a, b):\n    return {}\n")
    (folder / "value.py").write_text("def get_config():\n    raise ValueError('a\\x1b[31mred')\n")
    (folder / "deep.json").write_text('{"annotations": ' + "[" * 100_000)
    (folder / "dangling").symlink_to(folder / "nowhere")
    for name in ("broken", "empty", "images", "metrics", "plain", "scored", "zipped"):
        (folder / name).mkdir()
    for place in (folder, folder / "zipped"):
        (place / "a.zip").write_bytes(b"PK")
    lines = ['{"step": 1, "loss": 2}', '{"step": ', json.dumps({"step": 3}), ""]
    (folder / "metrics" / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "scored" / "metrics.jsonl").write_text(lines[0] + "\n")
    for name in ("metrics", "scored"):
        shutil.copy(folder / "imagen" / "config.json", folder / name)
    (folder / "file").write_text("no folder")
    np.save(folder / "states.npy", np.zeros((2, 32), np.float32))
    (folder / "binary.txt").write_bytes(bytes(range(256)))
    (folder / "empty.txt").write_text("\n \n")
    (folder / "short.tsv").write_text("id\tcaption\n1\ta\n2\n")
    Image.new("RGB", (20, 20)).save(folder / "images" / "0.png")
    (folder / "images" / "0.txt").write_text("a cat")
    Image.new("RGB", (20, 20)).save(folder / "plain" / "0.png")
    Image.new("L", (4, 3)).save(folder / "wide.png")
    (folder / "broken" / "0.png").write_bytes((folder / "images" / "0.png").read_bytes()[:40])
    (folder / "broken" / "0.txt").write_text("a cat")
    with tarfile.open(folder / "bare.tar", "w") as tar:
        tar.add(folder / "images" / "0.png", "0.png")
    with tarfile.open(folder / "whole.tar", "w") as tar:
        tar.add(folder / "images" / "0.png", "0.png")
        tar.add(folder / "images" / "0.txt", "0.txt")
    (folder / "cut.tar").write_bytes((folder / "whole.tar").read_bytes()[:2048])
    Image.effect_noise((64, 64), 99).save(folder / "cut.png")
    os.truncate(folder / "cut.png", 2000)
    pq.write_table(pa.table({"image": [b"x"], "caption": ["a"]}), folder / "table.parquet")
    return folder


@pytest.mark.parametrize(("line", "message"), ROWS, ids=[line for line, _ in ROWS])
def test_bad_input_is_a_one_line_error_with_exit_code_2(files, line, message):
    name, _, rest = line.partition(" ")
    module, *first = COMMANDS[name].replace("D/", f"{files}/").split()
    own = rest.replace("D/", f"{files}/").split()
    replaced = {argument.partition("=")[0] for argument in own}
    defaults = [argument for argument in first if argument.partition("=")[0] not in replaced]
    ended = commands.run(module, *defaults, *own, devices=1)
    assert ended.code == 2 and "Traceback" not in ended.err, ended.err
    assert message.replace("D/", f"{files}/") in ended.err, ended.err
    usage, _, message_lines = ended.err.partition(" error: ")  # argparse's usage can be long.
    message_lines = message_lines if usage.startswith("usage: ") else ended.err
    assert message_lines.count("\n") <= 6, ended.err
    assert not (files / "new").exists() and not (files / "out").exists()


@pytest.mark.slow
def test_a_missing_platform_is_a_one_line_error(tmp_path):
    command = [sys.executable, "-m", *COMMANDS["train"].replace("D/", f"{tmp_path}/").split()]
    ended = subprocess.run(
        command,
        cwd=ROOT.parent,
        env=os.environ | {"JAX_PLATFORMS": "cuda"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert "error: " in ended.stderr and "'cuda'" in ended.stderr


@pytest.mark.parametrize(("prompt", "lost"), [("a red seven 🎉", "🎉"), ("red " * 500, "red"), ("a red seven", "")])
def test_words_beyond_the_token_limit_are_ignored_with_a_warning(files, tmp_path, prompt, lost):
    flags = f"--workdir={files}/imagen", f"--out={tmp_path}/out", "--rehearse"
    ended = commands.succeed("sample", *flags, f"--prompt={prompt}")
    assert bool(lost) == bool(re.search(r"1 of 1 texts are not read in full", ended.err)), ended.err
    assert f"the text encoder ignores '{lost}" in ended.err or not lost
    assert "draws          1 images of 16x16, for 1 texts" in ended.out
