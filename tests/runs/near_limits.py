"""At the end of a run: tests that took more than half of the time after which they are ended.

On a machine half as fast they would fail. Each process of a run puts a test's limit into its
reports; whoever prints the summary adds up how long its parts took.
"""

from collections import Counter

import pytest

SHARE_MAX = 0.5
LIMIT = "limit_s"  # name of the property in reports


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(NearLimits())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        item.user_properties.append((LIMIT, _limit_s(config, item)))


def _limit_s(config: pytest.Config, item: pytest.Item) -> float:
    """As pytest-timeout finds it; 0 is none."""
    marker, option = item.get_closest_marker("timeout"), config.getoption("timeout")
    if marker is not None:
        return float(marker.args[0])
    return float((config.getini("timeout") if option is None else option) or 0)


class NearLimits:
    """Listens to reports, which come from all processes of the run."""

    def __init__(self) -> None:
        self._limits_s: dict[str, float] = {}
        self._spent_s = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One of the parts of a test: set up, call, tear down."""
        self._limits_s[report.nodeid] = float(str(dict(report.user_properties).get(LIMIT, 0)))
        self._spent_s[report.nodeid] += report.duration  # type: ignore[assignment]  # seconds

    def lines(self) -> list[str]:
        """The nearest first."""
        limits_s = {name: limit_s for name, limit_s in self._limits_s.items() if limit_s}
        shares = {name: self._spent_s[name] / limit_s for name, limit_s in limits_s.items()}
        return [
            f"{share:4.0%} of {limits_s[name]:g} s: {name}"
            for name, share in sorted(shares.items(), key=lambda pair: -pair[1])
            if share > SHARE_MAX
        ]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Their own section, where there are any."""
        if lines := self.lines():
            terminalreporter.section("took more than half of their timeout")
            for line in lines:
                terminalreporter.line(line)
