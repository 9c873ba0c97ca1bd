"""Several models in one settings file, with the workers and the names of each."""

import re
from pathlib import Path

import pytest

from infra.stack.configuration import Settings, dump, load
from infra.stack.models.tables import ModelWorkers, worker_counts
from schemas.errors import ConfigError
from schemas.settings import ModelSettings

ROOT = Path(__file__).parents[4]
FILE = """
[worker]
engine = "sim"

[sim]
decode_step_ms = 2.5
running_max = 4

[[models]]
path = "sim"
name = "small"
prefill = 2
decode = 1
adapters = {legal = "adapters/legal"}

[[models]]
path = "org/large"
revision = "abc"
max_model_len = 8_192
replica = 1

[models.sim]
running_max = 16
"""


def load_text(folder: Path, text: str, **options: object) -> Settings:
    file = folder / "trivium.toml"
    file.write_text(text)
    return load(file, **{"environ": {}, **options})  # type: ignore[arg-type]


def test_each_table_is_a_model_with_its_workers_and_engine(tmp_path: Path) -> None:
    settings = load_text(tmp_path, FILE)
    small, large = settings.models
    assert (small.served_name, large.served_name) == ("small", "large")
    assert settings.model is small, "calls that name none get the first"
    assert (large.path, large.revision, large.max_model_len) == ("org/large", "abc", 8_192)
    assert small.adapters == {"legal": "adapters/legal"}
    large_settings = settings.for_model("large")
    assert large_settings.models == (large,)
    assert large_settings.engines == {"sim": {"decode_step_ms": 2.5, "running_max": 16}}
    assert settings.for_model("").models == (small,)
    assert settings.for_model("small").engines == {"sim": {"decode_step_ms": 2.5, "running_max": 4}}
    with pytest.raises(ConfigError, match="model: expected one of small, large, found 'huge'"):
        settings.for_model("huge")


def test_counts_of_workers_come_from_flags_tables_and_usual_ones(tmp_path: Path) -> None:
    settings = load_text(tmp_path, FILE)
    unset: dict[str, int | None] = {"prefill": None, "decode": None, "replica": None}
    assert settings.worker_counts(unset) == {
        "small": {"prefill": 2, "decode": 1, "replica": 0},
        "large": {"prefill": 0, "decode": 0, "replica": 1},
    }
    assert settings.worker_counts({"prefill": 3}) == {
        "small": {"prefill": 3, "decode": 1, "replica": 0},
        "large": {"prefill": 3, "decode": 1, "replica": 1},
    }
    assert worker_counts(ModelWorkers(), {}) == {"prefill": 1, "decode": 1, "replica": 0}


def test_dumped_models_load_back_equal(tmp_path: Path) -> None:
    settings = load_text(tmp_path, FILE)
    text = dump(settings)
    assert load_text(tmp_path, text) == settings
    assert dump(load_text(tmp_path, text)) == text
    single = load_text(tmp_path, "[[models]]\npath = 'x'")
    assert single == Settings(model=ModelSettings(path="x"))
    assert load_text(tmp_path, dump(single)) == single and "[model]" in dump(single)
    single = load_text(tmp_path, "[[models]]\nname = 'a \"quoted\" ü'\nreplica = 0")
    assert load_text(tmp_path, dump(single)) == single


def test_repeated_flag_gives_models_with_the_same_settings(tmp_path: Path) -> None:
    settings = load_text(tmp_path, "[model]\nmax_model_len = 99", models=["a/one", "two"])
    assert [model.served_name for model in settings.models] == ["one", "two"]
    assert [model.max_model_len for model in settings.models] == [99, 99]
    assert load_text(tmp_path, dump(settings)) == settings


def test_models_without_a_name_are_called_as_the_default_of_their_engine(tmp_path: Path) -> None:
    settings = load_text(tmp_path, "[worker]\nengine = 'sim'\n[[models]]\n[[models]]\nname = 'b'")
    assert [model.served_name for model in settings.models] == ["sim", "b"]
    alone = load_text(tmp_path, "")
    assert alone.for_model("smollm2-135m-instruct") == alone


