"""What the whole suite shares."""

from __future__ import annotations

from importlib.metadata import entry_points

# Where spindel is installed, pytest has loaded its plugin already, and would refuse it a second time.
if not entry_points(group="pytest11", name="spindel"):
    pytest_plugins = ["spindel.testing.plugin"]
