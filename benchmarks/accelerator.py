"""Measure speed and memory on an accelerator in a few minutes, the least known figures first.

    python -m benchmarks.accelerator --minutes=9 --out=measured
    python -m benchmarks.accelerator --minutes=5 --out=measured --continue
    python -m benchmarks.accelerator --list
    python -m benchmarks.accelerator --only=emoji --minutes=5 --out=measured
    JAX_PLATFORMS=cpu python -m benchmarks.accelerator --rehearse --out=rehearsed

Each part runs in a process of its own, with a time limit. A part that fails, hangs or runs out of
memory does not stop the others, and a part that does not fit into the remaining minutes is left
out and named. As soon as a part ends, its results are appended to OUT/results.jsonl and its output
to OUT/log.txt. At the end, the command writes the table that it prints to OUT/table.md: measured
rates, beside the rates that the planner expects and those that others have published. With
--continue, parts that OUT/results.jsonl already holds are not run again.

The part "emoji" trains configs/emoji64.py on the data that configs/emoji32.py describes, and writes
the packed model to OUT/emoji64.tar. No file in OUT is larger than 16 MB.

--rehearse runs every part with a tiny model, two parts at a time, to find mistakes on a CPU.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_LEAST_S = 40  # A part is left out if fewer seconds remain.
_LIMIT_BYTES = 16_000_000
_TINY_STEPS = ("--steps=1", "--warmup=0", "--batch=2")
_TINY_BASE = (
    "--config.unet.image_size=16",
    "--config.unet.embed_dim=32",
    "--config.unet.channel_mult=(1,)",
    "--config.unet.num_res_blocks=1",
    "--config.unet.attention_resolutions=()",
    "--config.unet.head_dim=32",
    "--config.unet.cond_dim=32",
    "--config.text.width=32",
    "--config.text.max_tokens=8",
    *_TINY_STEPS,
)
_TINY_SR = (
    "--config.unet.image_size=32",
    "--config.unet.embed_dim=32",
    "--config.unet.channel_mult=(1,2)",
    "--config.unet.num_res_blocks=(1,1)",
    "--config.unet.attention_levels=()",
    "--config.text.width=32",
    "--config.text.max_tokens=8",
    *_TINY_STEPS,
)
_TINY_SD = (
    "--config.unet.width=32",
    "--config.unet.channel_mult=(1,)",
    "--config.unet.head_dim=32",
    "--config.unet.attention_levels=(0,)",
    "--config.unet.num_res_blocks=1",
    "--config.latents.image_size=64",
    "--config.unet.attention_impl=auto",
    *_TINY_STEPS,
)

_TINY_LATENCY = ("--tiny", "--size=64", "--steps=2", "--rounds=1", "--batches=1", "--dtype=float32")


class Part(NamedTuple):
    """A command to run, with its time limit."""

    name: str
    about: str
    command: tuple[str, ...]
    """Module and flags."""
    seconds: int
    """Time limit."""
    tiny: tuple[str, ...] = ()
    """Flags to add in a rehearsal."""
    variables: Mapping[str, str] = {}
    """Environment variables to set."""
    published: float | None = None
    """Samples/s per GPU that others have published for this model."""
    source: str = ""
    """Where this rate is from, with its batch, duration, determinism and power."""


def _step(config: str, *flags: str) -> tuple[str, ...]:
    return ("benchmarks.train_step", f"--config=configs/{config}.py", "--profile", *flags)


_FREE = "--config.deterministic=False"
_CUDNN = "--config.unet.attention_impl=cudnn"
_BLOCK = "--config.unet.num_res_blocks=1"
_SD_32, _SD_64 = (_step("sd2_512_base", _CUDNN, f"--batch={n}") for n in (32, 64))
_SD_BLOCK = (*_SD_32, _BLOCK, "--seconds=15")
_BASE_BLOCK = _step("base64_500m", "--batch=64", _BLOCK, "--seconds=15")
_NEMO = "NeMo 2024, H100, 64 per GPU, duration and power not stated"
_HPE = "HPE, MLPerf v5.0, H200, 64 per GPU, steady over a run, not deterministic, fp16, UNet alone"
_DELL = "Dell, MLPerf v5.0, H200, 32 per GPU, steady over a run, not deterministic, fp16, UNet alone"
_GRAPHS = "--xla_gpu_enable_command_buffer=+CONVOLUTION --xla_gpu_graph_min_graph_size=1"
_KERNELS = ("benchmarks.kernels", "--batch=16", "--dtype=bfloat16", "--repeats=3")
_TINY_KERNELS = ("--batch=1", "--size=8", "--width=64", "--repeats=1", "--group_s=0")


def _flag(name: str, about: str, flags: str = "", *more: str) -> Part:
    """Return a part that trains Stable Diffusion's blocks with these flags of XLA."""
    variables = {"XLA_FLAGS": flags} if flags else {}
    return Part(
        f"flag_{name}",
        f"sd2_512_base, one block per level, batch 32, {about}",
        (*_SD_BLOCK, *more),
        120,
        _TINY_SD,
        variables,
    )


