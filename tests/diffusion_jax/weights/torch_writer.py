"""Write files in torch.save's format without torch."""

import struct
import zipfile

_STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage", "int64": "LongStorage"}


def save(path, arrays):
    """Save a state dict: a zip with a pickle and the bytes of the arrays."""
    key = lambda name: _text(name) if isinstance(name, str) else _int(name)
    parts = [key(name) + _tensor(array, str(i)) for i, (name, array) in enumerate(arrays.items())]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}(" + b"".join(parts) + b"u.")
        archive.writestr("archive/byteorder", b"little")
        for i, array in enumerate(arrays.values()):
            archive.writestr(f"archive/data/{i}", array.tobytes())
        archive.writestr("archive/version", b"3\n")


def _tensor(array, key):
    """Pickle _rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks)."""
    strides = [stride // array.itemsize for stride in array.strides]
    kind = b"ctorch\n" + _STORAGES[str(array.dtype)].encode() + b"\n"
    where = _tuple([_text("storage"), kind, _text(key), _text("cpu"), _int(array.size)]) + b"Q"
    shape, hooks = map(_int, array.shape), b"ccollections\nOrderedDict\n)R"
    values = [where, _int(0), _tuple(shape), _tuple(map(_int, strides)), b"\x89", hooks]
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + _tuple(values) + b"R"


def _text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _int(value):
    return b"J" + struct.pack("<i", value)


def _tuple(values):
    return b"(" + b"".join(values) + b"t"
