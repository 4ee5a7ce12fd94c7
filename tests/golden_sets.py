"""Data sets of every source and setting, and all that training reads of them, as JSON.

    python -m tests.golden_sets OUT [NAME ...]

writes OUT/NAME.json for each set. Two versions of the code read the same if these files are equal.
The eight sets in tests/fixtures/golden are a test (tests/diffusion_jax/data/test_golden.py).
"""

import io
import json
import pathlib
import pickle
import struct
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from diffusion_jax import files
from diffusion_jax.config import picture_fields
from diffusion_jax.config.settings import Data
from diffusion_jax.data import aspect_buckets, captions, pipeline, sources
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.mixture import Mixture
from diffusion_jax.data.pictures import DecodedPictures, Pictures
from diffusion_jax.data.records import Record
from diffusion_jax.data.split import split

SMALL = (
    "csv_by_name",
    "folder_damaged",
    "folder_fields",
    "folder_heldout",
    "mixture",
    "prior",
    "tar_several",
    "tars_flipped",
)
"""The sets in tests/fixtures/golden."""
_SIDE, _BATCH = 8, 20
_NUM = 24  # Pictures in most sets.
_URL = "memory://golden"


def picture(number: int, mode: str = "RGB") -> bytes:
    """Return a PNG of one colour without compression, so its bytes depend on no version of zlib."""
    shape = 8 + number % 3, 8 + number % 5
    colour = (number % 256, 2 * number % 256, 90, 20 * number % 256)[: len(mode)]
    file = io.BytesIO()
    Image.new(mode, shape, colour).save(file, "png", compress_level=0)
    return file.getvalue()


def array(number: int, shape: tuple[int, ...] = (3, 4)) -> bytes:
    """Return an .npy file of one number."""
    file = io.BytesIO()
    np.save(file, np.full(shape, number, np.float32))
    return file.getvalue()


def npz(number: int) -> bytes:
    """Return an .npz file of text embeddings."""
    file = io.BytesIO()
    np.savez(file, x=np.full((3, 4), number, np.float32))
    return file.getvalue()


def pairs(suffix: str, of: Any, num: int = _NUM, mode: str = "RGB") -> dict[str, bytes]:
    """Return the files of `num` pictures, and of the texts beside them: of(number)."""
    found = {}
    for i in range(num):
        value = of(i)
        contents = value if isinstance(value, bytes) else json.dumps(value).encode()
        found |= {f"{i:02}.png": picture(i, mode), f"{i:02}.{suffix}": contents}
    return found


def caption(number: int) -> bytes:
    """Return the caption of a picture."""
    return b" number %d, of %d, a tag, another \n" % (number, _NUM)


def rows(of: Any = lambda i: {}, num: int = _NUM) -> list[dict[str, Any]]:
    """Return the rows of a table about the pictures of `pairs`."""
    return [{"file_name": f"{i:02}.png", "text": f"row {i}", **of(i)} for i in range(num)]


def lines(table: list[dict[str, Any]], separator: str = "") -> bytes:
    """Return a table as .jsonl or, with a separator, as .csv."""
    if not separator:
        return "\n".join(map(json.dumps, table)).encode()
    cells = [list(table[0]), *(list(row.values()) for row in table)]
    return "\n".join(separator.join(map(str, row)) for row in cells).encode()


def parquet(columns: Mapping[str, Any]) -> bytes:
    """Return a parquet file."""
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(dict(columns)), file)
    return file.getvalue()


def cells(num: int = _NUM) -> dict[str, Any]:
    """Return the columns of a Hugging Face table with embedded pictures."""
    import pyarrow

    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    images = [{"bytes": picture(i), "path": None} for i in range(num)]
    return {
        "image": pyarrow.array(images, kind),
        "text": [f"row {i}" for i in range(num)],
        "several": [[f"a {i}", f"b {i}"] for i in range(num)],
        "score": [i / 4 for i in range(num)],
    }


