"""See to all that is held in the service of `orders.py`, from a second process, by the operators' commands alone.

    python docs/examples/orders_operator.py shop

Again and again: `spindel held --json` reads what is held; each hold is decided by looking at the world; and what was
decided goes back, in the very form that was read, to `spindel recover --from -`. When the service has ended its file is
asked what it can prove: `spindel held --db` and `spindel check`.

A service of your own has other codes and other places to look at, but the same question: did it happen?
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final, Literal

PAUSE_SECONDS: Final = 0.2


def spindel(*arguments: str, listed: Any = None) -> tuple[int, Any]:
    """Run a command with `--json`; gives its exit code, and its object or None if it printed none."""
    done = subprocess.run(  # noqa: S603  our own command
        [sys.executable, "-m", "spindel", *arguments, "--json"],
        input=None if listed is None else json.dumps(listed),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None


def decide(hold: Any, folder: Path, told: set[str]) -> Literal["retry", "acknowledge"]:
    """Find out whether what is held has happened: only then it is attested, and only else it is repeated."""
    if hold["code"] == "ConnectionError":
        return "retry"  # nobody was reached, so nothing has happened
    if hold["stage"] == "core":
        return "retry" if (folder / "bench" / hold["run_id"]).exists() else "acknowledge"
    return "acknowledge" if hold["run_id"] in told else "retry"


def main() -> int:
    """Act until the service has ended, then look at what it left."""
    folder = Path(sys.argv[1])
    database, door = str(folder / "orders.db"), str(folder / "door")
    pause = threading.Event()
    rounds = passed = 0
    while (folder / "door").exists():  # a service takes its door away when it ends
        _, held = spindel("held", "--control", door)
        if held is None:  # it was killed, or has ended in this moment
            break
        told = set((folder / "told.txt").read_text().split())
        decided: dict[str, list[Any]] = {"retry": [], "acknowledge": []}
        for hold in held["held"]:
            decided[decide(hold, folder, told)].append(hold)
        for action, holds in decided.items():
            if holds:
                _, done = spindel(
                    "recover", "--from", "-", f"--{action}", "--control", door, listed={**held, "held": holds}
                )
                passed += 0 if done is None else len(done["recovered"])
        if held["held"]:
            rounds += 1
            print(f"round {rounds}: " + ", ".join(f"{action} {len(holds):,}" for action, holds in decided.items()))
        else:
            pause.wait(PAUSE_SECONDS)
    print(f"{passed:,} passed in {rounds} rounds, and the service has ended")
    unproved, _ = spindel("held", "--db", database, "--room", "shop")
    broken, report = spindel("check", "--db", database)
    print(f"{report['runs']:,} Runs; every Job has its witnesses: {not unproved}; every invariant holds: {not broken}")
    return unproved or broken


if __name__ == "__main__":
    sys.exit(main())
