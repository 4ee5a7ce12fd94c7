"""Make Orbax and TensorStore read and write checkpoints in buckets: gs:// and s3://.

Object stores cannot rename files. So Orbax writes a checkpoint under its final name, and writes a
commit file last. Each process writes its parts of arrays directly from memory with TensorStore's
drivers. TensorStore supports both stores, but Orbax 0.12 supports only Google's. So this module
replaces some private functions of Orbax and etils, which the extra [buckets] pins. Checkpoints in
both stores have the same layout.
"""

import functools
import os
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from diffusion_jax.files import remote

_SCHEMES = tuple(f"{scheme}://" for scheme in remote.SCHEMES)


def absolute(url: str) -> epath.Path:
    """Return a folder in a bucket as a path for Orbax, and prepare Orbax for buckets."""
    remote.system(url.partition("://")[0])  # Raises an error if the store's package is missing.
    _prepare()
    return epath.Path(url)


@functools.cache
def _prepare() -> None:
    # Imported here, so that runs in local folders do not depend on Orbax's private modules.
    from etils.epath import gpath
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    replaced = {
        gcs_utils: ("_GCS_PATH_PREFIX", "get_kvstore_for_gcs"),
        tensorstore_utils: ("_use_gcs_driver", "_normalize_path"),
    }
    missing = [name for module in replaced for name in replaced[module] if not hasattr(module, name)]
    if missing:
        raise ValueError(
            f"orbax-checkpoint {ocp.__version__} cannot write to buckets (it lacks "
            f'{", ".join(missing)}): pip install -e ".[buckets]"'
        )
    # epath prefers TensorFlow's file systems, which support neither S3 nor emulators.
    gpath._is_tf_installed = lambda: False
    google = gcs_utils.get_kvstore_for_gcs
    gcs_utils._GCS_PATH_PREFIX = _SCHEMES
    gcs_utils.get_kvstore_for_gcs = lambda path: _amazon(path) or google(path)
    tensorstore_utils._use_gcs_driver = lambda directory: directory.startswith(_SCHEMES)
    tensorstore_utils._normalize_path = _normalized
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):  # Read by Google's libraries, too.
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)


def _amazon(path: str) -> dict[str, Any] | None:
    """Return the TensorStore spec of a folder in an S3 bucket, or None for other paths."""
    if not path.startswith("s3://"):
        return None
    bucket, _, inside = path.removeprefix("s3://").partition("/")
    settings = {
        "endpoint": os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
        "aws_region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
    }
    if settings["endpoint"]:  # Only Amazon's own stores report their region.
        settings["aws_region"] = settings["aws_region"] or "us-east-1"
    options: dict[str, Any] = {name: value for name, value in settings.items() if value}
    if "AWS_ACCESS_KEY_ID" in os.environ:  # The default warns about missing credential files.
        options["aws_credentials"] = {"type": "environment"}
    return {"driver": "s3", "bucket": bucket, "path": inside, **options}


def _normalized(path: str) -> str:
    scheme, separator, folder = path.partition("://")
    return scheme + separator + os.path.normpath(folder) if separator else os.path.normpath(path)
