"""The commands that the campaign disturbs, their inputs, and the results that must be the same.

All are as small as possible, and load compiled programs from the cache.
"""

import contextlib
import csv
import hashlib
import http.server
import io
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.numpy
from PIL import Image

from diffusion_jax import files, runs
from diffusion_jax.data import tars
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.logs import run_log
from diffusion_jax.precache import store
from diffusion_jax.weights import restore
from tests import emulators, shared
from tests.campaign import damages, disturbances
from tests.campaign.damages import Damage
from tests.diffusion_jax.text import tiny_weights
from tests.imagen_jax import commands
from tests.imagen_jax.cases import random_weights
from tests.imagen_jax.conftest import TINY
from tests.sd_jax import tiny

STEPS = 12
# Pictures are drawn, and the held-out loss is measured, in the middle and at the end.
SCORED = (
    f"--config.sample_every={STEPS // 2}",
    "--config.data.heldout=0.001",
    f"--config.heldout.every={STEPS // 2}",
    "--config.heldout.records=8",
)
SWEEP = ("--guidance=1,3", "--name=sweep", "--batch_size=32", "--num_heldout=1")
Result = Mapping[str, bytes]


class Subject(NamedTuple):
    """A command that can be killed at any moment and then continued by the same command."""

    arguments: Callable[[pathlib.Path], tuple[str, ...]]
    """Of the folder that it may write into: the module and its arguments."""
    result: Callable[[pathlib.Path], Result]
    """Everything that matters of what it wrote, by name."""
    harms: Mapping[str, Damage] = {}
    """What may befall its files between two of its processes."""
    processes: int = 1
    verify: tuple[str, ...] = ()
    """Flags that make it read what is there."""
    notes: bool = False
    """Whether the samples that it takes can be noted: those of the digits can."""
    locks: bool = False
    """Whether only one process may write there."""
    phases: tuple[str, ...] = ()
    """The keys of disturbances.PHASES in which one of its processes is killed."""
    every: int = 1
    """It takes part in every so many turns, because it takes so many times as long as others."""
    bucket: str = ""
    """The URL of the emulator of Google's storage, if it writes to a bucket."""
    environment: Mapping[str, str] = {}
    """Environment variables of its processes."""
    begin: Callable[[pathlib.Path], Any] = lambda out: None
    """Fills a new folder with what the command expects there."""


@contextlib.contextmanager
def every(inputs: pathlib.Path):
    """Write inputs to a folder, and yield {name: subject}."""
    inputs.mkdir(parents=True)
    broken = tars_of_digits(inputs / "tars", broken=0.05)
    images = tars_of_digits(inputs / "images", broken=0.0)
    judged = inputs / "judged.tar"  # A judge needs more pictures.
    digits.write_examples(judged, 400, size=16, format="webdataset")
    weights = tiny_weights.t5_folder(inputs / "t5", width=64)
    table = table_of_digits(inputs / "table.parquet")
    vae = tiny.write_vae(inputs / "vae.safetensors")
    nemo = nemo_weights(inputs / "nemo.safetensors")
    trained = inputs / "trained"
    with slow_server() as (url, sums), emulators.running() as stores, mock.patch.dict(os.environ, stores):
        (inputs / "sums").write_text(sums)
        digit_run = ("train", *TINY, f"--config.steps={STEPS}", "--config.save_every=2")
        tar_run = (*digit_run, *data_flags("webdataset", broken, "txt"))
        judge_flags = (f"--data=webdataset:{judged}::txt", "--seen=256")
        sums_flags = (f"--url={url}/{{a,b,c}}.bin", f"--sums={inputs}/sums")
        run = lambda arguments: lambda out: (*arguments, f"--workdir={out}/run")
        yield (
            {
                "training": Subject(run(digit_run), run_result, damages.CHECKPOINT, notes=True, locks=True),
                "training on a table": Subject(
                    run((*digit_run, *data_flags("huggingface", table, "caption"))), run_result, damages.of_table(table)
                ),
                "a judge": Subject(
                    lambda out: ("diffusion_jax.metrics", "train_judge", f"--out={out}/judge", *judge_flags),
                    lambda out: contents(out / "judge", "*.safetensors"),
                ),
                "training on broken records": Subject(
                    run(tar_run), run_result, damages.CHECKPOINT | damages.of_input(broken)
                ),
                "training in two processes": Subject(
                    run((*digit_run, "--config.step_timeout=60", *SCORED)),
                    run_result,
                    processes=2,
                    phases=tuple(disturbances.PHASES),
                    every=5,
                ),
                "training into a bucket": Subject(
                    lambda out: (*digit_run, f"--workdir={in_bucket(out)}"),
                    bucket_result,
                    bucket=stores["STORAGE_EMULATOR_HOST"],
                    environment=stores,
                    every=5,
                ),
                "a store of texts": Subject(
                    lambda out: ("diffusion_jax.precache", *text_flags(weights, out / "store")),
                    store_result,
                    damages.files("store", "*[0-9a-f].safetensors", finished=True),
                    verify=("--verify",),
                ),
                "moments": Subject(
                    lambda out: ("sd_jax.precache", *moment_flags(images, vae), f"--out={out}/moments"),
                    lambda out: contents(out / "moments", "*[0-9a-f].safetensors"),
                    damages.files("moments", "*[0-9a-f].safetensors", finished=True),
                    verify=("--verify",),
                ),
                "a sweep": Subject(
                    lambda out: ("evaluate", f"--workdir={out}/run", *SWEEP),
                    sweep_result,
                    damages.files("run/evaluation/sweep", "**/images_*.npz"),
                    begin=lambda out: damages.copy(trained, out / "run"),
                ),
                "a download": Subject(
                    lambda out: ("diffusion_jax.data.prepare", "fetch", *sums_flags, f"--out={out}/files"),
                    lambda out: contents(out / "files", "*.bin"),
                    damages.files("files", ".*.part"),
                ),
                "a conversion": Subject(
                    lambda out: ("imagen_jax.weights", "convert", f"--from={nemo}", *NEMO, f"--to={out}/run"),
                    lambda out: arrays(out / "run"),
                ),
                "a packed model": Subject(
                    lambda out: ("diffusion_jax.pack", f"--workdir={trained}", f"--out={out}/small"),
                    lambda out: contents(out / "small", f"{runs.CHECKPOINTS}/{STEPS}/*.safetensors"),
                ),
            },
            trained,
        )


