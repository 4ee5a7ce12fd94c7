"""The ArrayRecord source."""

import os

import numpy as np
import pytest

from diffusion_jax.config import picture_fields
from diffusion_jax.data import records, tf_examples
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.sources import arrayrecord
from diffusion_jax.data.sources.arrayrecord import open_files
from tests import golden_sets
from tests.diffusion_jax.data.sources import messages


def write(path, *records):
    arrayrecord.write(path, records)
    return path


def test_records_of_several_files_are_read_in_the_requested_order(tmp_path):
    for shard in range(3):
        rows = ({"jpg": b"%d%d" % (shard, i), "txt": b"t%d " % i} for i in range(shard + 1))
        write(tmp_path / f"s-{shard}.array_record", *rows)
    records = open_files(tmp_path)
    assert len(records) == 6
    read = records.read([5, 0, 2, 5])
    assert [(r.image, r.text) for r in read] == [(b"22", "t2"), (b"00", "t0"), (b"11", "t1"), (b"22", "t2")]
    assert read[0].name == f"{tmp_path}/s-2.array_record/2"
    assert len(open_files(f"{tmp_path}/s-{{0,2}}.array_record")) == 4


def test_image_caption_and_embedding_features_can_have_other_names(tmp_path):
    features = {"image": b"x", "caption": b"words", "t5.npy": golden_sets.array(3, (2, 3)), "__key__": b"a/7"}
    path = write(tmp_path / "a.array_record-00000-of-00001", features)
    record = open_files(path, "caption").read([0])[0]
    assert (record.image, record.text, record.name) == (b"x", "words", f"{path}/0 (a/7)")
    np.testing.assert_array_equal(open_files(tmp_path, "t5.npy").read([0])[0].text, np.full((2, 3), 3, np.float32))
    with pytest.raises(ValueError, match=r"no feature txt: it has __key__, caption, image, t5\.npy"):
        open_files(path)


def test_embeddings_stay_in_their_records(tmp_path):
    arrays = [golden_sets.array(number, (1, 2)) for number in range(3)]
    features = {"image": [b"x"], "a.npy": arrays[:2], "b.npy": arrays[2:]}
    messages.write(tmp_path / "a", messages.encode(features), messages.encode({}))
    table = open_files(tmp_path / "a", "a.npy,b.npy*3")
    text = table.texts([0])[0]
    assert [array[0, 0] for array in text.texts] == [0, 1, 2]
    assert text.weights == (0.125, 0.125, 0.75)
    assert table.origins([0]) == [("feature a.npy", "feature a.npy", "feature b.npy")]
    assert sum(len(path.read_bytes()) for path in tmp_path.rglob("*.texts.arrow")) < 2000
    assert open_files(tmp_path / "a", "c.npy,b.npy").texts([0])[0].tolist() == [[2, 2]]
    assert table.read([1])[0].text.reason == "broken_record"
    assert table.files() == [str(tmp_path / "a")]


def test_a_record_that_is_damaged_after_the_import_is_unusable(tmp_path):
    good = [{"jpg": b"a" * 99, "txt": b"one"}, {"jpg": b"b" * 99, "txt": b"two"}]
    path = write(tmp_path / "a.array_record", *good)
    stamp, contents, table = path.stat(), bytearray(path.read_bytes()), open_files(path)
    assert [record.image for record in table.read([0, 1])] == [b"a" * 99, b"b" * 99]
    contents[contents.index(tf_examples.encode(good[0])[:8]) + 4] ^= 255
    path.write_bytes(contents)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    first, second = table.read([0, 1])
    assert first.image == b"" and first.text.reason == "broken_record" and second.text == "two"


