"""Count the lines of code in each folder, without docstrings, comments and empty lines.

    python -m tests.budget [--set]

budget.txt limits the lines of each folder; test_architecture.py checks this. To raise a limit, edit
its number, and give the reason in the commit. --set rewrites all limits: the counts, rounded up to
the next 50.
"""

import ast
import collections
import io
import pathlib
import sys
import tokenize

ROOT = pathlib.Path(__file__).parents[1]
LIMITS = ROOT / "tests" / "budget.txt"
PACKAGES = ("diffusion_jax", "imagen_jax", "sd_jax", "launch", "configs", "benchmarks")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Return the number of lines of a Python file that hold code.

    A string that is a statement of its own, such as a docstring, is no code.
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(lines)


def counts() -> dict[str, int]:
    """Map each package, and each folder directly in a package, to its lines of code.

    The lines of deeper folders count for the folder in the package.
    """
    lines: collections.Counter[str] = collections.Counter()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).parts[:-1]
            lines["/".join(parts[:2])] += code_lines(path.read_text())
    return dict(sorted(lines.items()))


def limits() -> dict[str, int]:
    """Read budget.txt, which has a folder and its largest number of lines on each line."""
    rows = (line.split() for line in LIMITS.read_text().splitlines())
    return {folder: int(number) for folder, number in rows}


def main() -> None:
    """Print the lines of code and the limit of each folder; with --set, write the limits first."""
    now = counts()
    if sys.argv[1:] == ["--set"]:
        rounded = {folder: -(-count // 50) * 50 for folder, count in now.items()}
        LIMITS.write_text("".join(f"{folder} {limit}\n" for folder, limit in rounded.items()))
    for folder, count in now.items():
        print(f"{folder:<25}{count:>7,} of {limits().get(folder, 0):,}")
    print(f"{'all':<25}{sum(now.values()):>7,}")


if __name__ == "__main__":
    main()
