"""Orbax's and TensorStore's way into buckets: gs:// as they come, s3:// added.

Orbax writes a checkpoint where there is no rename under its last name, and a commit file after all
else; arrays go through TensorStore's own drivers, each process its shards, from memory to the
store. Of the two stores TensorStore knows both and Orbax 0.12 Google's alone, which is why four
functions of it are replaced here. What differs from GCS in a checkpoint of S3 is nothing.
"""

import functools
import os
from typing import Any

from etils import epath

from diffusion_jax.machine import remote

_SCHEMES = tuple(f"{scheme}://" for scheme in remote.SCHEMES)


def absolute(url: str) -> epath.Path:
    """A folder in a bucket as Orbax wants it."""
    remote.system(url.partition("://")[0])  # Or its package is not installed.
    _prepare()
    return epath.Path(url)


@functools.cache
def _prepare() -> None:
    # Here, so that runs in folders need none of what is Orbax's own.
    from etils.epath import gpath
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    # TensorFlow's file systems, which epath prefers where it is installed, lack S3 and emulators.
    gpath._is_tf_installed = lambda: False
    google = gcs_utils.get_kvstore_for_gcs
    gcs_utils._GCS_PATH_PREFIX = _SCHEMES
    gcs_utils.get_kvstore_for_gcs = lambda path: _amazon(path) or google(path)
    tensorstore_utils._use_gcs_driver = lambda directory: directory.startswith(_SCHEMES)
    tensorstore_utils._normalize_path = _normalized
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):  # As Google's own libraries read it.
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)


def _amazon(path: str) -> dict[str, Any] | None:
    """TensorStore's words for a folder in a bucket of S3."""
    if not path.startswith("s3://"):
        return None
    bucket, _, inside = path.removeprefix("s3://").partition("/")
    where = {
        "endpoint": os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
        "aws_region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
    }
    if where["endpoint"]:  # Of another store than Amazon's, whose region it cannot ask for.
        where["aws_region"] = where["aws_region"] or "us-east-1"
    known: dict[str, Any] = {name: value for name, value in where.items() if value}
    if "AWS_ACCESS_KEY_ID" in os.environ:  # Or it complains first of files that are not there.
        known["aws_credentials"] = {"type": "environment"}
    return {"driver": "s3", "bucket": bucket, "path": inside, **known}


def _normalized(path: str) -> str:
    scheme, separator, rest = path.partition("://")
    return scheme + separator + os.path.normpath(rest) if separator else os.path.normpath(path)
