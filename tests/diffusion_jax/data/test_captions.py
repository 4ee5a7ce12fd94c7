"""Pictures with several captions: where they are stored, and which one a sample gets."""

import collections
import json

import numpy as np
import pytest

from diffusion_jax.config.settings import Data, Run, Text, check_tags
from diffusion_jax.data import captions, pipeline, prompts, sources, tars, tf_examples
from diffusion_jax.data.captions import Captions, Tags
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.prepare import reshard
from diffusion_jax.data.prepare.validate import validate
from diffusion_jax.data.sources import arrayrecord
from diffusion_jax.data.sources.folder import open_folder
from diffusion_jax.data.sources.webdataset import open_tars
from diffusion_jax.devices import sharding
from diffusion_jax.examples.digits import rendering as digits
from tests.diffusion_jax.data.sources import messages


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eight pictures with a .txt caption. All but the last also have three long captions."""
    folder = digits.write_examples(tmp_path_factory.mktemp("several") / "f", 8, size=8)
    for number, picture in enumerate(sorted(folder.glob("*.png"))):
        picture.with_suffix(".txt").write_text(f"short {number}\n")
        if number < 7:
            long = [f"long {number} {which}" for which in "abc"]
            picture.with_suffix(".json").write_text(json.dumps({"long": long}))
    return folder


def tokenize(texts):
    return {"texts": np.array(texts, dtype=object)}


def batches(folder, text="txt,json:long*0.5", **values):
    opened = sources.open_pictures(Data("folder", path=str(folder), text=text), 8)
    values = {"batch_size": 4, "seed": 3, "num_threads": 0, **values}
    return pipeline.make_batches(opened, tokenize, **values)


def test_several_text_fields_give_captions_with_weights(folder):
    texts = open_folder(folder, "txt,json:long*0.5").texts(range(8))
    assert texts[2].texts == ("short 2", "long 2 a", "long 2 b", "long 2 c")
    np.testing.assert_allclose(texts[2].weights, [2 / 3, 1 / 9, 1 / 9, 1 / 9])
    assert texts[7] == "short 7"  # It has no other caption.
    assert open_folder(folder, "json:long", "drop").texts([0])[0].weights == (1 / 3,) * 3


def test_captions_are_chosen_by_their_weights(folder):
    text = open_folder(folder, "txt,json:long*0.5").texts([2])[0]
    counts = collections.Counter(captions.chosen([text] * 9000, 0, range(9000)))
    share = np.array([counts[each] for each in text.texts]) / 9000
    np.testing.assert_allclose(share, text.weights, atol=0.015)  # Three standard errors.


def test_the_chosen_caption_depends_only_on_the_seed_and_the_sample(folder):
    with batches(folder) as whole:
        expected = [next(whole)["texts"].tolist() for _ in range(12)]
        names = whole.names(range(4))
        assert whole.texts(range(4)) == expected[-1]  # The texts that replay reports.
        assert whole.texts([2], back=3) == [expected[-4][2]]
    assert [text.split()[1] for text in expected[-1]] == [str(int(name[:5])) for name in names]
    long = [text for batch in expected for text in batch if text.startswith("long")]
    assert 8 <= len(long) <= 24 and {text[-1] for text in long} == set("abc")
    # Two processes, both resumed at step 5.
    parts = []
    for process in range(2):
        with batches(folder, process_index=process, process_count=2) as part:
            part.set_state(json.dumps({"samples": 20, **part._identity}).encode())
            parts.append([next(part)["texts"].tolist() for _ in range(7)])
    assert [a + b for a, b in zip(*parts, strict=True)] == expected[5:]
    with batches(folder, seed=4) as other:
        assert [next(other)["texts"].tolist() for _ in range(12)] != expected


def test_a_held_out_picture_always_has_the_same_caption(folder):
    opened = sources.open_pictures(Data("folder", path=str(folder), text="json:long,txt"), 8)
    apart = pipeline.Apart(opened, lambda images, texts: {"texts": np.array(texts)})
    keys, batch = apart.read(8)
    keys_of_some, some = apart.read(3)
    rows = [keys.tolist().index(key) for key in keys_of_some.tolist()]
    assert batch["texts"][rows].tolist() == some["texts"].tolist()
    assert len({text.split()[0] for text in batch["texts"]}) == 2


def test_tars_have_the_same_captions_as_folders(folder, tmp_path):
    files_of = lambda key: {file.suffix[1:]: file.read_bytes() for file in sorted(folder.glob(f"{key}.*"))}
    keys = [path.stem for path in sorted(folder.glob("*.png"))]
    tars.write(tmp_path / "0.tar", [{tars.KEY: key.encode(), **files_of(key)} for key in keys])
    for text in ("txt,json:long*0.5", "json:long,txt", "txt"):
        expected = open_folder(folder, text).texts(range(8))
        opened = open_tars(tmp_path / "0.tar", text)
        assert opened.texts(range(8)) == expected
        assert [record.text for record in opened.read(range(8))] == expected
    assert len(open_tars(tmp_path / "0.tar", "json:long", "drop")) == 7


@pytest.mark.parametrize("format", ["webdataset", "arrayrecord"])
def test_reshard_keeps_all_captions_and_their_weights(folder, tmp_path, format):
    records = open_folder(folder, "txt,json:long*0.5")
    reshard.reshard(records, tmp_path, num=3, format=format, identity={})
    data = Data(format, path=str(tmp_path), text="txt,json:captions")
    texts, expected = sources.open_records(data).texts(range(8)), records.texts(range(8))
    assert [captions.every(text) for text in texts] == [captions.every(t) for t in expected]
    np.testing.assert_allclose(texts[0].weights, expected[0].weights)


def test_data_text_txt_lines_reads_one_caption_per_line(tmp_path):
    folder = digits.write_examples(tmp_path, 2, size=8)
    (folder / "00000.txt").write_text("\ufeffa cat\r\n\n a dog\u2028that sleeps \n")
    whole, lines = (open_folder(folder, text).texts([0])[0] for text in ("txt", "txt:lines"))
    assert whole == "a cat\r\n\n a dog\u2028that sleeps"
    assert lines == Captions(("a cat", "a dog\u2028that sleeps"), (0.5, 0.5))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_byte_order_marks_are_removed_from_captions_and_prompts(tmp_path, encoding):
    folder = digits.write_examples(tmp_path, 1, size=8)
    text = "\ufeff\ufeff\ufeffa cat \ufeff".encode(encoding)
    (folder / "00000.txt").write_bytes(text)
    rows = "\ufeff\ufefffile_name,caption\n00000.png,\ufeff\ufeffa cat"
    (folder / "metadata.csv").write_bytes(rows.encode(encoding))
    (tmp_path / "prompts.txt").write_bytes(text)
    assert open_folder(folder).texts([0]) == ["a cat \ufeff"]
    assert open_folder(folder, "csv:caption").texts([0]) == ["a cat"]
    assert prompts.read(str(folder / "metadata.csv")) == ["a cat"]
    assert prompts.read(str(tmp_path / "prompts.txt")) == ["a cat \ufeff"]


def test_captions_shorter_than_min_chars_are_dropped():
    several = Captions(("a", "a cat", "a dog"), (0.5, 0.25, 0.25))
    assert captions.long_enough(several, 2) == Captions(("a cat", "a dog"), (0.5, 0.5))
    assert captions.long_enough(several, 0) == several
    with pytest.raises(Unusable, match="short_caption: 'a cat' has 5 characters"):
        captions.long_enough(several, 6)


def test_tags_are_shuffled_and_dropped_for_each_sample_alone():
    tags, samples = Tags(shuffle=True, keep=1, drop_prob=0.25), range(4000)
    given = captions.chosen(["a,b , c,d,e"] * 4000, 7, samples, tags)
    split = [text.split(", ") for text in given]
    assert all(sorted(set(each)) == sorted(each) and each[0] == "a" for each in split)
    places = collections.Counter((tag, n) for each in split for n, tag in enumerate(each[1:]))
    # A tag is first among those left with probability (1 - 0.25^4) / 4, and in a caption with 0.75.
    for tag in "bcde":
        assert places[tag, 0] / 4000 == pytest.approx((1 - 0.25**4) / 4, abs=0.03)
        assert sum(places[tag, n] for n in range(4)) / 4000 == pytest.approx(0.75, abs=0.03)
    # The order does not depend on the batch, and other texts stay as they are.
    assert captions.chosen(["a,b , c,d,e"], 7, [321], tags) == [given[321]]
    embedding = np.zeros((2, 3))
    assert captions.chosen([embedding], 7, [0], tags)[0] is embedding
    assert captions.chosen(["a,b , c"], 7, [0]) == ["a,b , c"]
    assert captions.chosen(["a, b, c"], 7, [0], Tags(drop_prob=1.0)) == [""]
    assert captions.chosen(["a, b, c"], 7, [0], Tags(keep=2, drop_prob=1.0)) == ["a, b"]
    # Empty tags are no tags.
    assert captions.chosen([", a,, b ,c, "], 7, [0], Tags(keep=2, drop_prob=1.0)) == ["a, b"]


@pytest.mark.parametrize(
    ("caption", "tags", "warned"),
    [
        ("a cat", Tags(shuffle=True), True),
        ("a cat, asleep", Tags(shuffle=True), False),
        ("a cat, asleep,, ", Tags(shuffle=True, keep=1), True),  # One tag has one order.
        ("a cat, asleep", Tags(drop_prob=0.1, keep=1), False),
        ("a cat, asleep", Tags(drop_prob=0.1, keep=2), True),
    ],
)
def test_settings_of_tags_without_effect_are_warned_of(tmp_path, caplog, caption, tags, warned):
    folder = digits.write_examples(tmp_path, 4, size=8)
    for picture in folder.glob("*.png"):
        picture.with_suffix(".txt").write_text(caption)
    shuffle, keep, drop = tags
    fields = {"shuffle_tags": shuffle, "keep_tags": keep, "tag_drop_prob": drop, "threads": 0}
    data, mesh = Data("folder", str(folder), **fields), sharding.make_mesh(1, 1, 1)
    run, opened = Run(steps=1, batch_size=4), sources.open_pictures(data, 8)
    pipeline.training_batches(opened, lambda texts: {}, run, data, mesh).close()
    assert ("change none of 4 captions" in caplog.text) == warned


def test_training_shuffles_tags_and_the_held_out_pictures_keep_theirs(tmp_path):
    folder = digits.write_examples(tmp_path, 24, size=8)
    for picture in folder.glob("*.png"):
        picture.with_suffix(".txt").write_text("a, b, c, d, e, f")
    data = Data("folder", str(folder), heldout=0.5, shuffle_tags=True, keep_tags=1, threads=0)
    pictures, seen = sources.open_pictures(data, 8), []

    def tokenize(texts):
        seen.append(list(texts))
        return {}

    run, mesh = Run(steps=1, batch_size=4), sharding.make_mesh(1, 1, 1)
    with pipeline.training_batches(pictures, tokenize, run, data, mesh) as batches:
        next(batches)
        trained, labels = seen[0], batches.texts(range(4))
        apart = batches.apart
        assert apart is not None
        apart.read(9)
    assert labels == trained and len({*trained}) > 1
    assert all(sorted(text) == sorted("a, b, c, d, e, f") and text[0] == "a" for text in trained)
    assert set(seen[-1]) == {"a, b, c, d, e, f"}


def test_tags_of_stored_embeddings_cannot_be_shuffled():
    message = r"data\.shuffle_tags and data\.tag_drop_prob change the captions for each sample"
    with pytest.raises(ValueError, match=message):
        check_tags(Data("folder", shuffle_tags=True), Text("t5", store="texts"))
    with pytest.raises(ValueError, match=message):
        check_tags(Data("folder", text="npy", tag_drop_prob=0.1), Text("t5"))
    check_tags(Data("folder", text="npy"), Text("t5", store="texts"))


def test_a_damaged_caption_makes_its_picture_unusable(tmp_path):
    folder = digits.write_examples(tmp_path, 2, size=8)
    (folder / "00000.json").write_text('{"long": ["a", 7]}')
    (folder / "00001.json").write_text('{"long": [null, "b"]}')
    damaged, text = open_folder(folder, "txt,json:long").texts([0, 1])
    assert isinstance(damaged, Unusable) and str(damaged) == "broken_text: 7 is not a text"
    assert text.texts[1:] == ("b",)


def test_half_a_character_in_json_is_named_and_not_taken_for_a_byte(tmp_path):
    folder = digits.write_examples(tmp_path, 2, size=8)
    (folder / "00000.json").write_text('{"long": "a \\ud83d"}')
    (folder / "00001.json").write_bytes(b'{"long": "caf\\udce9"}')
    half, byte = open_folder(folder, "json:long").texts([0, 1])
    assert str(half) == ("broken_text: the text holds one half (U+D83D) of a character: write both halves")
    assert str(byte).endswith("is not UTF-8 text (byte 0xe9)")


def test_all_values_of_a_tf_example_feature_are_captions(tmp_path):
    decoded = tf_examples.decode(messages.encode({"txt": [b"one", b"two"]}))
    captions = arrayrecord.read_feature(decoded, "txt")
    assert captions == Captions(("one", "two"), (0.5, 0.5))


@pytest.mark.parametrize("text", ["txt,", "txt*0", "txt*-1", "txt*x", "txt*inf", ",", "txt**2"])
def test_a_text_field_without_a_name_or_with_an_invalid_weight_is_an_error(folder, text):
    with pytest.raises(ValueError, match=r"write the places of the texts with commas"):
        open_folder(folder, text)


def test_data_text_with_captions_and_embeddings_is_an_error(folder):
    with pytest.raises(ValueError, match="name either captions or embeddings, not both"):
        open_folder(folder, "txt,t5.npy")
    assert Data("folder", text="t5.npy,clip.npy*2").embedded
    assert not Data("folder", text="txt,json:npy*2").embedded


def test_an_example_has_one_text_per_picture(folder):
    with batches(folder) as opened:
        assert isinstance(opened.example()["texts"][0], str)


def test_validate_counts_every_caption(folder):
    report = validate(open_folder(folder, "txt,json:long"))
    assert (report["usable"], report["different_texts"]) == (8, 8 + 7 * 3)
    assert report["text_words"] == {"min": 2, "p5": 2, "median": 3, "p95": 3, "max": 3}
    assert report["words"] | {"short": 8, "long": 21, "a": 7} == report["words"]


def test_prompts_read_from_a_data_source_are_the_first_captions(folder):
    chosen = prompts.read(f"folder:{folder}::json:long,txt")
    assert chosen == [*(f"long {number} a" for number in range(7)), "short 7"]
    assert len(prompts.read(f"folder:{folder}::json:long,txt", every=True)) == 7 * 4 + 1


def test_prompts_skip_damaged_and_missing_captions_with_a_warning(tmp_path, caplog):
    folder = digits.write_examples(tmp_path, 3, size=8)
    (folder / "00001.txt").write_bytes(b"caf\xe9")
    (folder / "00002.txt").unlink()
    assert len(prompts.read(f"folder:{folder}")) == 1
    assert "left out: {'no_caption': 1}" in caplog.text
    assert "left out 1 blank prompts; the first: record 1 (broken_text: the text is" in caplog.text