PARTS = (
    Part(
        "sd2_64_free", "sd2_512_base on latents, batch 64, any kernel", (*_SD_64, _FREE), 240, _TINY_SD, {}, 149.6, _HPE
    ),
    Part("sd2_64", "sd2_512_base on latents, batch 64", _SD_64, 240, _TINY_SD, {}, 149.6, _HPE),
    Part("sr256_64", "sr256_600m, batch 64", _step("sr256_600m", "--batch=64"), 240, _TINY_SR, {}, 170.8, _NEMO),
    Part(
        "sd2_32_free",
        "sd2_512_base on latents, batch 32, any kernel",
        (*_SD_32, _FREE),
        240,
        _TINY_SD,
        {},
        143.7,
        _DELL,
    ),
    Part("sd2_32", "sd2_512_base on latents, batch 32", _SD_32, 240, _TINY_SD, {}, 143.7, _DELL),
    Part(
        "base64_largest",
        "base64_500m, the largest batch that the planner expects to fit",
        _step("base64_500m", "--batch=0"),
        240,
        _TINY_BASE,
        {},
        202.4,
        _NEMO,
    ),
    _flag("none", "no further flags"),
    _flag("graphs", "convolutions in command buffers", _GRAPHS),
    _flag("l2", "L2 fetches of 128 bytes", "", "--l2_fetch=128"),
    _flag("cublaslt", "matrix products by cuBLASLt", "--xla_gpu_enable_cublaslt=true"),
    _flag("gemm_fusion", "matrix products fused by cuDNN", "--xla_gpu_cudnn_gemm_fusion_level=1"),
    _flag(
        "all",
        "all of these flags",
        f"{_GRAPHS} --xla_gpu_enable_cublaslt=true --xla_gpu_cudnn_gemm_fusion_level=1",
        "--l2_fetch=128",
    ),
    Part(
        "kernels_320",
        "every form of the operations of UNets, 320 channels at 64x64",
        (*_KERNELS, "--size=64", "--width=320"),
        120,
        _TINY_KERNELS,
    ),
    Part(
        "kernels_128",
        "the same for 128 channels at 128x128",
        (*_KERNELS, "--size=128", "--width=128"),
        120,
        _TINY_KERNELS,
    ),
    Part(
        "latency",
        "Stable Diffusion 2: seconds from tokens to pixels, batches 1, 4 and 16",
        ("benchmarks.sd_latency", "--model=2", "--batches=1,4,16", "--rounds=5"),
        240,
        _TINY_LATENCY,
    ),
    Part(
        "latency_graphs",
        "the same with convolutions in command buffers, batch 1",
        ("benchmarks.sd_latency", "--model=2", "--batches=1", "--rounds=5"),
        120,
        _TINY_LATENCY,
        {"XLA_FLAGS": _GRAPHS},
    ),
    Part("emoji", "five minutes of training configs/emoji64.py", ("benchmarks.emoji_training",), 300, ("--rehearse",)),
    Part(
        "resume",
        "base64_500m, one block per level, in bfloat16 with cuDNN's attention: "
        "interrupted and uninterrupted runs compared bit for bit",
        ("benchmarks.exact_resume", "--model=base64_500m", "--steps=60", "--both=False"),
        300,
        ("--tiny", "--steps=2"),
    ),
    Part(
        "machine",
        "driver, devices, checks of all operations, speed of products and convolutions",
        ("diffusion_jax.doctor", "--json"),
        120,
    ),
    Part(
        "base64_graphs",
        "base64_500m, one block per level, batch 64, convolutions in command buffers",
        _BASE_BLOCK,
        120,
        _TINY_BASE,
        {"XLA_FLAGS": _GRAPHS},
    ),
    Part("base64_block", "the same without", _BASE_BLOCK, 120, _TINY_BASE),
    Part(
        "base64_2b",
        "base64_2b, batch 16",
        _step("base64_2b", "--batch=16", "--seconds=30"),
        240,
        _TINY_BASE,
        {},
        61.9,
        _NEMO,
    ),
    Part(
        "sr1024_600m",
        "sr1024_600m on crops of 256, batch 64",
        _step("sr1024_600m", "--batch=64", "--seconds=30"),
        240,
        _TINY_SR,
        {},
        181.6,
        _NEMO,
    ),
    Part(
        "sr256_400m",
        "sr256_400m, batch 8",
        _step("sr256_400m", "--batch=8", "--seconds=30"),
        240,
        (*_TINY_BASE, "--config.unet.image_size=32"),
        {},
        50.7,
        _NEMO,
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts, and print the table of results."""
    names = [part.name for part in PARTS]
    split = lambda text: text.split(",")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=9.0, help="minutes until the command must have ended")
    add("--out", type=pathlib.Path, help="folder for the results; created if needed")
    add("--only", type=split, default=names, help="names of parts to run; default: all")
    add("--list", action="store_true", help="print the parts and exit")
    add(
        "--continue",
        dest="continued",
        action="store_true",
        help="leave out the parts that --out already holds results of",
    )
    add("--rehearse", action="store_true", help="run every part with a tiny model")
    add("--compilation_cache", type=pathlib.Path, help="folder for compiled programs")
    options = parser.parse_args(arguments)
    if options.list:
        for part in PARTS:
            print(f"{part.name:18} {part.about} (at most {part.seconds} s)")
        return
    if unknown := [name for name in options.only if name not in names]:
        parser.error(f"--only={','.join(unknown)}: the parts are {', '.join(names)}")
    if options.out is None:
        parser.error("--out is missing: name a folder for the results")
    options.out.mkdir(parents=True, exist_ok=True)
    earlier = _earlier(options.out / "results.jsonl") if options.continued else []
    done = {row["part"] for row in earlier}
    parts = [part for part in PARTS if part.name in options.only and part.name not in done]
    end, lock = time.monotonic() + 60 * options.minutes, threading.Lock()
    with concurrent.futures.ThreadPoolExecutor(2 if options.rehearse else 1) as pool:
        results = list(pool.map(lambda part: _run(part, options, end, lock), parts))
    table = _table([*earlier, *results])
    (options.out / "table.md").write_text(table)
    print(table, flush=True)
    named = lambda status: ", ".join(row["part"] for row in results if row["status"] == status)
    if left_out := named("left out"):
        print(f"left out: {left_out}; to run them, add --continue")
    if failed := named("failed"):
        sys.exit(f"failed: {failed}; {options.out / 'log.txt'} has their output")


def _earlier(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the rows of completed parts in a file of results."""
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [row for row in rows if row["status"] == "done"]


def _run(part: Part, options: argparse.Namespace, end: float, lock: threading.Lock) -> dict[str, Any]:
    """Run a part if enough time is left, keep its results, and return them."""
    left = end - time.monotonic()
    row: dict[str, Any] = {"part": part.name, "about": part.about}
    row |= {"published": part.published, "source": part.source}
    if left < _LEAST_S:
        row |= {"status": "left out", "seconds": 0.0, "results": []}
        text = f"{left:.0f} s are left, and a part needs at least {_LEAST_S} s"
    else:
        start = time.monotonic()
        status, text, errors = _execute(part, options, min(part.seconds, left - 5))
        seconds = time.monotonic() - start
        row |= {"status": status, "seconds": seconds, "results": _parse(text)}
        text += errors
    with lock:
        _append(options.out / "results.jsonl", json.dumps(row) + "\n")
        _append(options.out / "log.txt", f"==== {part.name}: {row['status']}\n{text[-1_000_000:]}\n")
        print(f"{part.name}: {row['status']} after {row['seconds']:.0f} s", flush=True)
    return row


def _execute(part: Part, options: argparse.Namespace, limit: float) -> tuple[str, str, str]:
    """Run a part's command for at most `limit` seconds. Returns (status, output, errors)."""
    command, variables = [sys.executable, "-m", *part.command], dict(os.environ)
    if not options.rehearse:
        variables |= part.variables
    else:
        command += part.tiny
        variables["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"  # Compiles three times as fast.
    if part.name == "emoji":
        command += [f"--minutes={limit / 60}", f"--out={options.out}"]
    if options.compilation_cache:
        variables["JAX_COMPILATION_CACHE_DIR"] = str(options.compilation_cache.absolute())
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables, start_new_session=True
    )
    try:
        text, errors = process.communicate(timeout=limit)
        return "failed" if process.returncode else "done", text, errors
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # The part's own child processes, too.
        text, errors = process.communicate()
        return f"stopped after {limit:.0f} s", text, errors


def _parse(text: str) -> list[Any]:
    """Return the JSON values in a part's output: the whole output, or each line that is JSON."""
    try:
        return [json.loads(text)]
    except ValueError:
        rows = []
    for line in text.splitlines():
        if line.startswith("{"):
            rows.append(json.loads(line))
        elif line.startswith("|"):
            rows.append(line)
    return rows


def _append(path: pathlib.Path, text: str) -> None:
    if not path.exists() or path.stat().st_size + len(text.encode()) < _LIMIT_BYTES:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)


def _table(results: Sequence[Mapping[str, Any]]) -> str:
    lines = [_machine(results), "", *_rates(results)]
    for row in results:
        values = [v for v in row["results"] if "samples_per_second" not in v]
        if row["part"] == "machine" or not values:
            continue
        lines += ["", f"**{row['part']}**: {row['about']} ({row['status']})", ""]
        lines += [v if isinstance(v, str) else f"- `{json.dumps(v)}`" for v in values]
    return "\n".join(lines) + "\n"


def _machine(results: Sequence[Mapping[str, Any]]) -> str:
    query = "--query-gpu=name,driver_version,memory.total"
    try:
        smi = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True
        ).stdout.strip()
    except FileNotFoundError:
        smi = "no NVIDIA driver"
    report = next((row["results"][0] for row in results if row["part"] == "machine" and row["results"]), {})
    jax = next((line for line in report.get("jax", []) if line.startswith("jax:")), "")
    versions = ", ".join(f"{name} {version}" for name, version in report.get("versions", {}).items())
    wrong = [row["check"] for row in report.get("checks", []) if row["verdict"] != "right"]
    checks = f"checks that are not right: {', '.join(wrong)}" if wrong else "all checks are right"
    parts = [
        smi,
        " ".join(jax.split()),
        versions,
        f"commit {report.get('git')}",
        f"rates {report.get('rates')}",
        checks,
    ]
    return "; ".join(part for part in parts if part)