def saved(root: pathlib.Path) -> None:
    """Write a folder of save_to_disk with two tables."""
    import pyarrow

    table = pyarrow.table(cells())
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table[:10], table[10:]), strict=True):
        with pyarrow.OSFile(str(root / name), "wb") as sink:
            writer = pyarrow.ipc.new_stream(sink, table.schema)
            writer.write_table(part, max_chunksize=7)
            writer.close()
    listed = {"_data_files": [{"filename": name} for name in names]}
    (root / "state.json").write_text(json.dumps(listed))


def tfds(root: pathlib.Path, kind: str) -> None:
    """Write a data set of TFDS as ArrayRecord or TFRecord files."""
    from diffusion_jax.data import tf_examples
    from diffusion_jax.data.sources import arrayrecord

    core = "tensorflow_datasets.core.features."
    text = {"pythonClassName": f"{core}text_feature.Text", "text": {}}
    shape = {"dimensions": ["-1", "-1", "3"]}
    image = {"pythonClassName": f"{core}image_feature.Image"}
    image |= {"image": {"dtype": "uint8", "shape": shape}}
    top = {
        "pythonClassName": f"{core}features_dict.FeaturesDict",
        "featuresDict": {"features": {"image": image, "caption": text}},
    }
    folder = root / "1.0.0"
    folder.mkdir()
    (folder / "features.json").write_text(json.dumps(top))
    parts = {
        "name": "train",
        "numBytes": "9",
        "shardLengths": [str(_NUM)],
        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
    }
    info = {"fileFormat": kind, "name": "tiny", "version": "1.0.0", "splits": [parts]}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    examples = [{"image": picture(i), "caption": caption(i)} for i in range(_NUM)]
    name = folder / f"tiny-train.{kind}-00000-of-00001"
    if kind == "array_record":
        return arrayrecord.write(name, examples)
    frames = map(tf_examples.encode, examples)
    check = lambda f: struct.pack("<I", tf_examples.checksum(f))
    name.write_bytes(b"".join(struct.pack("<Q4x", len(f)) + f + check(f) for f in frames))