TWO = "[[models]]\nname = 'a'\n[[models]]\n"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("[models]\npath = 'x'", r"models: expected tables, \[\[models\]\], found {'path': 'x'}"),
        ("models = [1]", r"models: expected tables, \[\[models\]\], found \[1\]"),
        ("models = []", "models: expected tables"),
        ("[model]\n[[models]]", r"\[model\]: expected with one model, and the settings file has"),
        (TWO + "pth = 'x'", r"\[\[models\]\], table 2: models.pth: unknown; expected perhaps path"),
        (TWO + "decode = -1", "table 2: models.decode: expected at least 0, found -1"),
        (TWO + "[models.sim]\nrunning_max = 0", "table 2: sim.running_max: expected at least 1"),
        (TWO + "sim = 3", r"table 2: models.sim: expected a table, \[models.sim\], found 3"),
        (TWO + "name = 'a'", "model 2 and model 1 have the same name, 'a'; calls choose"),
        (
            "[[models]]\npath = 'x/a'\n[[models]]\npath = 'y/a'",
            r"model 2 \(y/a\) and model 1 \(x/a",
        ),
        ("[[models]]\n[[models]]", "have the same name, 'smollm2-135m-instruct'"),
        (
            TWO + "name = 'b'\nadapters = {a = 'f'}",
            "the adapter f of model 2 and model 1 have the same name, 'a'",
        ),
        (
            "[[models]]\nadapters = {c = 'f'}\n[[models]]\nname = 'b'\nadapters = {c = 'g'}",
            "the adapter g of model 2 and the adapter f of model 1 have the same name, 'c'",
        ),
        (TWO + "name = 'b@c'", "model 2 has the name 'b@c': expected no @, which stands before"),
        ("[model]\nname = 'b@c'", "the model has the name 'b@c': expected no @"),
        ("[model]\nname = '/b'", "'/b': expected a word before and after each slash; set another"),
        ("[model]\nname = 'b//c'", "expected a word before and after each slash"),
        ("[model]\nname = 'b/../c'", "expected a word before and after each slash"),
        ('[model]\nname = "b\\u0007"', "expected no control characters"),
        ("[model]\nname = ' b'", "and no space at its ends"),
        ("[model]\nadapters = {'' = 'f'}", "expected 1 to 256 characters"),
        (f"[model]\nname = '{'n' * 257}'", "expected 1 to 256 characters"),
        ("[model]\nadapters = {x = 3}", r"model.adapters.x: expected a valid string, found 3"),
    ],
)
def test_error_names_what_is_wrong_with_models(tmp_path: Path, file: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_text(tmp_path, file)


def test_names_may_have_an_organisation(tmp_path: Path) -> None:
    assert load_text(tmp_path, "[model]\nname = 'org/a'").model.served_name == "org/a"


def test_settings_of_one_model_do_not_join_tables(tmp_path: Path) -> None:
    both = "TRIVIUM_MODEL_NAME: expected with one model, and the settings file has"
    with pytest.raises(ConfigError, match=both):
        load_text(tmp_path, FILE, environ={"TRIVIUM_MODEL_NAME": "x"})
    with pytest.raises(ConfigError, match="--model or --revision: expected with one model"):
        load_text(tmp_path, FILE, flags={"model": {"path": "x", "revision": None}})
    with pytest.raises(ConfigError, match="--model or --revision: expected with one model"):
        load_text(tmp_path, FILE, models=["x", "y"])
    load_text(tmp_path, FILE, flags={"model": {"path": None}})


def test_example_of_the_page_loads(tmp_path: Path) -> None:
    page = (ROOT / "infra/docs/operate.md").read_text()
    (example,) = [text for text in re.findall(r"```toml\n(.*?)```", page, re.S) if "[[mod" in text]
    settings = load_text(tmp_path, example)
    assert [model.served_name for model in settings.models] == ["small", "large"]
    assert settings.for_model("large").engines == {"vllm": {"kv_cache_bytes": 4_000_000_000}}
