"""tf.train.Example, against the messages that protobuf itself makes."""

import pytest

from diffusion_jax.data import examples


@pytest.fixture(scope="module")
def example():
    """TensorFlow's message class, which TFDS carries."""
    from tensorflow_datasets.proto import tf_example_pb2

    return tf_example_pb2.Example


def test_what_is_written_protobuf_reads(example):
    features = {"jpg": bytes(range(256)) * 3, "txt": "Grüße".encode(), "empty": b""}
    message = example.FromString(examples.encode(features))
    read = {name: feature.bytes_list.value for name, feature in message.features.feature.items()}
    assert {name: list(values) for name, values in read.items()} == {
        name: [value] for name, value in features.items()
    }
    assert examples.decode(examples.encode(features)) == features


def test_what_protobuf_writes_is_read_numbers_passed_over(example):
    message = example()
    feature = message.features.feature
    feature["image"].bytes_list.value.append(b"\xff\xd8" + bytes(300))
    feature["captions"].bytes_list.value.extend([b"one", b"two"])
    feature["width"].int64_list.value.extend([-1, 2**40])
    feature["score"].float_list.value.append(0.5)
    feature["none"].bytes_list.SetInParent()
    assert examples.decode(message.SerializeToString()) == {
        "image": b"\xff\xd8" + bytes(300),
        "captions": b"one",
    }


@pytest.mark.parametrize("damaged", [b"\xff" * 20, b"\x0a\x7f", b"\x0b", b"\x0a"])
def test_what_is_no_example_is_refused(damaged):
    with pytest.raises(ValueError, match=r"no tf.train.Example"):
        examples.decode(damaged)
