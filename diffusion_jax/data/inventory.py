"""Count the files of a data source by kind: the used ones, and those left out for a reason."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from diffusion_jax.files import untrusted

PICTURES, TEXTS, COMPANIONS = "pictures", "texts", "companions"
USED = (PICTURES, TEXTS, COMPANIONS)
"""Kinds of files that are used. Companions are files of known formats that this run ignores, such
as the .json files that img2dataset writes beside captions. Every other kind is a reason to leave a
file out, such as "format" or "no_caption"; docs/data.md lists the reasons."""
_NAMED = 3  # Number of files of a kind that the inventory names.


class Inventory:
    """The files of a data source: the number of each kind, and the names of the first ones.

    The files of kinds in USED are used. Any other kind is the reason for which files are left out.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None):
        """Start an empty inventory, or restore one from the JSON value that `saved` returned."""
        saved = saved or {"counts": {}, "first": {}}
        self.counts = collections.Counter[str](saved["counts"])
        self.first: dict[str, list[str]] = {k: list(names) for k, names in saved["first"].items()}

    def add(self, kind: str, names: Sequence[str], number: int | None = None) -> None:
        """Add files of one kind.

        Args:
            kind: one of USED, or the reason for which the files are left out, as an identifier.
            names: names of the files, or of the first ones.
            number: the number of files; None means len(names). 0 adds nothing.
        """
        number = len(names) if number is None else number
        if number:
            self.counts[kind] += number
            first = self.first.setdefault(kind, [])
            first += names[: self.room(kind)]

    def room(self, kind: str) -> int:
        """Return how many more names of this kind are kept."""
        return _NAMED - len(self.first.get(kind, []))

    def update(self, other: "Inventory") -> None:
        """Add all files of another inventory."""
        for kind, number in other.counts.items():
            self.add(kind, other.first[kind], number)

    def left_out(self) -> dict[str, int]:
        """Return the number of files that are left out, keyed by reason."""
        return {kind: number for kind, number in self.counts.items() if kind not in USED}

    def damaged(self) -> int:
        """Return the number of damaged files: those whose reason starts with broken or truncated.

        A damaged stretch of a tar counts as at least one file.
        """
        counts = self.left_out().items()
        return sum(n for reason, n in counts if reason.startswith(("broken", "truncated")))

    def saved(self) -> dict[str, Any]:
        """Return the inventory as a JSON value."""
        return {"counts": dict(self.counts), "first": self.first}

    def rows(self) -> list[tuple[str, str]]:
        """Return (label, text) pairs for printing: the used files, then a pair for each reason."""
        used = ", ".join(f"{self.counts[kind]:,} {kind}" for kind in USED if self.counts[kind])
        rows = [("files", used or "none")]
        for reason, number in self.left_out().items():
            names = ", ".join(self.first[reason] + ["..."] * (number > len(self.first[reason])))
            rows.append(("left out", untrusted.printable(f"{number:,} {reason}: {names}")))
        return rows


class LeftOut(Inventory):
    """An inventory that also collects the name of each left-out file, for a table."""

    def __init__(self):
        super().__init__()
        self._new: list[tuple[str, str]] = []

    def add(self, kind: str, names: Sequence[str], number: int | None = None) -> None:
        """Add files of one kind, and keep the names of those that are left out."""
        super().add(kind, names, number)
        if kind not in USED and number != 0:
            self._new += [(name, kind) for name in names]

    def take(self) -> list[tuple[str, str]]:
        """Return (name, reason) of the files that were left out since the last call."""
        taken, self._new = self._new, []
        return taken
