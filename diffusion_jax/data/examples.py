"""tf.train.Example, the message that ArrayRecord files mostly hold, of byte strings alone.

Its wire format is short enough to be read here, so that neither TensorFlow nor protobuf's generated
code is needed: an Example is {1: Features}, Features are {1: entry} for each of a map's entries
{1: name, 2: Feature}, and a Feature is {1: BytesList}, which is {1: value} for each value.
"""

from collections.abc import Iterator, Mapping

_BYTES = 2  # The wire type of strings and messages.
_FIXED = {1: 8, 5: 4}  # Those of numbers of fixed length, with their bytes.


def encode(features: Mapping[str, bytes]) -> bytes:
    """One byte string a feature."""
    entries = [
        _field(1, name.encode()) + _field(2, _field(1, _field(1, value)))
        for name, value in features.items()
    ]
    return _field(1, b"".join(_field(1, entry) for entry in entries))


def decode(message: bytes) -> dict[str, bytes]:
    """The first value of each feature of byte strings; ValueError if it is no Example."""
    features = {}
    for entry in _values(message, 1, 1):
        name = b"".join(_values(entry, 1))
        value = next(_values(entry, 2, 1, 1), None)
        if value is not None:  # Else a list of numbers, or an empty one.
            features[name.decode(errors="replace")] = value
    return features


def _field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | _BYTES]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    groups = []
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])


def _values(message: bytes, number: int, *path: int) -> Iterator[bytes]:
    """The strings of field `number`; with `path`, those of its messages' fields, and so on."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        kind = tag & 7
        if kind == _BYTES:
            size, at = _read_varint(message, at)
        elif kind == 0:
            (_, end) = _read_varint(message, at)
            size = end - at
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise ValueError(f"no tf.train.Example: wire type {kind} at byte {at}")
        if at + size > len(message):
            raise ValueError(f"no tf.train.Example: {size} bytes at {at} of {len(message)}")
        if tag >> 3 == number and kind == _BYTES:
            value = message[at : at + size]
            yield from _values(value, *path) if path else (value,)
        at += size


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError(f"no tf.train.Example: a number ends at byte {at}")
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
