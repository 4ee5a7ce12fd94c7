"""List the commands of a package: the modules that `python -m` can run, with one line each."""

import ast
import difflib
import pathlib
import re
import sys

from diffusion_jax import exits

_ROOT = pathlib.Path(__file__).parents[1]
_SHARED = "diffusion_jax"
_MAIN = re.compile(r'^if __name__ == "__main__":', re.MULTILINE)


def main(package: str) -> None:
    """Print the commands of a package and of diffusion_jax, which all packages share.

    `python -m PACKAGE` calls this function. With arguments, the process prints an error that names
    the command to use instead, and exits with code 2.
    """
    own, shared = find(package), find(_SHARED)
    if len(sys.argv) > 1:
        word = sys.argv[1]
        names = [name.partition(".")[2] for name in own]
        meant = (difflib.get_close_matches(word, names, 1) or ["COMMAND"])[0]
        listed = ", ".join(names)
        message = f"unknown command {word!r}: write python -m {package}.{meant}; commands: {listed}"
        print(f"error: {message}", file=sys.stderr)
        sys.exit(exits.REFUSED)
    with exits.unless_unread():
        print(f"python -m {package}.COMMAND --help describes a command and its flags.\n")
        _print(own)
        print("\nCommands for the models of all packages:\n")
        _print(shared)


def find(package: str) -> dict[str, str]:
    """Map each command, such as imagen_jax.train, to the first line of its module's docstring.

    The files are parsed, not imported, because importing them would load large libraries.
    """
    commands = {}
    for path in sorted((_ROOT / package).rglob("*.py")):
        text = path.read_text()
        parts = path.relative_to(_ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__main__" else parts)
        if _MAIN.search(text) and module != package:
            commands[module] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return commands


def _print(commands: dict[str, str]) -> None:
    width = max(map(len, commands))
    for name, line in commands.items():
        print(f"  {name:<{width}}  {line}")
