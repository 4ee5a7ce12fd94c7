"""Keep pictures that browsers send in memory, under names that are hashes of their content."""

import base64
import binascii
import collections
import hashlib
import threading
from typing import Any, NamedTuple

from PIL import ImageOps

from diffusion_jax.files import untrusted

MAX_SIDE = 2_048
"""The largest height and width of a picture, in pixels."""
MAX_BODY = 24 * 2**20
"""The largest size of a request with a picture, in bytes."""
_MAX_BYTES = 2**27  # The total size of the pictures that stay in memory.


class Edit(NamedTuple):
    """How a drawing uses an uploaded picture and a mask.

    `image` and `mask` are names of uploads, or "" for none. `strength` is the share of the
    sampler's steps that are run when the picture is drawn over.
    """

    image: str = ""
    mask: str = ""
    strength: float = 0.8
    enlarge: bool = False
    """Whether a cascade's later stages enlarge the picture. By default, it is drawn over."""


class Uploads:
    """Uploaded pictures, keyed by name. The most recently used pictures stay in memory.

    Several threads may use an object of this class.
    """

    def __init__(self) -> None:
        """Start without uploads."""
        self._files: collections.OrderedDict[str, bytes] = collections.OrderedDict()
        self._lock = threading.Lock()

    def add(self, request: Any) -> dict[str, Any]:
        """Keep the picture of a request {"png": BASE64}, which holds a PNG, JPEG or WebP file.

        Return {"picture": name of the upload, "width": pixels, "height": pixels}. Raises ValueError
        if the file cannot be read, or if a side is larger than MAX_SIDE.
        """
        text = request.get("png") if isinstance(request, dict) else None
        try:
            content = base64.b64decode(text or "", validate=True)
            image = untrusted.open_image(content, untrusted.WEB_FORMATS)
            if max(image.size) <= MAX_SIDE:  # Larger ones are not decoded.
                image.load()
                image = ImageOps.exif_transpose(image)
        except (binascii.Error, TypeError, ValueError, OSError, SyntaxError) as error:
            raise ValueError("the picture cannot be read: send a PNG, JPEG or WebP file in base64") from error
        if max(image.size) > MAX_SIDE:
            raise ValueError(
                f"the picture has {image.width}x{image.height} pixels: choose one with at most "
                f"{MAX_SIDE:,} pixels on each side"
            )
        name = hashlib.blake2b(content, digest_size=12).hexdigest()
        with self._lock:
            self._files[name] = content
            while sum(map(len, self._files.values())) > _MAX_BYTES and len(self._files) > 1:
                self._files.popitem(last=False)
        return {"picture": name, "width": image.width, "height": image.height}

    def file(self, name: str) -> bytes:
        """Return the bytes of an uploaded file. Raises ValueError if it is no longer in memory."""
        with self._lock:
            if name not in self._files:
                raise ValueError("the server has dropped the uploaded picture: choose the file again")
            self._files.move_to_end(name)
            return self._files[name]

    def edit(self, request: Any) -> Edit:
        """Check `request`, the field "edit" of a drawing request, and return it as an Edit.

        Raises ValueError if the field is invalid.
        """
        if not isinstance(request, dict):
            raise ValueError("edit must be a JSON object with image, mask, strength and enlarge")
        edit = Edit(**{k: v for k, v in request.items() if k in Edit._fields})
        for name in (edit.image, edit.mask):
            if not isinstance(name, str):
                raise ValueError("image and mask must be names of uploaded pictures")
            if name:
                self.file(name)
        if type(edit.strength) not in (int, float) or not 0 < edit.strength <= 1:
            raise ValueError(f"strength is {edit.strength!r}: it must be above 0 and at most 1")
        if type(edit.enlarge) is not bool:
            raise ValueError(f"enlarge is {edit.enlarge!r}: it must be true or false")
        if not edit.image:
            return Edit()
        if edit.enlarge:  # Mask and strength have no effect: drop them, so that equal edits match.
            return Edit(edit.image, enlarge=True)
        return edit._replace(strength=float(edit.strength))

    def arguments(self, edit: Edit) -> dict[str, Any]:
        """Return the keyword arguments of Model.draw for an edit, or {} without a picture."""
        if edit.enlarge:
            return {"low_res": untrusted.open_image(self.file(edit.image))}
        opened: dict[str, Any] = {
            kind: untrusted.open_image(self.file(name))
            for kind, name in (("image", edit.image), ("mask", edit.mask))
            if name
        }
        return {**opened, "strength": edit.strength} if opened else {}


def flags(edit: Edit) -> list[str]:
    """Return the flags of the command `sample` for an edit.

    The flags name image.png and mask.png, the files that a user can save from the page.
    """
    if not edit.image:
        return []
    if edit.enlarge:
        return ["--low_res=image.png"]
    mask = ["--mask=mask.png"] if edit.mask else []
    return ["--image=image.png", *mask, f"--strength={edit.strength:g}"]
