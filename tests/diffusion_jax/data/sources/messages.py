"""Messages of the type tf.train.Example, and ArrayRecord files of them."""

from diffusion_jax.data import tf_examples
from diffusion_jax.data.sources import arrayrecord


def encode(texts, numbers=()):
    """Encode features: {name: list of bytes} and {name: list of floats}."""
    example = tf_examples.Example()
    for name, values in texts.items():
        example.features.feature[name].bytes_list.value.extend(values)
    for name, values in dict(numbers).items():
        example.features.feature[name].float_list.value.extend(values)
    return example.SerializeToString()


def write(path, *messages):
    writer = arrayrecord.array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for message in messages:
        writer.write(message)
    writer.close()