def _rates(results: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| part | batch | deterministic | seconds | samples/s, first 100 steps "
        "| samples/s, last 100 | watts | planned | published | TFLOP/s | MFU | peak GiB "
        "| planned GiB | compilation, s | status |",
        "|" + "---|" * 15,
    ]
    number = lambda value, digits=1: "" if value is None else f"{value:,.{digits}f}"
    percent = lambda value: "" if value is None else f"{100 * value:.1f} %"
    for row in results:
        measured = [v for v in row["results"] if "samples_per_second" in v]
        for v in measured or [None] * (row["status"] != "done"):
            published = f"{row['published']} ({row['source']})" if row["published"] else ""
            figures = [*[""] * 7, published, *[""] * 5]
            if v:
                planned = v["planned"] or {}
                figures = [
                    str(v["batch"]),
                    "yes" if v["deterministic"] else "no",
                    number(v["seconds"], 0),
                    number(v["first_samples_per_second"]),
                    number(v["samples_per_second"]),
                    number(v.get("watts"), 0),
                    number(planned.get("samples_per_second")),
                    published,
                    number(v["tflops"]),
                    percent(v["mfu"]),
                    number(v["peak_memory_gib"]),
                    number(planned.get("memory_gib")),
                    number(v["compile_s"]),
                ]
            lines.append(f"| {row['part']} | {' | '.join(figures)} | {row['status']} |")
    return lines


if __name__ == "__main__":
    main()
