# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Imagen's quick start
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/YOUR-NAME/imagen-sd-jax/blob/main/notebooks/imagen_quickstart.ipynb)
#
# This notebook trains a small text-to-image model on handwritten digits in named colours, scores
# it, and draws with it. It takes about five minutes on a GPU or on two CPU cores.
#
# The first cell draws with a trained model that comes with the project. If the project is not
# installed yet, the cell clones `REPOSITORY` and installs an exact set of packages.

# %%
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile

from IPython.display import Image, display

REPOSITORY = "https://github.com/YOUR-NAME/imagen-sd-jax"

if os.path.isdir("../imagen_jax"):  # The notebook is open in a checkout of the project.
    os.chdir("..")
if importlib.util.find_spec("imagen_jax") is None:
    if not os.path.isdir("imagen-sd-jax"):
        subprocess.run(["git", "clone", "--depth=1", REPOSITORY, "imagen-sd-jax"], check=True)
    os.chdir("imagen-sd-jax")
    packages = ["-r", "requirements.txt", "-c", "constraints.txt"]
    packages += ["jax[cuda13]"] if shutil.which("nvidia-smi") else []
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *packages], check=True)

# SHIPPED can be any workdir. The command runs in a separate process, so that it frees the GPU.
SHIPPED = os.environ.get("SHIPPED", "models/emoji32")
if os.path.isdir(SHIPPED):
    with open(f"{SHIPPED}/config.json") as file:
        config = json.load(file)
    program, out = f"{config['system'].partition('.')[0]}.sample", tempfile.mkdtemp()
    command = [sys.executable, "-m", program, f"--workdir={SHIPPED}", f"--out={out}"]
    command += [f"--prompt={prompt}" for prompt in config["prompts"]]
    subprocess.run(command, check=True)
    display(Image(f"{out}/sheet.png"))

# %% [markdown]
# ## Train
# You can run the same command in a terminal. Flags can change any value of `configs/quickstart.py`.
# If the command is killed, run it again: it continues from its last checkpoint.

# %%
WORKDIR = os.environ.get("WORKDIR", "runs/quickstart")
CONFIG = os.environ.get("CONFIG", "--config=configs/quickstart.py --config.steps=1200")

# !{sys.executable} -m imagen_jax.train {CONFIG} --workdir={WORKDIR}

# %%
from matplotlib import pyplot as plt

with open(f"{WORKDIR}/metrics.jsonl") as file:
    lines = [json.loads(line) for line in file]
plt.plot([line["step"] for line in lines], [line["loss"] for line in lines])
plt.xlabel("step")
plt.ylabel("loss")
plt.show()

# %% [markdown]
# ## Score
# At each guidance scale, a classifier recognises digit, ink and paper in every picture. Prompts
# that are not in the training data are scored separately.

# %%
SCALES = os.environ.get("SCALES", "--guidance=1,2,3")

# !{sys.executable} -m imagen_jax.evaluate --workdir={WORKDIR} --name=notebook {SCALES}

# %%
display(Image(f"{WORKDIR}/evaluation/notebook/curve.png", width=600))

# %% [markdown]
# TensorBoard shows the losses (in total and by noise level), the samples over time, the config,
# and the scores by guidance scale.

# %%
os.environ.setdefault("TENSORBOARD_BINARY", f"{os.path.dirname(sys.executable)}/tensorboard")
# %load_ext tensorboard
# %tensorboard --logdir {WORKDIR}

# %% [markdown]
# ## Draw
# An image depends only on its prompt and its seed. Change either and run the cell again. From here
# on, the notebook itself occupies the GPU, so commands like those above would run out of memory.

# %%
import imagen_jax

model = imagen_jax.load(WORKDIR)
prompts = ["a red seven on gray paper", "a white two on cyan paper", "a blue three on black paper"]
model.draw(prompts, seeds=[0, 1, 2])

# %% [markdown]
# All options of the sampler can be changed without loading the model again. To write your own
# sampler, use `model.denoiser`, which returns D(x, sigma) for given prompts. The next cell
# implements Euler's method.

# %%
import itertools

D = model.denoiser(prompts, guidance=3)
x = D.start(seeds=[0, 1, 2])
for sigma, lower in itertools.pairwise(D.sigmas):
    x = x + (lower - sigma) * (x - D(x, sigma)) / sigma
pictures = D.pictures(x)
