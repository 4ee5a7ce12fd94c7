"""Pictures of `sample --layout` are found as the benchmarks' own programs look for them."""

import json
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.data import prompts as prompt_files
from diffusion_jax.draw import layouts, sample_command
from tests.diffusion_jax.draw.test_sample_command import Constant

PROMPTS = ["a photo of a bench", "a cow. and a dog", "two clocks"]
SIDE = 4


def drawn(tmp_path, name, file, num_images):
    """Write pictures whose colour is 10 times their number, and return the output folder."""
    out, prompts = tmp_path / "out", prompt_files.read(file)
    layout = layouts.LAYOUTS[name](str(file), prompts, num_images)
    rows = [i for i in range(len(prompts)) for _ in range(num_images)]
    colours = 10 * np.arange(len(rows))[:, None, None, None] / 127.5 - 1
    images = np.broadcast_to(colours, (len(rows), SIDE, SIDE, 3))
    inputs = sample_command.Inputs(prompts, prompts)
    out.mkdir()
    batches = [[images]]
    sample_command._write(Constant(), inputs, out, rows, range(7, 99), batches, layout)
    lines = [json.loads(line) for line in (out / "metadata.jsonl").read_text().splitlines()]
    assert [line["seed"] for line in lines] == list(range(7, 7 + len(rows)))
    assert all((out / line["file_name"]).is_file() for line in lines)
    return out


def colour(path, box=(0, 0, SIDE, SIDE)):
    pixels = np.asarray(Image.open(path).crop(box))
    assert pixels.min() == pixels.max()
    return int(pixels.max())


def geneval_file(tmp_path):
    include = lambda count: [{"class": "bench", "count": count}]
    rows = [{"tag": "counting", "include": include(n), "prompt": prompt} for n, prompt in enumerate(PROMPTS)]
    file = tmp_path / "evaluation_metadata.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file, rows


def test_geneval_finds_its_metadata_and_the_pictures_of_each_prompt(tmp_path):
    """As evaluation/evaluate_images.py reads a folder."""
    file, rows = geneval_file(tmp_path)
    out, found = drawn(tmp_path, "geneval", file, 4), {}
    for folder in (path for path in out.iterdir() if path.is_dir() and path.name.isdigit()):
        metadata = json.loads((folder / "metadata.jsonl").read_text())
        names = sorted(os.listdir(folder / "samples"))
        assert all(re.match(r"\d+\.png", name) for name in names)
        found[int(folder.name)] = (metadata, [colour(folder / "samples" / n) for n in names])
    assert found == {n: (rows[n], [40 * n, 40 * n + 10, 40 * n + 20, 40 * n + 30]) for n in (0, 1, 2)}
    assert (out / "00002" / "samples" / "0003.png").is_file()


