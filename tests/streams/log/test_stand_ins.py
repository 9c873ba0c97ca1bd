"""Modules that stand in for others: names at once, what is behind them when it is used."""

import subprocess
import sys

_USED_LATER = """
import sys
from streams.log.stand_ins import stand_ins
with stand_ins("fractions", "wsgiref", "wsgiref.headers"):
    import fractions
    from fractions import Fraction
    from wsgiref.headers import Headers
assert not {"fractions", "wsgiref"} & set(sys.modules)
half = Fraction(1, 2)
import fractions as real
assert type(half) is real.Fraction and fractions.Fraction is real.Fraction
assert Headers([("a", "b")])["a"] == "b"
"""
_THERE_ALREADY = """
import json, sys
from streams.log.stand_ins import stand_ins
with stand_ins("json"):
    assert sys.modules["json"] is json
    import json as again
assert again is json and sys.modules["json"] is json
"""
_FAILS = """
import sys
from streams.log.stand_ins import stand_ins
try:
    with stand_ins("fractions"):
        raise ImportError
except ImportError:
    pass
assert "fractions" not in sys.modules
"""


def _run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def test_stand_ins_import_module_on_first_use() -> None:
    _run(_USED_LATER)


def test_stand_ins_keep_imported_module() -> None:
    _run(_THERE_ALREADY)


def test_stand_ins_remove_modules_after_error() -> None:
    _run(_FAILS)
