"""What a deployment leaves on disk and in messages, for its owner alone."""

import os
import sys
from pathlib import Path

import pytest

from infra.broker.node import Broker
from infra.processes.supervisor import ProcessSpec, Supervisor
from infra.stack.configuration import Settings, dump, load, secrets_environ
from infra.stack.plan import StackPlan, process_specs
from infra.stack.statefile import StackFiles
from schemas.errors import ConfigError
from schemas.state_folder import private_folder
from tests.infra.broker.test_node import QUICK
from tests.waits import until

SECRETS = ("hunter2", "key-one", "key-two", "registry-pass")
FILE = """
[log]
sasl_username = "me"
sasl_password = "hunter2"
schema_registry = "http://me:registry-pass@registry:8081"
[gateway]
api_keys = ["key-one", "key-two"]
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    file = tmp_path / "trivium.toml"
    file.write_text(FILE)
    return load(file, environ={})


def exposed(folder: Path) -> list[str]:
    """Whatever another user could read."""
    paths = [folder, *folder.rglob("*")]
    return [f"{path}: {path.stat().st_mode:o}" for path in paths if path.stat().st_mode & 0o077]


def test_secrets_are_absent_from_dump_repr_and_commands(settings: Settings, tmp_path: Path) -> None:
    """Processes get them by their environment."""
    written, settings_text = dump(settings), repr(settings)
    assert not [secret for secret in SECRETS if secret in written or secret in settings_text]
    specs = process_specs(
        StackPlan(),
        folder=tmp_path,
        config=tmp_path / "stack.toml",
        engine="sim",
        gateway_port=0,
        secrets=secrets_environ(settings),
    )
    (tmp_path / "stack.toml").write_text(written)
    assert not [secret for spec in specs for secret in SECRETS if secret in " ".join(spec.command)]
    for spec in specs:
        names = {name: value for name, value in spec.env.items() if name.startswith("TRIVIUM_")}
        process_settings = load(tmp_path / "stack.toml", environ=names)
        assert process_settings.log == settings.log
        is_asked = spec.name.startswith("gateway")
        assert process_settings.gateway.api_keys == (settings.gateway.api_keys if is_asked else ())


def test_secrets_load_from_files(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hunter2\n")
    (tmp_path / "keys").write_text("key-one\n\nkey-two\n")
    (tmp_path / "trivium.toml").write_text(f"[log]\nsasl_password_file = '{tmp_path}/password'\n")
    environ = {"TRIVIUM_GATEWAY_API_KEYS_FILE": f"{tmp_path}/keys"}
    loaded_settings = load(tmp_path / "trivium.toml", environ=environ)
    assert loaded_settings.log.sasl_password == "hunter2"
    assert loaded_settings.gateway.api_keys == ("key-one", "key-two")
    assert load(environ={"TRIVIUM_LOG_SASL_PASSWORD": "x"}).log.sasl_password == "x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[log]\nsasl_password_file = '/absent'", "expected a file with the secret: .*No such"),
        ("[log]\nsasl_password_file = '/dev/null'", "expected one line, found 0 in /dev/null"),
        ("[log]\nbootstrap_file = 'x'", "log.bootstrap_file: unknown"),
        ("[log]\nsasl_password = 12345", "sasl_password: expected a valid string, found something"),
        ("[gateway]\napi_keys = ['a,b']", "gateway.api_keys: expected keys without"),
    ],
)
def test_configuration_error_does_not_quote_secrets(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "trivium.toml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path / "trivium.toml", environ={})
    assert "12345" not in str(caught.value)
    assert "a,b" not in str(caught.value)


async def test_process_files_are_private_under_any_umask(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o755)
    before = os.umask(0o022)
    supervisor, files = Supervisor(), StackFiles(tmp_path / "home")
    try:
        files.lock()
        code = f"open({str(tmp_path / 'home' / 'written')!r}, 'w').close()"
        process = supervisor.start(
            ProcessSpec(
                name="one",
                command=(sys.executable, "-c", code),
                log_file=tmp_path / "home" / "logs" / "one.log",
                restart=False,
            )
        )
        await until(lambda: process.failed)
        assert (tmp_path / "home" / "written").stat().st_mode & 0o077 == 0
        assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "home" / "logs").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
        files.release()
        await supervisor.stop()


def test_private_folder_rejects_world_writable_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(ConfigError, match="expected a folder of our own, found one that others"):
        private_folder(tmp_path)


def test_broker_data_are_private(tmp_path: Path, bootstrap: str) -> None:
    broker = Broker(QUICK, tmp_path / "broker", tethered=True)
    before = os.umask(0o022)
    try:
        broker.start()
        assert exposed(broker.folder / "data") == []
        assert broker.folder.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
        broker.reset()
