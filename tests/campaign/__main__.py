"""Ends commands at random moments and harms their files, lets them finish, and compares.

    python -m tests.campaign --rounds=100 --seed=0

Each round takes one command (training in one and in two processes, a store of texts, moments, a
sweep, a download, a conversion, a packed model, a judge) and one fault: SIGKILL, SIGTERM or SIGSTOP
at a random moment, a full disk (a small tmpfs, where one can be mounted), files that are damaged or
gone, no more memory (a limit of the address space, and a cgroup where one can be made), a clock set
back, two starts one second apart, or the takeover of a frozen run by another host. Then the same
command runs again until it is done, and all that matters of what it wrote is compared byte for byte
with that of an undisturbed one. A line a round, and a table at the end; the exit code is 1 if
anything differs. --record=FILE keeps each round's outcome: the rounds in it are not run again, so
that a campaign that was stopped goes on by the same command.
"""

import argparse
import json
import pathlib
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence

from tests.campaign import rounds, subjects
from tests.campaign.rounds import Outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the campaign; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="No round begins after these.")
    parser.add_argument("--only", default="", help="Of the commands, those with this in the name.")
    parser.add_argument("--record", type=pathlib.Path, help="A file of outcomes, to go on from.")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        outcomes = campaign(
            pathlib.Path(folder), args.rounds, args.seed, args.minutes, args.only, args.record
        )
    print(table(outcomes))
    return int(not outcomes or any(outcome.different for outcome in outcomes))


def campaign(
    folder: pathlib.Path, count: int, seed: int, minutes: float = 1e9, only: str = "",
    record: pathlib.Path | None = None,
) -> list[Outcome]:  # fmt: skip
    """The outcomes of the rounds, in order; each command's faults come in turn."""
    end, outcomes = time.monotonic() + 60 * minutes, read(record, seed)[:count]
    with subjects.every(folder / "inputs") as (every, trained):
        undisturbed = {}
        plan = rounds.plan({n: s for n, s in every.items() if only in n}, seed)
        for number, (name, fault) in zip(range(count), plan, strict=False):
            if number < len(outcomes):
                continue
            if time.monotonic() > end:
                break
            if name in ("a sweep", "a packed model") and not trained.exists():
                rounds.train_once(every["training"], folder / "trained", trained)
            if name not in undisturbed:
                undisturbed[name] = rounds.undisturbed(every[name], folder / f"undisturbed {name}")
            rng = random.Random(f"{seed} {number}")
            outcome = rounds.run(
                name, every[name], fault, *undisturbed[name], folder / f"{number}", rng
            )
            print(f"{number:3} {outcome}", flush=True)
            outcomes.append(outcome)
            if record:
                with record.open("a") as file:
                    file.write(json.dumps({"seed": seed, **outcome._asdict()}) + "\n")
    return outcomes


def read(record: pathlib.Path | None, seed: int) -> list[Outcome]:
    """The outcomes in a file, in order; ValueError if they are of another seed."""
    lines = record.read_text().splitlines() if record and record.exists() else []
    rows = [json.loads(line) for line in lines]
    if any(row.pop("seed") != seed for row in rows):
        raise ValueError(f"{record} is of another seed than {seed}")
    return [Outcome(**row) for row in rows]


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each command and fault: how often, how it was noticed, what became of it."""
    groups = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.name, outcome.fault].append(outcome)
    lines = ["| command | fault | rounds | hit | the same | how it was noticed |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for (name, fault), some in sorted(groups.items()):
        said = sorted({word for outcome in some for word in outcome.noticed})
        hit, same = sum(o.hit for o in some), sum(not o.different for o in some)
        row = (name, fault, str(len(some)), str(hit), str(same), "; ".join(said))
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
