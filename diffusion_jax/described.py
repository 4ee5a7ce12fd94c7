"""What the annotations of settings allow, told to people: on command lines and on the page."""

from typing import Any

from diffusion_jax import ranges


def words(hint: Any) -> str:
    """What the annotation of a field allows, for people: "a number in [0, 1]"."""
    if names := options(hint):
        return f"one of {', '.join(names)}"
    known = getattr(hint, "__metadata__", ())
    said = [ranges.WORDS[getattr(hint, "__origin__", hint) if known else hint]]
    said += [f"in {one}" if isinstance(one, str) else f"or {one[0]}" for one in known]
    return " ".join(said)


def options(hint: Any) -> list[str]:
    """The names that the annotation of a field knows; those of a check, as its message has them."""
    known = getattr(hint, "__metadata__", ("",))[0]
    if not callable(known):
        return [] if isinstance(known, str) else list(map(str, known))
    try:
        known("", "_")
    except ValueError as error:
        return str(error).partition(": choose from ")[2].split(", ")
    return []


def allows(hint: Any, value: Any) -> bool:
    """Whether a field of this annotation may have the value."""
    try:
        ranges.check_value("", value, hint)
    except ValueError:
        return False
    return True
