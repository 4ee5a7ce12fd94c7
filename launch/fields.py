"""Checks of the strings in a job file, which launchers put into scripts and manifests."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_MULTILINE = ("job.slurm.setup", "job.gke.patch")
_KUBERNETES = (
    r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?",
    "use lower-case letters, digits, dashes and dots, and start and end with a letter or digit",
)
_FORMS = {
    "job.name": (
        r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?",
        "use at most 40 lower-case letters, digits and dashes; start with a letter and do not end with a dash",
    ),
    "job.secrets": (r"[A-Za-z_]\w*", "write names of environment variables, such as HF_TOKEN"),
    "job.slurm.partition": (r"[\w.,-]*", "use letters, digits and . , _ -"),
    "job.slurm.account": (r"[\w.@-]*", "use letters, digits and . @ _ -"),
    "job.gke.namespace": _KUBERNETES,
    "job.gke.service_account": _KUBERNETES,
    "job.gke.queue": _KUBERNETES,
    "job.gke.secret": _KUBERNETES,
}
"""Allowed forms of some fields, by field name: (regular expression, advice for the error)."""


def check(value: Any, field: str = "job") -> None:
    """Check the strings in the value of a job's field, or of a whole group of fields.

    `field` is the name of the field or group, such as "job.gke". Every string must be one line
    without control characters, except in job.slurm.setup (shell commands) and job.gke.patch (YAML).
    Some names, such as job.name, must also match a pattern. Strings that break these rules could
    change parts of the script or manifest that belong to other fields.

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