def tar(members: Mapping[str, bytes]) -> bytes:
    """Return a tar with these members. A name may end in "#", to occur twice."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as opened:
        for name, contents in members.items():
            member = tarfile.TarInfo(name.rstrip("#"))
            member.size = len(contents)
            opened.addfile(member, io.BytesIO(contents))
    return file.getvalue()


def _flipped(contents: bytes, at: int) -> bytes:
    return contents[:at] + bytes([contents[at] ^ 1]) + contents[at + 1 :]


def _first(files_: Mapping[str, bytes], num: int) -> dict[str, bytes]:
    return dict(list(files_.items())[:num])


def _renamed(files_: Mapping[str, bytes], prefix: str) -> dict[str, bytes]:
    return {f"{prefix}{name}": contents for name, contents in files_.items()}


def _sets() -> dict[str, tuple[dict[str, bytes] | Any, Data]]:
    """Return (files, or a function that writes them; settings) of each set. ROOT is its folder."""
    txt, long = pairs("txt", caption), lambda i: {"long": f"a long text {i}", "score": i / 4}
    both = txt | {f"{i:02}.json": json.dumps(long(i)).encode() for i in range(0, _NUM, 2)}
    plain = {name: contents for name, contents in txt.items() if name.endswith("png")}
    masks = {f"{i:02}.mask.png": picture(i + 60, "L") for i in range(_NUM)}
    damaged = txt | {"03.png": b"no picture", "05.txt": b"\xff\xfe\xfd", "07.png": picture(7)[:60]}
    json_score = pairs("json", long)
    t = tar(txt)
    tars = {"s-00.tar": tar(_first(txt, 20)), "s-01.tar": tar(_renamed(txt, "x/"))}
    coco = {
        "images": [{"id": 90 - i, "file_name": f"{i:02}.png"} for i in range(_NUM)],
        "annotations": [{"id": 7 * i % 50, "image_id": 90 - i // 2, "caption": f"note {i}"} for i in range(2 * _NUM)],
    }
    again = {"03.txt#": b"second", "05.png#": picture(50)}
    kohya = {f"{i:02}": {"text": f"k {i}"} for i in range(_NUM)}
    keyed = {"key": list(range(_NUM)), "text": [f"key {i}" for i in range(_NUM)]}
    named = [{"file_name": f"train\\{i:02}.PNG", "text": f"by name {i}"} for i in range(_NUM)]
    other = [{"file_name": f"elsewhere/{i:02}.png", "text": f"elsewhere {i}"} for i in range(_NUM)]
    moments = tar(
        {k.replace(".png", ".npy"): array(int(k[:2]), (8, 2, 2)) if "png" in k else v for k, v in txt.items()}
    )
    examples = [
        {"image": picture(i), "txt": caption(i), "json": json.dumps(long(i)).encode(), "__key__": b"%d" % i}
        for i in range(_NUM)
    ]

    def records(root: pathlib.Path) -> None:
        from diffusion_jax.data.sources import arrayrecord

        arrayrecord.write(root / "a.array_record", examples[:9])
        arrayrecord.write(root / "b.array_record", examples[9:])

    def url(_: pathlib.Path) -> None:
        for name, contents in tars.items():
            files.write_whole(f"{_URL}/{name}", contents)

    def wdinfo(root: pathlib.Path) -> None:
        _write(root, tars)
        (root / "wdinfo.pkl").write_bytes(pickle.dumps({"tar_files": ["s-01.tar", "s-00.tar"]}))

    folder = lambda text="txt", **fields: Data("folder", "ROOT", text, **fields)
    shards = lambda path="ROOT", text="txt", **fields: Data("webdataset", path, text, **fields)
    of_tfds = lambda split: Data("tfds", f"ROOT/1.0.0@{split}", "caption")
    two = ((1, "folder", "ROOT/f", "txt"), (3, "webdataset", "ROOT/t", "txt"))
    mixed = _renamed(txt, "f/") | _renamed(tars, "t/")
    prior = _renamed(txt, "f/") | _renamed(_first(plain, 9), "p/")
    prior |= {"p/prompts.jsonl": lines(rows(num=9)), "p/sheet.png": picture(99)}
    buckets = ((8, 8), (8, 12), (12, 8))
    score = ("score=0..10",)
    return {
        "folder_txt": (txt, folder()),
        "folder_nested": (
            _renamed(txt, "a/") | _renamed(_first(txt, 8), "b c/é/") | _renamed(_first(txt, 8), ""),
            folder(),
        ),
        "folder_suffixes": (
            {n.replace(".txt", ".png.txt"): c for n, c in _first(txt, 20).items()}
            | {n.upper(): c for n, c in list(txt.items())[20:]},
            folder(),
        ),
        "folder_json": (json_score, folder("json:long")),
        "folder_json_list": (pairs("json", lambda i: {"c": [f"a {i}", [f"b {i}", 2.5]]}), folder("json:c")),
        "folder_lines": (pairs("txt", lambda i: b"one %d\r\n\ntwo\n" % i), folder("txt:lines")),
        "folder_several": (both, folder("txt,json:long*0.5", uncaptioned="drop")),
        "folder_npy": (pairs("npy", array), folder("npy")),
        "folder_npz": (pairs("t5.npz", npz), folder("t5.npz")),
        "folder_drop": (_first(txt, 30) | plain, folder(uncaptioned="drop")),
        "folder_empty": (_first(txt, 30) | plain, folder(uncaptioned="empty")),
        "folder_damaged": (damaged, folder(max_broken=0.5)),
        "folder_alpha": (pairs("txt", caption, mode="RGBA"), folder(loss_mask="alpha")),
        "folder_masks": (txt | masks, folder(loss_mask="file")),
        "folder_unused_masks": (txt | masks, folder()),
        "folder_fields": (json_score, folder("json:long", fields=score)),
        "folder_buckets": (txt, folder(aspect_buckets=buckets)),
        "folder_heldout": (damaged, folder(heldout=0.3, max_broken=0.5)),
        "folder_heldout_buckets": (damaged, folder(heldout=0.3, aspect_buckets=buckets, max_broken=1)),
        "folder_filters": (pairs("txt", lambda i: b"x" * i), folder(min_size=9, max_aspect=1.3, min_chars=9)),
        "folder_tags": (txt, folder(shuffle_tags=True, keep_tags=1, tag_drop_prob=0.3)),
        "folder_crop_flip": (txt, folder(crop="random", flip=True, resize=10)),
        "folder_hidden": (
            txt | {".a/1.png": b"", "._x.png": b"", "notes.md": b"", "a.bin": b"1", "b.txt": b"b"},
            folder(),
        ),
        "csv": (plain | {"t.csv": lines(rows(), ",")}, folder("csv:text")),
        "tsv": (plain | {"t.tsv": lines(rows(), "\t")}, folder("tsv:text")),
        "jsonl": (plain | {"metadata.jsonl": lines(rows() + rows(num=5))}, folder("jsonl:text")),
        "kohya": (plain | {"meta.json": json.dumps(kohya).encode()}, folder("coco:text")),
        "coco": (_renamed(plain, "images/") | {"a/c.json": json.dumps(coco).encode()}, folder("coco:caption")),
        "parquet_keys": (
            {f"t/{int(n[:2])}.png": c for n, c in plain.items()} | {"t.parquet": parquet(keyed)},
            folder("parquet:text"),
        ),
        "csv_fields": (
            plain | {"t.csv": lines(rows(lambda i: {"score": i / 4}), ",")},
            folder("csv:text", fields=score),
        ),
        "csv_by_name": (
            _renamed(plain, "train/") | {"t.csv": lines(named, ";"), "u.csv": lines(other, ",")},
            Data("folder", "ROOT/t.csv", "csv:text"),
        ),
        "prior": (prior, Data("folder", "ROOT/f", prior="ROOT/p", prior_weight=0.5)),
        "tar": ({"a.tar": t}, shards("ROOT/a.tar")),
        "tars": (tars, shards()),
        "tars_pattern": (tars, shards("ROOT/s-{01,00}.tar")),
        "tars_wdinfo": (wdinfo, shards("ROOT/wdinfo.pkl")),
        "tars_memory": (url, shards(_URL)),
        "tar_json": ({"a.tar": tar(json_score)}, shards(text="json:long", fields=score)),
        "tar_several": ({"a.tar": tar(both)}, shards(text="txt,json:long*0.5")),
        "tar_npy": ({"a.tar": tar(pairs("npy", array))}, shards(text="npy")),
        "tars_flipped": (
            {
                "a.tar": t[: len(t) // 2],
                "b.tar": _flipped(t, 5632),
                "c.tar": t + tar(_first(txt, 8)),
                "d.tar": tar(_first(txt, 20) | again),
            },
            shards(uncaptioned="drop", max_broken=0.5),
        ),
        "tars_heldout_buckets": (tars, shards(heldout=0.3, aspect_buckets=buckets)),
        "moments": ({"a.tar": moments}, Data("moments", "ROOT")),
        "arrayrecord": (records, Data("arrayrecord", "ROOT", "txt,json:long", fields=score)),
        "arrow": (saved, Data("arrow", "ROOT", "text,several*3", fields=score)),
        "huggingface": (
            lambda root: _write(root, {"data/train-0.parquet": parquet(cells())}),
            Data("huggingface", "ROOT@train", "text"),
        ),
        "tfds": (lambda root: tfds(root, "array_record"), of_tfds("train")),
        "tfrecord": (lambda root: tfds(root, "tfrecord"), of_tfds("train[3:]")),
        "mixture": (mixed, Data("mixture", mixture=two)),
        "mixture_heldout_buckets": (mixed, Data("mixture", mixture=two, heldout=0.3, aspect_buckets=buckets)),
        "synthetic": ({}, Data("synthetic")),
    }


SETS = tuple(_sets())
"""The names of all sets."""


def _contents(pictures: Pictures, every: np.ndarray) -> list[tuple[str, int]]:
    """Return (name, checksum) of each stored picture and its text, 0 for unusable pixels."""
    if isinstance(pictures, DecodedPictures):
        return [(record.name, _check(record)) for record in pictures._records.read(every.tolist())]
    usable, images, texts = pictures.usable(every)
    sums = (_check(Record(image, text, "")) for image, text in zip(images, texts, strict=True))
    known = dict(zip(usable.tolist(), sums, strict=True))
    return [(f"picture {index}", known.get(index, 0)) for index in every.tolist()]


def _check(record: Record) -> int:
    text = f"{record.text}{record.numbers or ''}"
    pictures = zlib.crc32(record.mask or b"", zlib.crc32(record.image))
    return zlib.crc32(text.encode("utf-8", "surrogatepass"), pictures)


def read(name: str, root: pathlib.Path, samples: int = 2000) -> dict[str, Any]:
    """Write the set `name` to the folder `root`, and return all that training reads of it."""
    made, data = _sets()[name]
    made(root) if callable(made) else _write(root, made)
    place = lambda text: text.replace("ROOT", str(root))
    mixture = tuple((w, source, place(path), text) for w, source, path, text in data.mixture)
    data = data._replace(path=place(data.path), prior=place(data.prior), mixture=mixture)
    shapes: dict[str, Any] = {"moments": (2, 2, 8)} if name == "moments" else {}
    if name in ("folder_npy", "folder_npz", "tar_npy"):
        shapes = {"embeddings": (3, 4)}
    side = 16 if shapes.get("moments") else _SIDE
    pictures = sources.open_pictures(data, side, **shapes)
    short = lambda text: str(text).replace(str(root), "ROOT")
    if name == "synthetic":  # It has no names, and its pictures are random numbers.
        every = np.arange(3)
        return {"number": len(pictures), "pictures": _sum(pictures.read(every)[0])}
    every = np.arange(len(pictures))
    found: dict[str, Any] = {
        "number": len(every),
        "keys": [f"{key:016x}" for key in pictures.keys(every).tolist()],
        "texts": [_text(text) for text in pictures.texts(every)],
        "contents": [[short(n), c] for n, c in _contents(pictures, every)],
        "files": [short(file) for file in pictures.files()],
    }
    training, heldout = split(pictures, data.heldout)
    if not (shapes or (isinstance(pictures, Mixture) and pictures.part_counts)):
        found["sizes"] = pictures.sizes(every).tolist()
    found["heldout"] = [f"{key:016x}" for key in heldout.keys(np.arange(len(heldout))).tolist()]
    buckets = aspect_buckets.sort(training, data.aspect_buckets) if data.aspect_buckets else None
    tags = captions.Tags(data.shuffle_tags, data.keep_tags, data.tag_drop_prob)
    sums = lambda texts: {"text": np.array([_sum(_text(text)) for text in texts], np.int64)}
    batches = pipeline.make_batches(
        training,
        sums,
        batch_size=_BATCH,
        seed=3,
        crop=data.crop,
        flip=data.flip,
        buckets=buckets,
        fields=picture_fields.read(data.fields),
        tags=tags,
        num_threads=0,
    )
    order, sums_of_batches, total = [], [], 0
    with batches:
        for number in range(samples // _BATCH):
            batch = next(batches)
            if number < 3:
                order += batches.indices(range(_BATCH)).tolist()
            total = zlib.crc32(repr([(k, _sum(batch[k])) for k in sorted(batch)]).encode(), total)
            sums_of_batches.append(total)
        state = json.loads(batches.get_state())
    return found | {
        "order": order,
        "samples": sums_of_batches,
        "names": [short(n) for n in training.names(np.arange(len(training)))],
        "skipped": pictures.skipped(),
        "counts": dict(pictures.inventory().counts),
        "state": {k: v for k, v in state.items() if k not in ("digests", "samples")},
    }


def _write(root: pathlib.Path, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def _text(text: Any) -> Any:
    if isinstance(text, captions.Captions):
        return [[_text(each) for each in text.texts], list(text.weights)]
    if isinstance(text, np.ndarray):
        return f"{text.dtype}{list(text.shape)} {_sum(text)}"
    return text.reason if isinstance(text, Unusable) else text


def _sum(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(value).tobytes())
    return zlib.crc32(json.dumps(value).encode())


def main(out: str, *names: str) -> None:
    """Write OUT/NAME.json for each set."""
    for name in names or SETS:
        with tempfile.TemporaryDirectory() as folder:
            value = read(name, pathlib.Path(folder))
        lines_ = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
        pathlib.Path(out, f"{name}.json").write_text(f"{{\n{lines_}\n}}\n")
        print(name, value["number"])


if __name__ == "__main__":
    main(*sys.argv[1:])