def geneval2_file(tmp_path, prompts=PROMPTS):
    file = tmp_path / "geneval2_data.jsonl"
    rows = [{"prompt": p, "atom_count": 1, "vqa_list": [["Is it?", "Yes"]]} for p in prompts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_geneval2_finds_the_picture_of_each_prompt_in_a_json_file(tmp_path):
    """As its evaluation.py reads --image_filepath_data in the folder of the pictures."""
    out = drawn(tmp_path, "geneval2", geneval2_file(tmp_path), 1)
    paths = json.loads((out / "image_paths.json").read_text())
    assert [(prompt, colour(out / path)) for prompt, path in paths.items()] == [*zip(PROMPTS, (0, 10, 20), strict=True)]


@pytest.mark.parametrize("num_images", [1, 4])
def test_dpg_bench_crops_the_pictures_of_each_prompt_in_their_order(tmp_path, num_images):
    """As compute_dpg_bench.py crops them, with --pic-num=1 or 4."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    for name, prompt in zip(("COCOval2014_1", "10", "2"), PROMPTS, strict=True):
        (folder / f"{name}.txt").write_text(prompt)
    out = drawn(tmp_path, "dpg", folder, num_images)
    order = ["10", "2", "COCOval2014_1"]  # Sorted by name, as prompts.read reads a folder.
    assert prompt_files.read(folder) == [PROMPTS[1], PROMPTS[2], PROMPTS[0]]
    assert sorted(os.listdir(out / "images")) == [f"{name}.png" for name in order]
    corners = [(0, 0), (SIDE, 0), (0, SIDE), (SIDE, SIDE)][:num_images]
    for n, name in enumerate(order):
        path = out / "images" / f"{name}.png"
        colours = [colour(path, (x, y, x + SIDE, y + SIDE)) for x, y in corners]
        assert colours == [10 * (num_images * n + k) for k in range(num_images)]


def test_dpg_bench_refuses_an_empty_file_of_prompts(tmp_path):
    for name, prompt in (("a", "a red fox"), ("b", " \n")):
        (tmp_path / f"{name}.txt").write_text(prompt)
    with pytest.raises(ValueError, match=r"each file in .*, but 1 of 2 are empty: get the"):
        layouts.dpg(str(tmp_path), prompt_files.read(tmp_path), 4)


def test_t2i_compbench_reads_prompts_and_numbers_from_file_names(tmp_path):
    """As BLIPvqa_eval/BLIP_vqa.py sorts and splits all names in samples/."""
    file = tmp_path / "color_val.txt"
    file.write_text("\n".join(PROMPTS))
    out = drawn(tmp_path, "t2i_compbench", file, 2)
    names = os.listdir(out / "samples")
    names.sort(key=lambda name: int(name.split("_")[-1].split(".")[0]))
    assert [name.split("_")[0] for name in names] == [p for p in PROMPTS for _ in range(2)]
    assert [colour(out / "samples" / name) for name in names] == [0, 10, 20, 30, 40, 50]


def test_dpg_bench_needs_square_pictures_and_layouts_the_last_stage_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_command.flags, "FLAGS", SimpleNamespace(layout="dpg"))
    (tmp_path / "a.txt").write_text("a")
    layout, inputs = layouts.dpg(str(tmp_path), ["a"], 1), sample_command.Inputs(["a"], ["a"])
    sample_command._check_layout(layout, inputs, 8, 8)
    sample_command._check_layout(layouts.t2i_compbench("", ["a"], 1), inputs, 8, 16)
    with pytest.raises(ValueError, match="dpg needs square pictures, but the model draws 16x8: "):
        sample_command._check_layout(layout, inputs, 8, 16)
    with pytest.raises(ValueError, match="--layout and --all_sizes exclude each other"):
        sample_command._check_layout(layout, inputs._replace(all_sizes=True), 8, 8)


@pytest.mark.parametrize(
    ("name", "num_images", "message"),
    [
        ("geneval", 4, "needs GenEval's evaluation_metadata.jsonl as --prompts, but .*prompts.txt"),
        ("dpg", 4, "as --prompts the benchmark's folder dpg_bench/prompts; you gave 4 and"),
        ("dpg", 3, r"needs --num_images=4 \(or 1, for PIC_NUM=1\).*; you gave 3 and"),
        ("geneval2", 1, "as --prompts the benchmark's geneval2_data.jsonl; you gave 1 and"),
        ("t2i_compbench", 1, "file names, but 'a_b' in .* contains _ or /"),
    ],
)
def test_prompts_that_do_not_fit_a_layout_are_an_error(tmp_path, name, num_images, message):
    file = tmp_path / "prompts.txt"
    file.write_text("a red cube\na_b\n")
    with pytest.raises(ValueError, match=message):
        layouts.LAYOUTS[name](str(file), prompt_files.read(file), num_images)


def test_geneval2_takes_one_picture_per_prompt_and_each_prompt_once(tmp_path):
    file = geneval2_file(tmp_path, ["a cow", "a cow"])
    with pytest.raises(ValueError, match=r"needs --num_images=1, .*; you gave 4 and"):
        layouts.geneval2(str(file), prompt_files.read(file), 4)
    with pytest.raises(ValueError, match="has prompts twice"):
        layouts.geneval2(str(file), prompt_files.read(file), 1)
