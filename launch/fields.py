"""Checks of the strings in a job file, which launchers put into scripts and manifests."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_MULTILINE = ("job.slurm.setup", "job.gke.patch")
_KUBERNETES = (r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?", "use lower-case letters, digits, - and .")
_FORMS = {
    "job.name": (
        r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?",
        "use at most 40 lower-case letters, digits and dashes",
    ),
    "job.secrets": (r"[A-Za-z_]\w*", "write names of environment variables, such as HF_TOKEN"),
    "job.slurm.partition": (r"[\w.,-]*", "use letters, digits and . , _ -"),
    "job.slurm.account": (r"[\w.@-]*", "use letters, digits and . @ _ -"),
    "job.gke.namespace": _KUBERNETES,
    "job.gke.service_account": _KUBERNETES,
    "job.gke.queue": _KUBERNETES,
    "job.gke.secret": _KUBERNETES,
}
"""Allowed forms of some fields, as (regular expression, advice for the error message)."""


def check(value: Any, field: str = "job") -> None:
    """Check a field of a job file, or all fields of a group.

    A string must be one line without control characters, unless it is a shell command or YAML.
    Some names, for example job.name, must also match a pattern. A string that breaks these rules
    could change other parts of the script or manifest into which it is inserted.

    Raises:
        ValueError: A string breaks these rules.
    """
    if isinstance(value, Mapping):
        for name, part in value.items():
            check(part, f"{field}.{name}")
    elif isinstance(value, str):
        form, advice = _FORMS.get(field, (".*", ""))
        if field not in _MULTILINE and _CONTROL.search(value):
            raise ValueError(f"{field} holds {value!r}: remove line breaks and control characters")
        if not re.fullmatch(form, value, re.DOTALL | re.ASCII):
            raise ValueError(f"{field} is {value!r}: {advice}")
    elif isinstance(value, Sequence):
        for part in value:
            check(part, field)