def test_missing_remote_damaged_and_empty_files_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no data at .*nowhere"):
        open_files(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no \.array_record files in"):
        open_files(tmp_path)
    with pytest.raises(ValueError, match="gs://b/a is a URL, but ArrayRecord files must be local"):
        open_files("gs://b/a")
    (tmp_path / "a.array_record").write_bytes(b"no such thing" * 9999)
    with pytest.raises(ValueError, match=r"a\.array_record is not a complete ArrayRecord file"):
        open_files(tmp_path)
    write(tmp_path / "a.array_record")
    with pytest.raises(ValueError, match=r"no records in .*: all 1 files are empty"):
        open_files(tmp_path)


def test_a_failed_write_leaves_no_file(tmp_path):
    def fail():
        yield {"jpg": b"x"}
        raise KeyError

    with pytest.raises(KeyError):
        arrayrecord.write(tmp_path / "a.array_record", fail())
    assert list(tmp_path.iterdir()) == []


def test_only_complete_files_of_records_are_read_and_the_others_are_named(tmp_path):
    write(tmp_path / "a.array_record", {"jpg": b"x", "txt": b"t"})
    (tmp_path / ".b.array_record.0123.tmp").write_bytes(b"half")
    for name in ("features.json", "my_state.json", "c.jpg", "readme.md"):
        (tmp_path / name).write_text("{}")
    table = open_files(tmp_path)
    assert len(table) == 1 and table.left_out() == {"hidden": 1, "beside_records": 2}
    assert [name for name, _ in table.left()][1:] == [f"{tmp_path}/{name}" for name in ("c.jpg", "my_state.json")]


@pytest.fixture(scope="module")
def example():
    """TensorFlow's protobuf class tf.train.Example, which TFDS contains."""
    from tensorflow_datasets.proto import tf_example_pb2

    return tf_example_pb2.Example


def test_protobuf_can_decode_encoded_features(example):
    features = {"jpg": bytes(range(256)) * 3, "txt": "Grüße".encode(), "empty": b""}
    message = example.FromString(tf_examples.encode(features))
    read = {name: [*feature.bytes_list.value] for name, feature in message.features.feature.items()}
    assert read == tf_examples.decode(tf_examples.encode(features)) == {k: [v] for k, v in features.items()}


def test_decode_reads_bytes_features_of_protobuf_and_skips_numbers(example):
    message = example()
    feature = message.features.feature
    feature["image"].bytes_list.value.append(b"\xff\xd8" + bytes(300))
    feature["captions"].bytes_list.value.extend([b"one", b"two"])
    feature["width"].int64_list.value.extend([-1, 2**40])
    feature["score"].float_list.value.append(0.5)
    feature["none"].bytes_list.SetInParent()
    texts = {"image": [b"\xff\xd8" + bytes(300)], "captions": [b"one", b"two"]}
    assert tf_examples.decode(message.SerializeToString()) == texts


def test_an_example_with_several_images_or_numbers_is_not_read_as_its_first_one(tmp_path):
    cases = (([b"a"], [3.0]), ([b"a", b"b"], [3.0]), ([b"a"], [3.0, 4.0]))
    encoded = [messages.encode({"image": images, "txt": [b"x"]}, {"score": scores}) for images, scores in cases]
    messages.write(tmp_path / "a", *encoded)
    fields = picture_fields.read(("score=0..10",))
    one, two, numbers = open_files(tmp_path / "a", fields=fields).read([0, 1, 2])
    assert one.image == b"a" and records.checked_numbers(one.numbers, fields) == {"score": 3}
    assert "broken_record: it holds 2 images instead of one" in str(two.text)
    with pytest.raises(Unusable, match=r"the field score is \[3\.0, 4\.0\]"):
        records.checked_numbers(numbers.numbers, fields)


@pytest.mark.parametrize("damaged", [b"\xff" * 20, b"\x0a\x7f", b"\x0b", b"\x0a"])
def test_decoding_damaged_bytes_is_an_error(damaged):
    with pytest.raises(ValueError, match=r"not a tf.train.Example"):
        tf_examples.decode(damaged)
