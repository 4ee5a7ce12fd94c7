"""Arrow files of Hugging Face's `save_to_disk`, mapped into memory and read at random."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

from diffusion_jax.data import records
from diffusion_jax.data.pictures import Shapes
from diffusion_jax.data.records import Record, Records
from diffusion_jax.settings import Data


def open_source(data: Data, _: Shapes) -> Records:
    """The rows of a config's folder."""
    return Arrow(records.path_of(data), data.text)


class Arrow(Records):
    """The rows of a data set that Hugging Face's `save_to_disk` wrote.

    `path` is the folder with the .arrow files of one split; `text` the column of the captions.
    Images are those of a column of datasets.Image (the first, if there are several).
    """

    def __init__(self, path: str | os.PathLike[str], text: str = "text"):
        """Maps the files; FileNotFoundError, or ValueError for other columns or no rows."""
        import pyarrow  # Slow to import, and few data sets need it.

        self._root = pathlib.Path(path)
        if not self._root.exists():
            raise FileNotFoundError(f"no data at {path}: write it with dataset.save_to_disk")
        paths = sorted(self._root.glob("*.arrow"))
        if not paths:
            splits = ", ".join(sorted(p.parent.name for p in self._root.glob("*/state.json")))
            raise ValueError(f"no .arrow in {path}: its splits are {splits or 'none'}, choose one")
        maps = [pyarrow.ipc.open_stream(pyarrow.memory_map(str(f))).read_all() for f in paths]
        table = pyarrow.concat_tables(maps)
        images = [f.name for f in table.schema if _is_image(f.type)]
        if not images or text not in table.column_names or not len(table):
            raise ValueError(
                f"{path} has {len(table)} rows of {', '.join(table.column_names)}, images are in "
                f"{images or 'none of them'}: name the column of captions with data.text"
            )
        self._images, self._texts = table[images[0]], table[text]

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._texts)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Copies the rows; OSError if an image that lies outside has gone."""
        return [self._read(index) for index in indices]

    def _read(self, index: int) -> Record:
        image, text = self._images[index].as_py() or {}, self._texts[index].as_py()
        contents = image.get("bytes")
        if contents is None and image.get("path"):
            contents = (self._root / image["path"]).read_bytes()
        return Record(contents or b"", records.cell_text(text), f"{self._root}, row {index}")


def _is_image(kind: Any) -> bool:
    """Arrow's form of datasets.Image: a struct of the file's bytes and of its path."""
    names = {kind.field(i).name for i in range(kind.num_fields)}
    return names == {"bytes", "path"}
