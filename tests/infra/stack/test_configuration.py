"""One settings file for all: precedence, unknown names, and a dump that reads back."""

from pathlib import Path

import pytest

from infra.stack.configuration import Settings, dump, load, secrets_environ, without_sections
from schemas.errors import ConfigError

FILE = """
[log]
bootstrap = "kafka:9092"
session_partitions = 8

[gateway]
port = 9000
api_keys = ["one", "two"]

[sim]
decode_step_ms = 2.5
"""


def test_flags_override_environment_and_environment_overrides_file(tmp_path: Path) -> None:
    file = tmp_path / "trivium.toml"
    file.write_text(FILE)
    environ = {"TRIVIUM_GATEWAY_PORT": "9001", "TRIVIUM_LOG_SESSION_PARTITIONS": "9"}
    settings = load(file, environ=environ, flags={"gateway": {"port": 9002, "host": None}})
    assert settings.log.bootstrap == "kafka:9092"
    assert settings.log.session_partitions == 9
    assert settings.gateway.port == 9002
    assert settings.gateway.host == "127.0.0.1", "a flag of None is no flag"
    assert settings.gateway.api_keys == ("one", "two")
    assert settings.engines == {"sim": {"decode_step_ms": 2.5}}


def test_settings_file_comes_from_flag_environment_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(environ={}) == Settings()
    (tmp_path / "trivium.toml").write_text("[gateway]\nport = 1")
    (tmp_path / "other.toml").write_text("[gateway]\nport = 2")
    assert load(environ={}).gateway.port == 1
    assert load(environ={"TRIVIUM_CONFIG": "other.toml"}).gateway.port == 2
    assert load(tmp_path / "trivium.toml", environ={"TRIVIUM_CONFIG": "x"}).gateway.port == 1


@pytest.mark.parametrize(
    ("file", "environ", "message"),
    [
        ("[gatway]\nport = 1", {}, r"\[gatway\]: unknown section; expected one of log, broker"),
        ("port = 1", {}, "port"),
        ("log = 1", {}, r"log: expected a section, \[log\], found 1"),
        ("[gateway]\nprot = 1", {}, "gateway.prot: unknown; expected perhaps port"),
        ("[gateway]\nport = 'x'", {}, "gateway.port: expected a valid integer, found 'x'"),
        (
            "[gateway]\napi_keys = [1]",
            {},
            r"gateway.api_keys\[0\]: expected a valid string, found something else",
        ),
        (
            "[gateway]\napi_keys = 'x'",
            {},
            "gateway.api_keys: expected a valid tuple, found something else",
        ),
        ("[worker]\nengine = 'x'", {}, "worker.engine: expected one of sim, vllm, found 'x'"),
        ("[sim]\nrunning_mix = 1", {}, "sim.running_mix: unknown"),
        ("[vllm]\nrunning_max = 0", {}, "vllm.running_max: expected at least 1"),
        ("[gateway", {}, "expected TOML"),
        ("", {"TRIVIUM_GATEWAY_PROT": "1"}, "TRIVIUM_GATEWAY_PROT: unknown"),
        ("", {"TRIVIUM_GATEWAY_PORT": "x"}, "GATEWAY_PORT: expected a valid integer, .* found 'x'"),
        ("", {"TRIVIUM_NONSENSE": "1"}, "TRIVIUM_NONSENSE: unknown; expected TRIVIUM_HOME"),
    ],
)
def test_configuration_error_names_bad_setting(
    tmp_path: Path, file: str, environ: dict[str, str], message: str
) -> None:
    path = tmp_path / "trivium.toml"
    path.write_text(file)
    with pytest.raises(ConfigError, match=message):
        load(path, environ=environ)


def test_configuration_error_names_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml: no such settings file"):
        load(tmp_path / "absent.toml", environ={})


def test_settings_dump_loads_back_equal(tmp_path: Path) -> None:
    file = tmp_path / "trivium.toml"
    file.write_text(FILE)
    settings = load(file, environ={"TRIVIUM_LOG_TOPIC_PREFIX": 'quote " and \\ and ü'})
    file.write_text(dump(settings))
    assert load(file, environ=secrets_environ(settings)) == settings


def test_without_sections_keeps_engine_variables() -> None:
    environ = {"PATH": "x", "TRIVIUM_LOG_BOOTSTRAP": "y", "TRIVIUM_SIM_RUNNING_MAX": "3"}
    assert without_sections(environ) == {"PATH": "x", "TRIVIUM_SIM_RUNNING_MAX": "3"}
