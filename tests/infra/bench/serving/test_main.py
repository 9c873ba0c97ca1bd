"""The options of the serving benchmark."""

from infra.bench.serving.cells import QUICK, ServingOptions
from infra.bench.serving.contenders import NAMES
from infra.bench.serving.main import BENCHMARK

parse = BENCHMARK.options


def test_parser_reads_serving_options() -> None:
    assert parse([]) == (ServingOptions(), False)
    assert parse(["--quick", "--json"]) == (QUICK, True)
    options, _ = parse(["--quick", "--streams", "1", "2", "--seconds", "3", "--peers", "direct"])
    assert (options.streams, options.seconds, options.peers) == ((1, 2), 3.0, ("direct",))
    assert (
        options.repeats == QUICK.repeats
        and ServingOptions().repeats >= 5
        and ServingOptions().peers == NAMES
    )
