"""Kill commands at random moments, damage their files, let them finish, and compare the results.

    python -m tests.campaign --rounds=100 --seed=0

Each round runs one command (training in one and in two processes and into a bucket, a store of
texts, moments, a sweep, a download, a conversion, a packed model, a judge) and one fault: SIGKILL,
SIGTERM or SIGSTOP at a random moment, a full disk (a small tmpfs, if it can be mounted), damaged or
missing files, no more memory (a limit of the address space, or a cgroup if it can be created), a
clock set back or forward, SIGKILL in a compilation, save or drawing, or in a folder with an odd
path, a bucket that fails, two runs that fill a cache of programs, two starts one second apart, or
another host that takes over a frozen run. Then the same command runs again until it is done, and
its results are compared byte for byte with those of an undisturbed run.

It prints a line per round and a table. The exit code is 1 if anything differs. --record=FILE stores
the outcome of each round. Rounds in it are not run again, so that the same command continues a
stopped campaign.
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
    """Runs the campaign, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="No round begins after these.")
    parser.add_argument("--only", default="", help="Only rounds with this in 'command, fault'.")
    parser.add_argument("--record", type=pathlib.Path, help="A file of outcomes, to go on from.")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        outcomes = campaign(pathlib.Path(folder), args.rounds, args.seed, args.minutes, args.only, args.record)
    print(table(outcomes))
    return int(not outcomes or any(outcome.different for outcome in outcomes))


def campaign(
    folder: pathlib.Path,
    count: int,
    seed: int,
    minutes: float = 1e9,
    only: str = "",
    record: pathlib.Path | None = None,
) -> list[Outcome]:
    """Run rounds and return their outcomes in order. Each command gets its faults in turn."""
    end, outcomes = time.monotonic() + 60 * minutes, read(record, seed)[:count]
    with subjects.every(folder / "inputs") as (every, trained):
        undisturbed = {}
        plan = rounds.plan(every, seed, only)
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
            outcome = rounds.run(name, every[name], fault, *undisturbed[name], folder / f"{number}", rng)
            print(f"{number:3} {outcome}", flush=True)
            outcomes.append(outcome)
            if record:
                with record.open("a") as file:
                    file.write(json.dumps({"seed": seed, **outcome._asdict()}) + "\n")
    return outcomes


def read(record: pathlib.Path | None, seed: int) -> list[Outcome]:
    """Return the outcomes in a file in order. Raise ValueError if they are of another seed."""
    lines = record.read_text().splitlines() if record and record.exists() else []
    rows = [json.loads(line) for line in lines]
    if any(row.pop("seed") != seed for row in rows):
        raise ValueError(f"{record} is of another seed than {seed}")
    return [Outcome(**row) for row in rows]


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a table with a row for each command and fault."""
    groups = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.name, outcome.fault].append(outcome)
    lines = ["| command | fault | rounds | hit | the same | how it was noticed |", "|---|---|---|---|---|---|"]
    for (name, fault), some in sorted(groups.items()):
        noticed = sorted({word for outcome in some for word in outcome.noticed})
        hit, same = sum(o.hit for o in some), sum(not o.different for o in some)
        row = (name, fault, str(len(some)), str(hit), str(same), "; ".join(noticed))
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
