"""`python -m benchmarks` lists the benchmarks; `python -m benchmarks NAME` runs one."""

from __future__ import annotations

import argparse
import json
import pkgutil
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import benchmarks
from benchmarks._harness import Figures, Settings, checksum, describe_machine, in_memory
from spindel.testing.postgres import find_server_binaries

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

_PREFIX = "bench_"
_UNITS = {"rate": "/s", "seconds": "s", "p50": "s", "p95": "s", "p99": "s", "bytes": "bytes", "megabytes": "MB"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; gives the exit code."""
    names = [module.name.removeprefix(_PREFIX) for module in pkgutil.iter_modules(benchmarks.__path__)]
    names = sorted(name for name in names if not name.startswith("_"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    parser.add_argument("name", metavar="NAME", nargs="?", choices=names, help="one of those listed without it")
    parser.add_argument("--size", choices=("small", "large"), default="large", help="small: only a check that it works")
    parser.add_argument("--json", action="store_true", help="one object on standard output, nothing else")
    parser.add_argument(
        "--store", choices=("memory", "sqlite", "postgres"), help="instead of what the benchmark takes by itself"
    )
    parser.add_argument("--rows", type=int, metavar="N", help="how long a history the files begin with")
    parser.add_argument("--dir", type=Path, default=Path(), help="a folder on a real disk; by default this one")
    options = parser.parse_args(arguments)
    if options.name is None:
        for name in names:
            print(f"{name:<10} {_question(_load(name))}")
        return 0
    module = _load(options.name)
    _check(parser, options, module)
    if in_memory(options.dir):
        print(f"{options.dir.resolve()} is in memory, so durable figures mean nothing; use --dir", file=sys.stderr)
    with TemporaryDirectory(prefix=".benchmarks-", dir=options.dir) as folder:
        settings = Settings(size=options.size, store=options.store, rows=options.rows, folder=Path(folder))
        figures: Figures = module.run(settings)
        head = {"name": options.name, "size": options.size, "machine": describe_machine(Path(folder))}
    record = {**head, "repetitions": figures.repetitions, "checksum": checksum(figures.counts), **figures.keys}
    if options.json:
        print(json.dumps(record))
    else:
        _print(record, figures, _question(module))
    return 0


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace, module: ModuleType) -> None:
    """Leave with a sentence if the benchmark can't be run like that, or not here."""
    stores = getattr(module, "STORES", ())
    if options.store is not None and options.store not in stores:
        parser.error(f"{options.name} can't be run with --store {options.store}; see its file for why")
    if options.rows is not None and not (getattr(module, "ROWS", False) and options.rows > 0):
        parser.error(f"{options.name} takes no --rows {options.rows}")
    if options.store == "postgres":
        if options.rows is not None:
            parser.error("--rows fills files of SQLite; it can't be given with --store postgres")
        if find_server_binaries() is None:
            parser.error("--store postgres starts a server of its own, and there is none; install PostgreSQL")
    if not options.dir.is_dir():
        parser.error(f"--dir {options.dir} is no folder")


def _load(name: str) -> ModuleType:
    return import_module(f"{benchmarks.__name__}.{_PREFIX}{name}")


def _question(module: ModuleType) -> str:
    return (module.__doc__ or "").partition("\n")[0]


def _print(record: dict[str, Any], figures: Figures, question: str) -> None:
    print(f"{record['name']}, {record['size']}: {question}")
    print(f"{record['machine']}; medians of {record['repetitions']}\n")
    for key, value in figures.keys.items():
        print(f"  {key:<22} {_show(value):>14} {_unit(key)}".rstrip())
    for note in figures.notes:
        print(f"  {note}")
    counted = ", ".join(f"{name} {count}" for name, count in sorted(figures.counts.items()))
    print(f"\nchecksum {record['checksum']}: {counted}")


def _show(value: float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


def _unit(key: str) -> str:
    return next((unit for end, unit in _UNITS.items() if f"_{end}" in f"_{key}"), "")


if __name__ == "__main__":
    sys.exit(main())