NEMO = (
    "--config=configs/quickstart.py",
    *commands.config_flags("unet.embed_dim=32 unet.head_dim=32 unet.cond_dim=32 text.width=32"),
)


def run_result(out: pathlib.Path) -> Result:
    """Return parameters, averages, optimizer, position, metrics and the order of samples."""
    lines = run_log.read_metrics(out / "run" / run_log.METRICS)
    steps = list(dict.fromkeys(line["step"] for line in lines))
    assert steps == list(range(1, STEPS + 1)), "lines of the metrics"
    metrics = json.dumps(shared.exact(lines)).encode()
    return {**arrays(out / "run"), "metrics": metrics, "samples": samples(out)}


def in_bucket(out: pathlib.Path) -> str:
    """Return the URL of a run that belongs to a folder."""
    return f"gs://{emulators.BUCKET}/{out.parent.name}/{out.name}".replace(" ", "_")


def bucket_result(out: pathlib.Path) -> Result:
    """Return the results of a run in a bucket, of which a copy is made in the folder."""
    bucket = files.path(in_bucket(out))
    for name in bucket.objects():
        (out / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (out / "run" / name).write_bytes((bucket / name).read_bytes())
    return run_result(out)


def arrays(workdir: pathlib.Path) -> Result:
    """Return all arrays of the newest checkpoint, and the position in the data."""
    folder = workdir / runs.CHECKPOINTS
    root = restore.absolute(folder) / str(restore.newest_sound(folder))
    result = {f"data/{path.name}": path.read_bytes() for path in (root / "data").glob("process_*")}
    spec = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    for item in ("params", "optimizer", *(path.name for path in root.glob("ema_*"))):
        tree = ocp.StandardCheckpointHandler().metadata(root / item).tree
        read = restore.load_items(root, {item: jax.tree.map(spec, tree)})[item]
        for path, leaf in jax.tree.leaves_with_path(read):
            result[f"{item}{jax.tree_util.keystr(path)}"] = np.asarray(leaf).tobytes()
    return result


def samples(out: pathlib.Path) -> bytes:
    """Return the pictures of each step, recorded by the last process that made this step."""
    taken: dict[int, Any] = {}
    paths = sorted((out / "taken").glob("*.jsonl"), key=lambda path: int(path.stem))
    for path in paths:
        for line in path.read_text().rpartition("\n")[0].splitlines():
            number, indices = json.loads(line)
            taken[number] = indices
    return json.dumps(sorted(taken.items())).encode()


def store_result(out: pathlib.Path) -> Result:
    """Return the keys of a store with their rows."""
    opened = store.Store(out / "store")
    result = {"captions": str(len(opened)).encode()}
    for path in sorted((out / "store").glob("*[0-9a-f].safetensors")):
        shard = safetensors.numpy.load_file(path) | {"errors": np.zeros(0)}
        result |= {f"{path.name}/{name}": array.tobytes() for name, array in shard.items()}
    return result


def sweep_result(out: pathlib.Path) -> Result:
    """Return the features of all images, and the table without durations."""
    folder, result = out / "run" / "evaluation" / "sweep", {}
    for path in sorted(folder.rglob("images_*.npz")):
        with np.load(path) as features:
            for name in set(features.files) - {"seconds"}:
                result[f"{path.parent.name}/{path.name}/{name}"] = features[name].tobytes()
    with (folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    keep = [{k: v for k, v in row.items() if k != "features_share_of_time"} for row in rows]
    return result | {"table": json.dumps(keep).encode()}


def contents(folder: pathlib.Path, pattern: str) -> Result:
    """Return {name: bytes} of matching files."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob(pattern))}


def tars_of_digits(folder: pathlib.Path, broken: float) -> pathlib.Path:
    """Write three tars of 40 digits, with a share of broken images."""
    digits.write_examples(folder / "plain.tar", 120, size=16, format="webdataset")
    index, records = tars.load_index(str(folder / "plain.tar")), []
    whole = bytearray((folder / "plain.tar").read_bytes())
    rng = np.random.default_rng(0)
    images = [span for span, suffix in zip(index.span.tolist(), index.suffix, strict=True) if suffix == "png"]
    for i, (first, size) in enumerate(images):
        image = bytes(size) if rng.random() < broken else bytes(whole[first : first + size])
        text = digits.Digits(16).read(np.array([i]))[1][0]
        records.append({tars.KEY: f"{i:05}".encode(), "png": image, "txt": text.encode()})
    for path in folder.iterdir():
        path.unlink()
    for part in range(3):
        tars.write(folder / f"{part}.tar", records[40 * part : 40 * part + 40])
    return folder


def table_of_digits(path: pathlib.Path) -> pathlib.Path:
    """Write a Parquet file of 120 digits with captions."""
    images, captions = digits.Digits(16).read(np.arange(120))
    encoded = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG")
        encoded.append(buffer.getvalue())
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    rows = pa.array([{"bytes": image, "path": None} for image in encoded], kind)
    pq.write_table(pa.table({"image": rows, "caption": list(captions)}), path)
    return path


def text_flags(weights: pathlib.Path, path: pathlib.Path) -> tuple[str, ...]:
    """Return the flags of a store of a tiny T5's embeddings."""
    text = {"encoder": "t5", "width": 64, "max_tokens": 16, "read_tokens": 16, "dtype": "float32"}
    fields = [f"--config.text.{k}={v}" for k, v in {**text, "weights": weights}.items()]
    store = (f"--config.text.store={path}", "--shard_captions=16", "--batch_tokens=128")
    return ("--config=configs/quickstart.py", *fields, *store)


def data_flags(source: str, path: pathlib.Path, text: str) -> tuple[str, ...]:
    """Return the flags of training on a data source."""
    return f"--config.data.source={source}", f"--config.data.path={path}", f"--config.data.text={text}"


def moment_flags(images: pathlib.Path, vae: pathlib.Path) -> tuple[str, ...]:
    """Return the flags of moments of a tiny VAE."""
    c = tiny.config(vae, data__source="webdataset", data__path=str(images))
    fields = {
        "vae": (*tiny.VAE_FIELDS, "weights", "dtype"),
        "unet": ("width", "channel_mult", "num_res_blocks", "attention_levels", "num_heads", "head_dim"),
        "latents": ("image_size",),
        "data": ("source", "path", "threads"),
        "text": ("encoder", "width", "weights"),
    }
    flags = [f"--config.{group}.{name}={c[group][name]}" for group, names in fields.items() for name in names]
    return ("--config=configs/sd1_256_pretrain.py", *flags, "--shard_images=8", "--batch=4")


def nemo_weights(path: pathlib.Path) -> pathlib.Path:
    """Write a state dict of NeMo for the config NEMO."""
    from configs import quickstart
    from imagen_jax.settings import read_settings
    from imagen_jax.weights import nemo

    c = quickstart.get_config()
    c.unet.update(embed_dim=32, head_dim=32, cond_dim=32)
    c.text.width = 32
    s = read_settings(c.to_dict())
    state = random_weights(s.unet, s.text.width)
    arrays = {nemo.PREFIX + name: np.ascontiguousarray(array) for name, array in state.items()}
    safetensors.numpy.save_file(arrays, path)
    return path


@contextlib.contextmanager
def slow_server():
    """Start a slow server of a.bin, b.bin and c.bin. Yield (URL, lines of sha256sum)."""
    files = {f"/{name}.bin": np.random.default_rng(i).bytes(2**20) for i, name in enumerate("abc")}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            content = files[self.path]
            start = int((self.headers.get("Range") or "bytes=0-")[len("bytes=") : -1])
            if start >= len(content):
                return self.send_error(416)
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            with contextlib.suppress(OSError):  # The client was killed.
                for i in range(start, len(content), 2**15):
                    self.wfile.write(content[i : i + 2**15])
                    time.sleep(0.03)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        sums = [f"{hashlib.sha256(body).hexdigest()}  {name[1:]}" for name, body in files.items()]
        yield f"http://127.0.0.1:{server.server_port}", "\n".join(sums) + "\n"
        server.shutdown()
        thread.join()


ROOT = commands.ROOT
