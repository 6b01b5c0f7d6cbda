"""Every `console` block of the README and of `docs/` is a session that happens again as it stands there."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.cli.commands import ROOT
from tests.docs.sessions import Session
from tests.docs.test_blocks import PAGES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """A shell in an empty folder."""
    session = Session(tmp_path)
    yield session
    session.close()


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=str(path.relative_to(ROOT))) for path in PAGES if "```console" in path.read_text()],
)
def test_the_session_of_the_page_happens_as_it_says(path: Path, tmp_path: Path, session: Session) -> None:
    page = path.read_text()
    if path.name == "README.md":
        shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("_build", "__pycache__"))
        # The end of the line that also makes an environment, on the folder that the session is about.
        (line,) = re.findall(r"^python3 -m venv .* (\S+/spindel run .*)$", page, re.MULTILINE)
        session.execute(line.replace(" DIR ", " docs "))

    session.run(page, path.name)


@pytest.mark.parametrize(
    "page",
    [
        "```console\n$ echo 1\n2\n```\n",
        "```console\n$ echo 1\n```\n",
        "```console\n$ true\n1\n```\n",
        "```console\n$ echo 1 &\n2\n$ wait\n```\n",
        "```console\n$ echo 1 &\n```\n\n```console\n$ wait\n```\n",
        # The same id on the page, two that were printed.
        "```console\n$ echo {0}1\n{0}2\n$ echo {0}3\n{0}2\n```\n".replace("{0}", "01a22e5f-19ce-7e6c-bba0-9bb1c872f55"),
    ],
)
def test_a_session_that_prints_something_else_fails(page: str, session: Session) -> None:
    with pytest.raises(AssertionError, match=r"page:2: |page doesn't show|page:4: |page:3: |page:6: "):
        session.run(page, "page")


def test_a_session_knows_files_ids_the_background_and_its_end(session: Session) -> None:
    one, other = "01a22e5f-19ce-7e6c-bba0-9bb1c872f557", "01a22e5f-19d5-7434-b77d-1e98e9795d30"
    page = f"""
```{{code-block}} python
:caption: say.py

import signal, sys
print(sys.argv[1:], "at 2026-11-30 21:31:54 in 5.0 s by process 7", flush=True)
if sys.argv[1:]:
    signal.pause()
```

```console
$ echo {one}
{one}
$ python say.py &
[] at 2026-11-30 21:31:55 in 12 ms by process 1234
$ wait; false; echo $?
1
$ python say.py \\
    {one} &
```

Here it has gone on:

```console
['{one}'] at 2026-11-30 21:31:55 in 12 ms by process 1234
$ test {one} = {other}; echo $?
1
$ kill -9 $!
$ printf 'no end'
no end
$ wait
```
"""
    session.run(page, "page")
